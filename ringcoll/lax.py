"""All of `jax.lax`, its collectives replaced: `from ringcoll import lax`, nothing else.

They have the same names, signatures and semantics, and keyword arguments more: all but the
permutations take `algorithm`, and those that add up floats, or whose gradient does, also
`accumulate_dtype`.

`algorithm` is "auto" (the measured table of `ringcoll.table`), the name of a schedule in
`ringcoll.algorithms`, "lax" (the built-in, for comparison; where data is only moved, also
"lax_as_bits", the built-in on integers), a `Table` of one's own, a `Schedule` (for an
all-reduce also a tuple of them, its stages), or a function that makes one of the axis sizes.
`with ringcoll.algorithm("ring"):` around calls that say "auto", or `RINGCOLL_ALGORITHM=ring` in
the environment, asks for one where they can run by it.

`accumulate_dtype` is the dtype of partial sums: a contribution that has not been added to
yet travels as it is, a partial sum travels wide, and the result is rounded once. In the
docstrings n is the number of ranks, s the bytes of one rank's operand.

All work under `jit`, `vmap`, `grad`, `scan`, `cond`, `remat` and in eager `shard_map`, in
both `check_vma` modes; derivatives are lax's, by the same algorithm backward. What needs
no communication or what only lax can do is left to it: constants of a sum, axes given by
position, unreduced and reduced types, symbolic shapes, `axis_index_groups` of several sizes.

Ours are primitives of their own, `ringcoll_psum` and so on: a policy of `jax.checkpoint` that
names `psum_p` does not match them; name values by `jax.ad_checkpoint.checkpoint_name`. All may be
put in the place of lax's (`jax.lax.psum = ringcoll.psum`).

All raise what lax raises, in lax's words, before anything is sent: NameError for an axis
that is not bound; ValueError for a dimension out of bounds or that does not divide, for
groups that do not cover the axis (TypeError for what are no groups), for an algorithm that does
not exist or cannot run on so many ranks, and for an `accumulate_dtype` narrower than the operand.
"""

from typing import TYPE_CHECKING, Any

from jax import lax as _lax

from ringcoll.all_reduces import pmax, pmean, pmin, psum
from ringcoll.all_to_alls import all_to_all, pswapaxes
from ringcoll.broadcasts import pbroadcast
from ringcoll.gathers import all_gather, psum_scatter
from ringcoll.permutes import ppermute, pshuffle

__all__ = [
    "all_gather",
    "all_to_all",
    "pbroadcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
]

if TYPE_CHECKING:
    # All names of lax have their types, and ours stay ours: of a name that is imported twice, the
    # first is meant for mypy, and the last for pyright.
    from jax.lax import *  # type: ignore[assignment]  # noqa: F403

    from ringcoll.all_reduces import pmax, pmean, pmin, psum
    from ringcoll.all_to_alls import all_to_all, pswapaxes
    from ringcoll.broadcasts import pbroadcast
    from ringcoll.gathers import all_gather, psum_scatter
    from ringcoll.permutes import ppermute, pshuffle
else:

    def __getattr__(name: str) -> Any:
        try:
            return getattr(_lax, name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *dir(_lax)})
