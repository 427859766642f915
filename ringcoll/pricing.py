"""What a collective costs in counts; the public name of `ringcoll.costs.counts`."""

from ringcoll.costs.counts import *  # noqa: F403 - the names in its __all__
from ringcoll.costs.counts import __all__ as __all__
