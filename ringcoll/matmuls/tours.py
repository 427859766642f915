"""Rows travel to all ranks, and what each rank makes of them is added up on the way home."""

from collections.abc import Callable, Hashable, Sequence

from jax import Array

from ringcoll.collectives.by_schedule import built, named
from ringcoll.runtime import engine
from ringcoll.runtime.barriers import order_of_work
from ringcoll.runtime.contributions import Shard
from ringcoll.runtime.slicing import Shares, concatenated
from ringcoll.schedules.tour import tour

#: From the parts of a round, (rows, their rank, the first row's number there), to what is made.
Make = Callable[[Sequence[tuple[Array, Array, int]]], Sequence[Array]]


def toured(x: Array, make: Make, axes: tuple[Hashable, ...], algorithm: str) -> Array:
    """The sum over all ranks of what they make of these rows: `[r, d] -> [r, ...]`.

    While a rank works on the rows of one round, those of the next arrive, and the sums of the last
    are on their way home. JAX differentiates it: gradients travel the other way round.

    Args:
        x: rows of this rank.
        make: makes as many rows of the rows of some ranks.
        axes: those that the rows travel over.
        algorithm: of the gather.
    """
    schedule, ranks = built("all_gather", algorithm, axes, None)
    shares = Shares(len(x), schedule.lanes)
    starts = [shares.of(lane) for lane in range(schedule.lanes)]
    own = [x[start : start + count] for start, count in starts]

    def visit(carry: None, shards: Sequence[Shard]) -> tuple[None, Sequence[Array]]:
        parts = [(s.value, s.origin, starts[s.lane][0] + s.first) for s in shards]
        return carry, make(parts)

    with named("tour", algorithm, "all_gather"):
        path, order = tour(schedule), order_of_work()
        _, sums = engine.tour(path, ranks, own, visit, None, order=order, halves=True)
    return concatenated(sums, 0)
