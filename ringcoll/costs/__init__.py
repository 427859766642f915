"""What a schedule costs: counts, routes, seconds and rounding. Nothing here imports JAX."""

from ringcoll.costs.counts import Price, price, wire_bytes
from ringcoll.costs.machines import DEVICES, SWITCHES
from ringcoll.costs.model import Model, Range, Sample, fastest, fit, links, seconds
from ringcoll.costs.places import Place, place_of
from ringcoll.costs.precision import encodings, error_bound, roundings
from ringcoll.costs.prediction import predict
from ringcoll.costs.under_work import Work
from ringcoll.schedules.tree import check_balanced, tree

__all__ = [
    "DEVICES",
    "SWITCHES",
    "Model",
    "Place",
    "Price",
    "Range",
    "Sample",
    "Work",
    "check_balanced",
    "encodings",
    "error_bound",
    "fastest",
    "fit",
    "links",
    "place_of",
    "predict",
    "price",
    "roundings",
    "seconds",
    "tree",
    "wire_bytes",
]
