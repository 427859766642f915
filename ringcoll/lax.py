"""All of `jax.lax`, with its collectives replaced: `from ringcoll import lax`.

They have the same names, signatures and semantics, and more keyword arguments. All but the
permutations take `algorithm`. Those that add floats, or whose gradient adds floats, also take
`accumulate_dtype`; `psum`, `pmean`, `psum_scatter` and `all_gather` take `order`.

`algorithm` is one of these:

- "auto": the measured table of `ringcoll.choose.table` picks;
- the name of a schedule in `ringcoll.algorithms`;
- "lax": the built-in (on CPU, narrow floats that are only moved travel as integers);
- your own `Table`, or your own `Schedule` (for an all-reduce also a tuple of stages);
- a function that makes a `Schedule` from the sizes of the axes.

`with ringcoll.algorithm("ring"):` chooses the algorithm of calls that say "auto", if they can run
by it.

`order=ringcoll.Tree(8)` adds by one balanced tree of 8 leaves, so the bits of a sum do not depend
on how many ranks share its leaves.

`accumulate_dtype` is the dtype of partial sums; by default, that of the operand. Raw contributions
keep their dtype on the wire, partial sums travel in `accumulate_dtype`, and the result is rounded
once. In the docstrings n is the number of ranks, and s is the bytes of one rank's operand.

`wire` says what messages hold in place of floats: "int8", "float8_e4m3fn", "float8_e5m2", or a
`ringcoll.Wire`. Messages then hold codes of one byte, and a scale for each block. Collectives that
gather, add or exchange floats take it. With "auto", the table chooses by the bytes that are sent,
every value is encoded once before it is gathered, exchanged or added, and sums are added in
float32. Gradients have the same wire. Values that are not sent are not rounded: on a single rank,
along the axis of a `vmap`, and constants of a sum. Operands must be bfloat16, float16 or float32;
others raise TypeError. `ringcoll.costs` has the bound on the error.

All collectives work under `jit`, `vmap`, `grad`, `scan`, `cond`, `remat` and in eager `shard_map`,
in both `check_vma` modes. Derivatives are lax's, by the same algorithm backward. `jax.lax` handles
calls that need no communication, or that only lax can handle: constants of a sum, axes given by
position, unreduced and reduced types, symbolic shapes, `axis_index_groups` of several sizes.

ringcoll's primitives are separate from lax's: `ringcoll_psum` and so on. A policy of
`jax.checkpoint` that names `psum_p` does not match them; name values by
`jax.ad_checkpoint.checkpoint_name`.

All collectives raise what lax raises, in lax's words, before anything is sent: NameError if an axis
is not bound; TypeError if groups are not groups; ValueError if a dimension is out of bounds or is
not divisible, if groups do not cover the axis, if an algorithm does not exist or cannot run on this
number of ranks, and if `accumulate_dtype` is narrower than the operand.
"""

from typing import TYPE_CHECKING, Any

from jax import lax as _lax

from ringcoll.collectives.all_gather import all_gather, psum_scatter
from ringcoll.collectives.all_reduce import pmax, pmean, pmin, psum
from ringcoll.collectives.all_to_all import all_to_all, pswapaxes
from ringcoll.collectives.broadcast import pbroadcast
from ringcoll.collectives.permute import ppermute, pshuffle
from ringcoll.collectives.ragged_all_to_all import ragged_all_to_all

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
    "ragged_all_to_all",
]

if TYPE_CHECKING:
    # All names of lax have their types here, and ringcoll's names keep theirs. If a name is
    # imported twice, mypy takes the first import and pyright the last.
    from jax.lax import *  # type: ignore[assignment]  # noqa: F403

    from ringcoll.collectives.all_gather import all_gather, psum_scatter
    from ringcoll.collectives.all_reduce import pmax, pmean, pmin, psum
    from ringcoll.collectives.all_to_all import all_to_all, pswapaxes
    from ringcoll.collectives.broadcast import pbroadcast
    from ringcoll.collectives.permute import ppermute, pshuffle
    from ringcoll.collectives.ragged_all_to_all import ragged_all_to_all
else:

    def __getattr__(name: str) -> Any:
        try:
            return getattr(_lax, name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *dir(_lax)})
