"""Plans of a collective together with matmuls between hosts on CPU: a ring or the built-in."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ringcoll.choose.plan import Plan, cheapest
from ringcoll.choose.table import LAX
from ringcoll.costs.machines import SWITCHES
from ringcoll.costs.under_work import Work, built_in_seconds, overlapped_seconds, rounds
from ringcoll.io.strict_json import version
from ringcoll.schedules.registry import build
from ringcoll.schedules.schedule import Schedule

#: The algorithm between hosts on CPU: the runtime there sends one message at a time.
RING = "ring"


def gather_plan(
    works: Sequence[Work], shard_bytes: int, dtype: Any, ranks: int, ratio: float | None
) -> Plan:
    """The plan of a gather with the matmuls of what it gathers.

    Args:
        works: the work of each matmul.
        shard_bytes: the bytes of a rank's shard.
        dtype: its dtype.
        ranks: the number of ranks.
        ratio: the bytes of messages over the bytes of their values, if messages are encoded.
    """
    if ranks == 2 and _widened(dtype) == 1:
        return Plan(LAX, why="measured: between two hosts the ring takes 1.2 to 1.5 times as long")
    sent = ratio or 1.0
    return _cheaper(works, sent * shard_bytes, 1 if ratio else _widened(dtype), ranks)


def scatter_plan(work: Work, block_bytes: int, dtype: Any, ranks: int, jax: str) -> Plan:
    """The plan of a sum of matmuls, of which each rank keeps a block.

    Before JAX 0.11, lax's psum_scatter is sometimes silently wrong between hosts
    (github.com/jax-ml/jax/issues/40830), so it is not used.
    """
    if version(jax) < (0, 11):
        return Plan(RING, why="before jax 0.11 the built-in sum between hosts may be wrong")
    in_place = replace(work, sliced=0.0)  # a CPU reads rows where they are
    # gloo's reduce-scatter sends twice the bytes of the ring.
    return _cheaper([in_place], block_bytes, 2 * _widened(dtype), ranks)


def _cheaper(works: Sequence[Work], shard_bytes: float, widened: int, ranks: int) -> Plan:
    """The ring, or the built-in, which sends `widened` times the bytes of the ring."""
    model = SWITCHES["gloo500"]
    swaps = 2 if ranks == 2 else 1  # gloo sends both directions of a pair one after the other
    schedule = build("all_gather", RING, (ranks,))
    assert isinstance(schedule, Schedule)  # only all-reduces have stages
    hidden = overlapped_seconds(works, swaps * shard_bytes, model, rounds(schedule))
    whole = built_in_seconds(works, widened * shard_bytes, ranks, model, 1, gathers=False)
    return cheapest([Plan(LAX, whole), Plan(RING, hidden)])


def _widened(dtype: Any) -> int:
    """The factor by which XLA:CPU's built-in collectives widen a dtype on the wire."""
    return 2 if dtype.kind in "fV" and dtype.itemsize < 4 else 1  # NumPy's bfloat16 is of kind V
