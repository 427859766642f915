"""Rows travel to all ranks; the results of the ranks are added while they return to the owner."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax import Array

from ringcoll.collectives.by_schedule import built, named
from ringcoll.runtime import engine
from ringcoll.runtime.barriers import order_of_work
from ringcoll.runtime.contributions import Shard
from ringcoll.runtime.slicing import Shares, concatenated
from ringcoll.schedules.tour import tour

#: Rows, the rank that owns them, and the number of their first row on that rank.
Part = tuple[Array, Array, int]
#: A function from a carry and the parts of a round to the next carry and a result for each part.
Make = Callable[[Any, Sequence[Part]], tuple[Any, Sequence[Array]]]


def sum_by_tour(
    x: Array, make: Make, axes: tuple[Hashable, ...], algorithm: str, carry: Any = None
) -> tuple[Any, Array]:
    """The sum over all ranks of their results for these rows: `[r, d] -> [r, ...]`.

    While a rank works on the rows of one round, the rows of the next arrive, and the sums of the
    round before return to their owners. In every tour of these axes, a round has parts of the same
    shapes.

    Args:
        x: the rows of this rank.
        make: computes a result with as many rows for the rows of some ranks; it is called once in
            every round.
        axes: the axes over which the rows travel.
        algorithm: the algorithm of the gather.
        carry: the carry for the first call of `make`.

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
