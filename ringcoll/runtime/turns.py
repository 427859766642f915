"""A reduce by turns: one half of every shard is computed while the sums of the other half travel.

`engine.reduce` computes contributions while sums travel, and adds them when the sums arrive. By
turns, a contribution is computed after its sum has arrived. So a compiler makes one matmul of a
product and its addition, and the sums of the other half travel under that matmul.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ringcoll.runtime.contributions import Slot, planned
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.value_types import tree_varying
from ringcoll.schedules.schedule import Schedule

#: `(slots, received) -> sums`: this rank's contributions, added to the partial sums received.
#: Sums are arrays, or pytrees of arrays.
Add = Callable[[Sequence[Slot], Sequence[Any]], Sequence[Any]]


def reduce(schedule: Schedule, ranks: Ranks, add: Add, start: Callable[[Slot], Any]) -> list[Any]:
    """Sum, for every rank, the contributions of all ranks to its shard.

    Args:
        schedule: the gather that is run backward; it `only_forwards`.
        ranks: the ranks that run it, as the digits of the schedule.
        add: see `Add`; it is called with one half of the shares at a time.
        start: gives, for a slot, zeros of the shape and dtype of the sum. The first contribution is
            added to them.

    Returns:
        This rank's shard, in twice as many shares as there are lanes.
    """
    steps = planned(schedule, back=True)
    (moves, sent, _), count = steps[0], len(steps)

    def slots(half: int, turn: Array) -> list[Slot]:
        return [
            Slot(ranks.origin(offset, m.axis, turn * m.shift), half * schedule.lanes + lane)
            for m, keys in zip(moves, sent, strict=True)
            for lane, offset in keys
        ]

    def added(half: int, turn: Array, received: Sequence[Any]) -> list[Any]:
        return tree_varying([*add(slots(half, turn), received)], ranks.axes)

    def sent_back(sums: list[Any]) -> list[Any]:
        return ranks.hops(f"rounds 1 to {count}", moves, sums)

    def body(state: Any, turn: Array) -> tuple[Any, None]:
        first, second = state  # sums to send, and sums that have arrived
        arriving = sent_back(first)
        second = sent_back(added(1, turn, second))
        return (added(0, turn + 1, arriving), second), None

    before, after = jnp.int32(0), jnp.int32(count)
    first = added(0, before, [start(slot) for slot in slots(0, before)])
    second = tree_varying([start(slot) for slot in slots(1, before)], ranks.axes)
    (first, second), _ = lax.scan(body, (first, second), jnp.arange(count, dtype=jnp.int32))
    sums = [*first, *added(1, after, second)]
    lanes = [half * schedule.lanes + move.lane for half in (0, 1) for move in moves]
    return [sums[lanes.index(lane)] for lane in range(len(lanes))]
