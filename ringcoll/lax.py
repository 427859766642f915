"""All of `jax.lax`, its collectives replaced: `from ringcoll import lax`, nothing else."""

from typing import TYPE_CHECKING, Any

from jax import lax as _lax

from ringcoll.all_reduces import pbroadcast as pbroadcast
from ringcoll.all_reduces import pmax as pmax
from ringcoll.all_reduces import pmean as pmean
from ringcoll.all_reduces import pmin as pmin
from ringcoll.all_reduces import psum as psum
from ringcoll.collectives import all_gather as all_gather
from ringcoll.collectives import all_to_all as all_to_all
from ringcoll.collectives import ppermute as ppermute
from ringcoll.collectives import pshuffle as pshuffle
from ringcoll.collectives import psum_scatter as psum_scatter
from ringcoll.collectives import pswapaxes as pswapaxes

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        try:
            return getattr(_lax, name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *dir(_lax)})
