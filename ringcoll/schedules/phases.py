"""What a collective runs one after the other: a schedule forward, backward, or in stages."""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from ringcoll.schedules.registry import ALL_REDUCES, Stages
from ringcoll.schedules.schedule import Round, Schedule, digits, product


class Carries(Enum):
    """What the messages of a phase carry."""

    SHARDS = "shard"  # a sender keeps its copy
    SUMS = "sum"  # a sum that was sent is no longer held; the receiver adds it to its own
    BLOCKS = "block"  # of an all-to-all: known by a slot
    VECTORS = "vector"  # whole ones, kept apart until the end of the phase, and then added


@dataclass(frozen=True)
class Phase:
    """Rounds of one kind; of sums, those of the schedule backward."""

    name: str
    carries: Carries
    schedule: Schedule

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Of moves that still mean: to r + shift, what is held of r - offset."""
        if self.carries is not Carries.SUMS:
            return self.schedule.rounds
        return tuple(
            tuple(replace(m, shift=-m.shift, offsets=self.schedule.arrivals(m)) for m in moves)
            for moves in reversed(self.schedule.rounds)
        )

    @property
    def shards(self) -> int:
        """Of the vector, in one of the schedule's own shards."""
        return self.schedule.size if self.carries is Carries.VECTORS else 1

    def along(self, rank: int, offset: int, sign: int = 1) -> int:
        """The rank r + offset, or r - offset, digit by digit."""
        for axis, digit in enumerate(digits(offset, self.schedule.shape)):
            rank = self.schedule.step(rank, axis, sign * digit)
        return rank


def phases(collective: str, made: Schedule | Stages) -> list[Phase]:
    """The phases of a collective, in order.

    Args:
        collective: one of `algorithms.COLLECTIVES`.
        made: what `algorithms.build` gives for it. A stage is a gather of whole vectors along
            its digit of all ranks.
    """
    if isinstance(made, tuple):
        names = [f"stage {i} of {len(made)}" for i in range(1, len(made) + 1)]
        return [Phase(s, Carries.VECTORS, product(made, [i])) for i, s in enumerate(names)]
    if collective == "all_to_all":
        return [Phase("all-to-all", Carries.BLOCKS, made)]
    backward = Phase("reduce-scatter", Carries.SUMS, made)
    forward = Phase("all-gather", Carries.SHARDS, made)
    if collective in ALL_REDUCES:
        return [backward, forward]
    return [backward if collective == "psum_scatter" else forward]
