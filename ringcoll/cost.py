"""What a collective costs in seconds; the public name of `ringcoll.costs.model`."""

from ringcoll.costs.model import *  # noqa: F403 - the names in its __all__
from ringcoll.costs.model import __all__ as __all__
