"""What a schedule costs: counts, routes, seconds and rounding. Nothing here imports JAX."""

from ringcoll.costs.counts import HostsPrice as HostsPrice
from ringcoll.costs.counts import Price as Price
from ringcoll.costs.counts import TourPrice as TourPrice
from ringcoll.costs.counts import price as price
from ringcoll.costs.counts import price_backward as price_backward
from ringcoll.costs.counts import price_on_hosts as price_on_hosts
from ringcoll.costs.counts import price_tour as price_tour
from ringcoll.costs.counts import wire_bytes as wire_bytes
from ringcoll.costs.machines import DEVICES as DEVICES
from ringcoll.costs.machines import KINDS as KINDS
from ringcoll.costs.machines import SWITCHES as SWITCHES
from ringcoll.costs.model import Model as Model
from ringcoll.costs.model import Range as Range
from ringcoll.costs.model import Sample as Sample
from ringcoll.costs.model import all_to_all_seconds as all_to_all_seconds
from ringcoll.costs.model import fastest as fastest
from ringcoll.costs.model import fit as fit
from ringcoll.costs.model import links as links
from ringcoll.costs.model import scatter_links as scatter_links
from ringcoll.costs.model import seconds as seconds
from ringcoll.costs.model import seconds_on_hosts as seconds_on_hosts
from ringcoll.costs.precision import encodings as encodings
from ringcoll.costs.precision import error_bound as error_bound
from ringcoll.costs.precision import roundings as roundings
from ringcoll.costs.prediction import predict as predict
from ringcoll.schedules.tree import balanced as balanced
from ringcoll.schedules.tree import check_balanced as check_balanced
from ringcoll.schedules.tree import tree as tree

__all__ = [
    "DEVICES",
    "KINDS",
    "SWITCHES",
    "HostsPrice",
    "Model",
    "Price",
    "Range",
    "Sample",
    "TourPrice",
    "all_to_all_seconds",
    "balanced",
    "check_balanced",
    "encodings",
    "error_bound",
    "fastest",
    "fit",
    "links",
    "predict",
    "price",
    "price_backward",
    "price_on_hosts",
    "price_tour",
    "roundings",
    "scatter_links",
    "seconds",
    "seconds_on_hosts",
    "tree",
    "wire_bytes",
]
