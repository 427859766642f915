"""Chooses "auto" for a matmul with a collective between hosts on CPU: the ring, or the built-in."""

from collections.abc import Sequence
from typing import Any

from ringcoll.collectives.table import LAX
from ringcoll.costs.matmul import Work, bare_seconds, hidden_seconds, rounds_of
from ringcoll.costs.model import Model
from ringcoll.io.strict_json import version
from ringcoll.matmuls.auto import HIDDEN
from ringcoll.matmuls.labels import Gather, Scatter
from ringcoll.matmuls.work import are_known, nbytes, ratio, summed, works_of

#: Between hosts on CPU, whose runtime sends one message at a time.
BETWEEN_HOSTS = "ring"
#: How many times as long, at most, the ring takes there as a built-in that sends as many bytes.
LONGER = 1.05
#: Such hosts over gloo: measured, by `python -m benchmarks cluster`, but for the rate of the
#: links, which is an assumption (500 Mbit/s) and decides little: where a built-in collective
#: sends as much as the ring, both take as long on any wire.
GLOO = Model(alpha=1e-3, beta=1 / 62.5e6, gamma=3 / 10e9, delta=1 / 80e9, axes=0)


def to_gather(gather: Gather, x: Any, others: Sequence[Any], ranks: int) -> str:
    """The algorithm that gathers x between hosts on CPU."""
    if not are_known(x, *others):
        return LAX
    if ranks == 2 and _widened(x.dtype) == 1:
        return LAX  # measured: the ring takes 1.2 to 1.5 times as long, for two hops of one way
    sends = ratio(gather.wire, x.dtype) if gather.wire else _widened(x.dtype)
    return _between(works_of(gather, x, others, ranks), nbytes(x), sends, ranks)


def to_scatter(scatter: Scatter, pairs: Sequence[tuple[Any, Any]], ranks: int, jax: str) -> str:
    """The algorithm that scatters a sum of products between hosts on CPU.

    Args:
        scatter, pairs: as for `to_scatter`.
        ranks: n.
        jax: the version of JAX. Before 0.11 lax's own psum_scatter is sometimes silently wrong
            there (github.com/jax-ml/jax/issues/40830): it is not taken.
    """
    if not are_known(*(x for pair in pairs for x in pair)):
        return LAX
    if scatter.wire:
        return LAX
    if version(jax) < (0, 11):
        return BETWEEN_HOSTS
    work, block = summed(scatter, pairs, ranks)
    return _between([work], block, 2 * _widened(scatter.dtype), ranks)  # gloo swaps halves


def _between(works: Sequence[Work], shard_bytes: int, sends: float, ranks: int) -> str:
    """The ring or the built-in, which sends `sends` times the bytes of the ring.

    If that is below 1, messages are encoded, and both send as much.
    """
    swaps = 2 if ranks == 2 else 1  # by gloo, one way after the other
    one_way = 2 * swaps * (sends if sends < 1 else 1) * shard_bytes  # no half either way
    hidden = hidden_seconds(works, LONGER * one_way, ranks, GLOO, rounds_of(HIDDEN, ranks))
    bare = bare_seconds(works, sends * shard_bytes, ranks, GLOO, 1)
    return BETWEEN_HOSTS if hidden < bare else LAX


def _widened(dtype: Any) -> int:
    """How many times its bytes the built-in collectives of XLA:CPU send of a dtype."""
    return 2 if dtype.kind in "fV" and dtype.itemsize < 4 else 1  # NumPy's bfloat16 is of kind V
