"""A plan: a collective by an algorithm, as phases of rounds in the order they run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ringcoll.costs.counts import Price, price
from ringcoll.schedules.phases import Carries, Phase, phases
from ringcoll.schedules.registry import (
    TOUR,
    ScheduleLike,
    Stages,
    build,
    in_lax,
    listed_name,
)
from ringcoll.schedules.schedule import Schedule
from ringcoll.schedules.tour import Tour, tour

#: The most ranks of a drawing.
_MOST_RANKS = 16
#: A phase, and the number of its round, from 0.
Running = tuple[Phase, int]


@dataclass(frozen=True)
class Execution:
    """A collective by an algorithm.

    `shape` has the sizes of the axes; a schedule may cut them into finer digits. `made` is the
    schedule, or the stages of an all-reduce. A drawing has one column for each shard, or for the
    blocks that go to one rank; if ranks send whole vectors, it has one column. The phases of a
    `tour` run in step.
    """

    collective: str
    algorithm: str
    shape: tuple[int, ...]
    phases: tuple[Phase, ...]
    made: Schedule | Stages
    tour: Tour | None = None

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether whole vectors are sent, in stages."""
        return all(phase.carries is Carries.VECTORS for phase in self.phases)

    @property
    def has_blocks(self) -> bool:
        """Whether ranks hold blocks: it is an exchange."""
        return any(phase.carries is Carries.BLOCKS for phase in self.phases)

    @property
    def lanes(self) -> int:
        """The most lanes of a phase."""
        return max((phase.schedule.lanes for phase in self.phases), default=1)

    @property
    def adds(self) -> bool:
        """Whether the result has data of every rank in each element."""
        return in_lax(self.collective) != "all_gather"

    @cached_property
    def paid(self) -> Price:
        """The cost on a switch."""
        return price(in_lax(self.collective), self.made, self.shape)

    @property
    def title(self) -> str:
        """The collective, the algorithm and the ranks, in words."""
        ranks = "x".join(map(str, self.shape)) + (" rank" if self.size == 1 else " ranks")
        return f"{self.collective} by {self.algorithm} on {ranks}"

    def numbered(self) -> Iterator[tuple[int, list[Running]]]:
        """Every round: its number, from 1, and the phases that run in it.

        Two, one or no phases run in a round of a tour; one phase runs in any other round.
        """
        if self.tour is None:
            every = [[(phase, i)] for phase in self.phases for i in range(len(phase.rounds))]
        else:
            late = {Carries.SHARDS: 0, Carries.SUMS: self.tour.delay}
            every = [[] for _ in range(self.tour.rounds)]
            for phase in self.phases:
                for i in range(len(phase.rounds)):
                    every[late[phase.carries] + i].append((phase, i))
        yield from enumerate(every, 1)


def plan(collective: str, algorithm: ScheduleLike, shape: Sequence[int]) -> Execution:
    """The phases of a collective.

    Args:
        collective: one of `algorithms.COLLECTIVES`, `all_reduce`, `reduce_scatter` or `tour`.
        algorithm: a name, schedule or function, as `algorithms.build` takes it.
        shape: the sizes of the axes, major first.

    Raises:
        ValueError: as `algorithms.build`.

    >>> ring = draw.plan("all_reduce", "ring", (4,))
    >>> [phase.name for phase in ring.phases]
    ['reduce-scatter', 'all-gather']
    """
    kind, shape = in_lax(collective), tuple(shape)
    schedule = build(kind, algorithm, shape)
    run = tuple(phases(kind, schedule))
    way = tour(schedule) if kind == TOUR and isinstance(schedule, Schedule) else None
    name = "a schedule"
    if isinstance(algorithm, str):
        name = listed_name(kind, algorithm)
    elif callable(algorithm):
        name = getattr(algorithm, "__name__", "a function")
    return Execution(collective, name, shape, run, schedule, way)


def check_size(plan: Execution) -> None:
    """Refuse more ranks than can be told apart."""
    if plan.size > _MOST_RANKS:
        raise ValueError(
            f"a drawing of {plan.size} ranks: at most {_MOST_RANKS} can be told apart; every rank "
            "does the same, so draw fewer"
        )
