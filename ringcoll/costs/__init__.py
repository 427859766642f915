"""What a schedule costs: counts, routes, seconds and rounding. Nothing here imports JAX."""

from ringcoll.costs.counts import Price as Price
from ringcoll.costs.counts import TourPrice as TourPrice
from ringcoll.costs.counts import price as price
from ringcoll.costs.counts import price_tour as price_tour
from ringcoll.costs.counts import wire_bytes as wire_bytes
from ringcoll.costs.machines import DEVICES as DEVICES
from ringcoll.costs.machines import SWITCHES as SWITCHES
from ringcoll.costs.model import Model as Model
from ringcoll.costs.model import Range as Range
from ringcoll.costs.model import Sample as Sample
from ringcoll.costs.model import fastest as fastest
from ringcoll.costs.model import fit as fit
from ringcoll.costs.model import links as links
from ringcoll.costs.model import seconds as seconds
from ringcoll.costs.places import Place as Place
from ringcoll.costs.places import place_of as place_of
from ringcoll.costs.precision import encodings as encodings
from ringcoll.costs.precision import error_bound as error_bound
from ringcoll.costs.precision import roundings as roundings
from ringcoll.costs.prediction import predict as predict
from ringcoll.schedules.tree import check_balanced as check_balanced
from ringcoll.schedules.tree import tree as tree

__all__ = [
    "DEVICES",
    "SWITCHES",
    "Model",
    "Place",
    "Price",
    "Range",
    "Sample",
    "TourPrice",
    "check_balanced",
    "encodings",
    "error_bound",
    "fastest",
    "fit",
    "links",
    "place_of",
    "predict",
    "price",
    "price_tour",
    "roundings",
    "seconds",
    "tree",
    "wire_bytes",
]
