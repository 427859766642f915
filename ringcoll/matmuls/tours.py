"""Rows travel to all ranks, and what each rank makes of them is added up on the way home."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax import Array

from ringcoll.collectives.by_schedule import built, named
from ringcoll.runtime import engine
from ringcoll.runtime.barriers import order_of_work
from ringcoll.runtime.contributions import Shard
from ringcoll.runtime.slicing import Shares, concatenated
from ringcoll.schedules.tour import tour

#: Rows, their rank, the first row's number there.
Part = tuple[Array, Array, int]
#: From a carry and the parts of a round to the next carry, and to what is made of each part.
Make = Callable[[Any, Sequence[Part]], tuple[Any, Sequence[Array]]]


def toured(
    x: Array, make: Make, axes: tuple[Hashable, ...], algorithm: str, carry: Any = None
) -> tuple[Any, Array]:
    """The sum over all ranks of what they make of these rows: `[r, d] -> [r, ...]`.

    While a rank works on the rows of one round, those of the next arrive, and the sums of the last
    are on their way home. Parts of equal shapes come in equal rounds in every such tour.

    Args:
        x: rows of this rank.
        make: makes as many rows of the rows of some ranks; called once in every round.
        axes: those that the rows travel over.
        algorithm: of the gather.
        carry: what the first call of `make` gets.

    Returns:
        The last carry, and the sum.
    """
    schedule, ranks = built("all_gather", algorithm, axes, None)
    shares = Shares(len(x), schedule.lanes)
    starts = [shares.of(lane) for lane in range(schedule.lanes)]
    own = [x[start : start + count] for start, count in starts]

    def visit(carry: Any, shards: Sequence[Shard]) -> tuple[Any, Sequence[Array]]:
        return make(carry, [(s.value, s.origin, starts[s.lane][0] + s.first) for s in shards])

    with named("tour", algorithm, "all_gather"):
        path, order = tour(schedule), order_of_work()
        carry, sums = engine.tour(path, ranks, own, visit, carry, order=order, halves=True)
    return carry, concatenated(sums, 0)
