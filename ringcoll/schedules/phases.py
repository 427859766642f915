"""The phases of a collective: a schedule run forward, backward or both, or several stages."""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from ringcoll.schedules.registry import ALL_REDUCES, EXCHANGES, TOUR, Stages
from ringcoll.schedules.schedule import Round, Schedule, digits, product
from ringcoll.schedules.tour import Tour, tour


class Carries(Enum):
    """What the messages of a phase carry."""

    SHARDS = "shard"  # the sender keeps its copy
    SUMS = "sum"  # the sender drops its sum; the receiver adds it to its own
    BLOCKS = "block"  # blocks of an all-to-all; each has a slot
    VECTORS = "vector"  # whole vectors, which are added at the end of the phase


@dataclass(frozen=True)
class Phase:
    """A schedule whose messages carry one kind of data. With sums, it is run backward."""

    name: str
    carries: Carries
    schedule: Schedule

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds in order. A move sends to rank r + shift what r holds from r - offset."""
        if self.carries is not Carries.SUMS:
            return self.schedule.rounds
        return tuple(
            tuple(replace(m, shift=-m.shift, offsets=self.schedule.arrivals(m)) for m in moves)
            for moves in reversed(self.schedule.rounds)
        )

    @property
    def shards(self) -> int:
        """How many shards of the vector one shard of the schedule is."""
        return self.schedule.size if self.carries is Carries.VECTORS else 1

    def along(self, rank: int, offset: int, sign: int = 1) -> int:
        """The rank `rank` + offset, or with sign -1 `rank` - offset, digit by digit."""
        for axis, digit in enumerate(digits(offset, self.schedule.shape)):
            rank = self.schedule.step(rank, axis, sign * digit)
        return rank


def phases(collective: str, built: Schedule | Stages) -> list[Phase]:
    """The phases of a collective, in order.

    Args:
        collective: one of `algorithms.COLLECTIVES`, or "tour", whose two phases run in step.
        built: the result of `algorithms.build` for it. A stage is a gather of whole vectors
            along one digit of the ranks.
    """
    if isinstance(built, tuple):
        names = [f"stage {i} of {len(built)}" for i in range(1, len(built) + 1)]
        return [Phase(s, Carries.VECTORS, product(built, [i])) for i, s in enumerate(names)]
    if collective in EXCHANGES:
        return [Phase("all-to-all", Carries.BLOCKS, built)]
    if collective == TOUR:
        return of_tour(tour(built))
    backward = Phase("reduce-scatter", Carries.SUMS, built)
    forward = Phase("all-gather", Carries.SHARDS, built)
    if collective in ALL_REDUCES:
        return [backward, forward]
    return [backward if collective == "psum_scatter" else forward]


def of_tour(tour: Tour) -> list[Phase]:
    """The phases of a tour: shards go out, and `delay` rounds later sums start to return."""
    return [Phase("out", Carries.SHARDS, tour.out), Phase("home", Carries.SUMS, tour.back)]
