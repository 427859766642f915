"""How exact a sum is; the public name of `ringcoll.costs.precision`."""

from ringcoll.costs.precision import *  # noqa: F403 - the names in its __all__
from ringcoll.costs.precision import __all__ as __all__
