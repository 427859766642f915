"""Choose for "auto" how a matmul with a collective runs between hosts on CPU: ring or built-in."""

from collections.abc import Sequence
from typing import Any

from ringcoll.collectives.table import LAX
from ringcoll.costs.matmul import Work, bare_seconds, hidden_seconds, rounds_of
from ringcoll.costs.model import Model
from ringcoll.io.strict_json import version
from ringcoll.matmuls.auto import HIDDEN
from ringcoll.matmuls.labels import Gather, Scatter
from ringcoll.matmuls.work import are_known, nbytes, ratio, summed, works_of

#: The algorithm between hosts on CPU: the runtime there sends one message at a time.
BETWEEN_HOSTS = "ring"
#: The ring takes at most this many times as long as a built-in that sends as many bytes.
LONGER = 1.05
#: Such hosts over gloo, measured by `python -m benchmarks cluster`. Only the rate of the links
#: (500 Mbit/s) is an assumption. It decides little: if a built-in collective sends as much as the
#: ring, both take equally long on any wire.
GLOO = Model(alpha=1e-3, beta=1 / 62.5e6, gamma=3 / 10e9, delta=1 / 80e9, axes=0)


def to_gather(gather: Gather, x: Any, others: Sequence[Any], ranks: int) -> str:
    """The algorithm that gathers x between hosts on CPU."""
    if not are_known(x, *others):
        return LAX
    if ranks == 2 and _widened(x.dtype) == 1:
        return LAX  # measured: the ring takes 1.2 to 1.5 times as long
    sends = ratio(gather.wire, x.dtype) if gather.wire else _widened(x.dtype)
    return _between(works_of(gather, x, others, ranks), nbytes(x), sends, ranks)


def to_scatter(scatter: Scatter, pairs: Sequence[tuple[Any, Any]], ranks: int, jax: str) -> str:
    """The algorithm that scatters a sum of matmuls between hosts on CPU.

    Args:
        scatter, pairs: as for `auto.to_scatter`.
        ranks: the number of ranks.
        jax: the version of JAX. Before 0.11, lax's psum_scatter is sometimes silently wrong
            between hosts (github.com/jax-ml/jax/issues/40830), so it is not used.
    """
    if not are_known(*(x for pair in pairs for x in pair)):
        return LAX
    if version(jax) < (0, 11):
        return BETWEEN_HOSTS
    work, block = summed(scatter, pairs, ranks)
    # Times 2: gloo's reduce-scatter sends twice the bytes of the ring.
    return _between([work], block, 2 * _widened(scatter.dtype), ranks)


def _between(works: Sequence[Work], shard_bytes: int, sends: float, ranks: int) -> str:
    """The ring, or the built-in, which sends `sends` times the bytes of the ring.

    If `sends` is below 1, messages are encoded, and both send equally many bytes.
    """
    swaps = 2 if ranks == 2 else 1  # gloo sends both directions of a pair one after the other
    one_way = 2 * swaps * (sends if sends < 1 else 1) * shard_bytes  # the model takes halves
    hidden = hidden_seconds(works, LONGER * one_way, ranks, GLOO, rounds_of(HIDDEN, ranks))
    bare = bare_seconds(works, sends * shard_bytes, ranks, GLOO, 1)
    return BETWEEN_HOSTS if hidden < bare else LAX


def _widened(dtype: Any) -> int:
    """The factor by which XLA:CPU's built-in collectives widen a dtype on the wire."""
    return 2 if dtype.kind in "fV" and dtype.itemsize < 4 else 1  # NumPy's bfloat16 is of kind V
