"""A collective by an algorithm, as phases of rounds in the order they run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from ringcoll.costs.counts import Price, price
from ringcoll.schedules.phases import Carries, Phase, phases
from ringcoll.schedules.registry import (
    Algorithm,
    Stages,
    algorithms_of,
    build,
    in_lax,
    listed_name,
)
from ringcoll.schedules.schedule import Schedule


@dataclass(frozen=True)
class Plan:
    """A collective by an algorithm.

    `shape` has the sizes of the axes; a schedule may cut them into finer digits. `made` is the
    schedule, or the stages; `function` made it, or is None. In a drawing there is a column for
    each shard (or block, by the rank that gets it), or one column of whole vectors.
    """

    collective: str
    algorithm: str
    shape: tuple[int, ...]
    phases: tuple[Phase, ...]
    made: Schedule | Stages
    function: Callable[..., Any] | None

    def _repr_svg_(self) -> str | None:
        """What a notebook shows: who holds what after each round."""
        from ringcoll.draw.notebook import of_plan

        return of_plan(self)

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether whole vectors are sent, in stages."""
        return all(phase.carries is Carries.VECTORS for phase in self.phases)

    @property
    def adds(self) -> bool:
        """Whether the result has data of every rank in each element."""
        return in_lax(self.collective) != "all_gather"

    @cached_property
    def paid(self) -> Price:
        """The cost on a switch."""
        return self.price()

    def price(self, network: Sequence[int] | None = None) -> Price:
        """The cost, as `pricing.price` counts it."""
        return price(in_lax(self.collective), self.made, self.shape, network)

    @property
    def title(self) -> str:
        """The collective, the algorithm and the ranks, in words."""
        ranks = "x".join(map(str, self.shape)) + (" rank" if self.size == 1 else " ranks")
        return f"{self.collective} by {self.algorithm} on {ranks}"

    def numbered(self) -> Iterator[tuple[int, Phase, int]]:
        """Every round: its number in the plan from 1, its phase, and its number there from 0."""
        number = 0
        for phase in self.phases:
            for i in range(len(phase.rounds)):
                number += 1
                yield number, phase, i


def plan(collective: str, algorithm: Algorithm, shape: Sequence[int]) -> Plan:
    """The phases of a collective.

    Args:
        collective: one of `algorithms.COLLECTIVES`, or `all_reduce` or `reduce_scatter`.
        algorithm: a name, schedule or function, as `algorithms.build` takes it.
        shape: the sizes of the axes, major first.

    Raises:
        ValueError: as `algorithms.build`.

    >>> made = draw.plan("all_reduce", "ring", (4,))
    >>> [phase.name for phase in made.phases]
    ['reduce-scatter', 'all-gather']
    """
    kind, shape = in_lax(collective), tuple(shape)
    made = build(kind, algorithm, shape)
    run = tuple(phases(kind, made))
    if isinstance(algorithm, str):
        name = listed_name(kind, algorithm)
        return Plan(collective, name, shape, run, made, algorithms_of(kind)[name])
    if not callable(algorithm):
        return Plan(collective, "a schedule", shape, run, made, None)
    name = getattr(algorithm, "__name__", "a function")
    return Plan(collective, name, shape, run, made, algorithm)
