"""What a collective costs in seconds; the public name of `costs.model`, machines and `predict`."""

from ringcoll.costs.machines import DEVICES as DEVICES
from ringcoll.costs.machines import KINDS as KINDS
from ringcoll.costs.machines import SWITCHES as SWITCHES
from ringcoll.costs.model import *  # noqa: F403 - the names in its __all__
from ringcoll.costs.model import __all__ as _of_the_model
from ringcoll.costs.prediction import predict as predict

__all__ = [*_of_the_model, "DEVICES", "KINDS", "SWITCHES", "predict"]
