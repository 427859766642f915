"""A plan: how one call runs, and why: by a row of a table, or as the cheapest by price."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

from ringcoll.choose.table import Algorithm, Table
from ringcoll.io.text import seconds_in_words
from ringcoll.schedules.registry import LAX

#: How far prices are off, as a share: three of four within this, of the forms of matmuls that were
#: compiled (`tests/costs/test_under_work.py`).
ERROR: Final = 0.09

#: Why a plan has the algorithm that the call names, or `with ringcoll.algorithm(...)` around it.
NAMED: Final = "named by the caller"


@dataclass(frozen=True)
class Late:
    """Of several matmuls with one gather, some come at the end, from the whole operand."""

    products: tuple[int, ...]  # their indices

    def __str__(self) -> str:
        return ", sums at the end"


@dataclass(frozen=True)
class Heads:
    """Attention: all-to-alls exchange positions for heads over some axes, before the gather."""

    axes: tuple[int, ...]  # their indices; the algorithm gathers over the others

    def __str__(self) -> str:
        return f", heads exchanged over axes {self.axes}"


@dataclass(frozen=True)
class Plan:
    """How one call runs, and what decided.

    Attributes:
        algorithm: the algorithm; "lax" is the built-in.
        seconds: the price; 0 if no price decided.
        why: what decided, in words: a price and that of the runner-up, or a row of a table.
        form: how the algorithm runs, if not in the plain way.
        others: the other forms that have a price, the best first.
    """

    algorithm: Algorithm = LAX
    seconds: float = 0.0
    why: str = ""
    form: Late | Heads | None = None
    others: tuple["Plan", ...] = field(default=(), repr=False, compare=False)

    @property
    def name(self) -> str:
        """The algorithm and the form, in words: "ring, sums at the end"."""
        own = self.algorithm
        if not isinstance(own, str):
            own = getattr(own, "__name__", "given")
        return f"{own}{self.form or ''}"

    def __str__(self) -> str:
        return f"{self.name}: {self.why}" if self.why else self.name


#: Why a plan is the built-in: `jax.export` has symbols in place of sizes.
SYMBOLIC: Final = "sizes are symbols"
#: Why a plan is the built-in where `under_work.hides` says no.
NOTHING_HIDES: Final = "only TPUs hide messages under work"
#: Why a plan is the built-in where `under_work.hides_early` says so.
EARLY: Final = "a sparse core gathers weights under the work before, if options say so"

#: The plan where the built-in sum cannot run, and nothing has a price.
BY_HAND: Final = Plan(
    "bidirectional_ring", why="JAX cannot lower the built-in beside an explicit axis"
)


@lru_cache(maxsize=1024)
def by_table(table: Table, *call: Any, **placement: Any) -> Plan:
    """The plan of a collective by the measured row that covers a call, or the built-in.

    Equal calls are decided only once. The other arguments are those of `Table.row`.

    >>> from ringcoll.choose.plan import by_table
    >>> table = ringcoll.Table.from_json('''{"rows": [{"collective": "psum", "platform": "cpu",
    ...     "algorithm": "ring", "hosts": [2, null], "why": "half the time of lax"}]}''')
    >>> print(by_table(table, "psum", "cpu", 4, 4096, "float32", "0.12", hosts=4))
    ring: row 1 of the table: half the time of lax
    """
    row = table.row(*call, **placement)
    if row is None:
        return Plan(LAX, why="no row covers it: the built-in")
    number = table.rows.index(row) + 1
    why = f"row {number} of the table" + (f": {row.why}" if row.why else "")
    return Plan(row.algorithm, why=why)


def cheapest(plans: Iterable[Plan], error: float = ERROR) -> Plan:
    """The simplest plan that costs about as little as the cheapest; plans are the simplest first.

    A price is off by an error. So the built-in runs if no other plan is cheaper by more than that.
    Other plans have errors in common: of these, the first within a third of it runs.

    >>> from ringcoll.choose.plan import Plan, cheapest
    >>> print(cheapest([Plan("lax", 2e-3), Plan("ring", 1.5e-3), Plan("two_ended", 1e-3)]))
    two_ended: 1 ms; ring 1.5 ms
    """
    plans = list(plans)
    least = min(plan.seconds for plan in plans)

    def is_near(plan: Plan) -> bool:
        return plan.seconds <= least * (1 + (error if plan.algorithm == LAX else error / 3))

    first = next(filter(is_near, plans))
    others = sorted((plan for plan in plans if plan is not first), key=lambda plan: plan.seconds)
    words = [seconds_in_words(first.seconds)]
    words += [f"{other.name} {seconds_in_words(other.seconds)}" for other in others[:1]]
    return replace(first, why="; ".join(words), others=tuple(others))
