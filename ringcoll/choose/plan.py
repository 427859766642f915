"""A plan: how one call runs, and why. The cheapest by price wins."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from ringcoll.choose.table import Algorithm
from ringcoll.io.text import seconds_in_words
from ringcoll.schedules.registry import LAX

#: How much longer than the cheapest form the built-in may take by price, and still run. Prices are
#: off by about as much: half of those of hidden collectives by less than 6 %
#: (`tests/costs/test_under_work.py`).
ERROR: Final = 1.05

#: Why a plan has the algorithm that the call names, or `with ringcoll.algorithm(...)` around it.
NAMED: Final = "named by the caller"


@dataclass(frozen=True)
class Plan:
    """How one call runs, and what decided.

    Attributes:
        algorithm: the algorithm; "lax" is the built-in.
        seconds: the price; 0 if no price decided.
        why: what decided, in words: a price and that of the runner-up, or a row of a table.
        late: for a gather of several matmuls, the indices of those that are computed at the end,
            from the whole gathered operand.
        by_turns: for a sum of matmuls, whether it is computed in two halves by turns.
        swapped: if the rows of the other factor travel in place of the gathered one, the plan of
            the matmul with these rows.
        exchanged: for attention, the indices of the axes over which all-to-alls exchange positions
            for heads; the algorithm gathers over the others.
        others: the other forms that have a price, the best first.
    """

    algorithm: Algorithm = LAX
    seconds: float = 0.0
    why: str = ""
    late: tuple[int, ...] = ()
    by_turns: bool = False
    swapped: "Plan | None" = None
    exchanged: tuple[int, ...] = ()
    others: tuple["Plan", ...] = field(default=(), repr=False, compare=False)

    @property
    def form(self) -> str:
        """The algorithm and the form, in words: "bidirectional_ring, by turns"."""
        if self.swapped:
            return f"rows travel, then {self.swapped.form}"
        name = self.algorithm
        if not isinstance(name, str):
            name = getattr(name, "__name__", "given")
        sums = ", sums at the end" if self.late else ""
        over = f", heads exchanged over axes {self.exchanged}" if self.exchanged else ""
        return name + sums + (", by turns" if self.by_turns else "") + over

    def __str__(self) -> str:
        return f"{self.form}: {self.why}" if self.why else self.form


#: The plan where `jax.export` has symbols in place of sizes.
SYMBOLIC: Final = Plan(LAX, why="sizes are symbols")

#: Why a plan is the built-in where `under_work.hides` says no.
NOTHING_HIDES: Final = "only TPUs hide messages under work"

#: The plan where the built-in sum cannot run, and nothing has a price.
BY_HAND: Final = Plan(
    "bidirectional_ring", why="JAX cannot lower the built-in beside an explicit axis"
)


def cheapest(plans: Iterable[Plan], error: float = ERROR) -> Plan:
    """The plan with the lowest price; the built-in, if it is within the error of the price.

    If several plans cost the same, the first one is taken.

    >>> from ringcoll.choose.plan import Plan, cheapest
    >>> print(cheapest([Plan("lax", 2e-3), Plan("ring", 1.5e-3), Plan("two_ended", 1e-3)]))
    two_ended: 1 ms; ring 1.5 ms
    """

    def compared(plan: Plan) -> float:
        is_built_in = plan.algorithm == LAX and plan.swapped is None
        return plan.seconds / error if is_built_in else plan.seconds

    ranked = sorted(plans, key=compared)
    first, *others = ranked
    words = [seconds_in_words(first.seconds)]
    words += [f"{other.form} {seconds_in_words(other.seconds)}" for other in others[:1]]
    return replace(first, why="; ".join(words), others=tuple(others))
