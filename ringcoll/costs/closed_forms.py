"""Counts as formulas in n: the closed form that fits the counts at many numbers of ranks.

`recognised` tries a short list of forms. It does not use the names of algorithms, so your own
schedule gets a formula too.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from ringcoll.costs.counts import Price, price
from ringcoll.schedules.registry import ScheduleLike


class Formula(NamedTuple):
    """A closed form in n, and the numbers of ranks for which it is right; "" for all."""

    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.where})" if self.where else self.text


class _Form(NamedTuple):
    """A form to try: its text, its value at n, and the numbers of ranks to which it applies."""

    text: str
    at: Callable[[int], int | None]  # None: not defined for this n
    where: str = ""


def _twos(n: int) -> int:
    """How often 2 divides n."""
    return (n & -n).bit_length() - 1


_TWOS = "n = 2^k"
#: A count is a multiple of one of these, perhaps plus a constant, perhaps divided by n.
_FORMS = (
    _Form("1", lambda n: 1),
    _Form("n", lambda n: n),
    _Form("n^2", lambda n: n * n),
    _Form("n-1", lambda n: n - 1),
    _Form("ceil((n-1)/2)", lambda n: n // 2),
    _Form("log2 n", lambda n: None if n & (n - 1) else _twos(n)),
    _Form("ceil(log2 n)", lambda n: (n - 1).bit_length()),
    _Form("k+m-1", lambda n: _twos(n) + (n >> _twos(n)) - 1, "n = 2^k m, m odd"),
    _Form("floor(n^2/4)", lambda n: n * n // 4),
)
#: The fewest counts that confirm a form: it has two unknowns, so any two counts would fit it.
_ENOUGH = 4
#: The numbers of ranks at which schedules are priced. For a ring, 2 is skipped: there both
#: directions are one link.
_RANKS = (*range(2, 18), 32, 64)


def prices(collective: str, algorithm: ScheduleLike, on_a_ring: bool = False) -> dict[int, Price]:
    """Prices by number of ranks on one axis, for those numbers that the algorithm can run on."""
    paid = {}
    for n in _RANKS[on_a_ring:]:
        try:
            paid[n] = price(collective, algorithm, (n,), (n,) if on_a_ring else None)
        except ValueError:  # the algorithm has no schedule for n ranks
            continue
    return paid


def recognised(counts: Mapping[int, Fraction | int]) -> Formula | None:
    """The closed form of a count that is given by number of ranks; None if no form fits.

    A form that fits all numbers of ranks is preferred to one that fits only the powers of two.
    """
    for numbers in (list(counts), [n for n in counts if not n & (n - 1)]):
        if len(numbers) < _ENOUGH:
            continue
        for constant in (False, True):
            for over_n in (False, True):
                values = {n: Fraction(counts[n]) * (n if over_n else 1) for n in numbers}
                for form in _FORMS:
                    if fit := _fit(form, values, constant):
                        text = _written(form.text, *fit, over_n)
                        only = _TWOS if len(numbers) < len(counts) else form.where
                        return Formula(text, only)
    return None


def closed_form(prices: Mapping[int, Price]) -> Formula | None:
    """A formula for the seconds of a collective with B bytes of the full vector; None without one.

    If some rounds are uneven, the formula is an upper bound, and begins with "at most".

    Args:
        prices: the prices by number of ranks.
    """
    terms = [
        (recognised({n: paid.startups for n, paid in prices.items()}), "alpha"),
        (recognised({n: paid.hops for n, paid in prices.items()}), "hop"),
        (recognised({n: paid.link / n for n, paid in prices.items()}), "B beta"),
        (recognised({n: paid.additions / n for n, paid in prices.items()}), "B gamma"),
    ]
    known = [(formula, unit) for formula, unit in terms if formula]
    if len(known) < len(terms):
        return None
    where = {formula.where for formula, _ in known} - {""}
    if len(where) > 1:  # use only the numbers for which all forms hold
        twos = {n: paid for n, paid in prices.items() if not n & (n - 1)}
        return closed_form(twos)
    if not any(n & (n - 1) for n in prices):
        where = {_TWOS}
    text = _sum((formula.text, unit) for formula, unit in known)
    most = "at most " if any(paid.uneven for paid in prices.values()) else ""
    return Formula(most + text, *where)


def _sum(terms: Iterable[tuple[str, str]]) -> str:
    """The sum of terms (factor, unit) as text; "0" if all factors are 0."""
    written = []
    for text, unit in terms:
        factor = text if _is_one_factor(text) else f"({text})"
        written += [] if text == "0" else [unit if text == "1" else f"{factor} {unit}"]
    return " + ".join(written) or "0"


def _fit(
    form: _Form, values: Mapping[int, Fraction], constant: bool
) -> tuple[Fraction, Fraction] | None:
    """The factor and the constant with which a form has these values; None if it does not fit."""
    known = [(x, value) for n, value in values.items() if (x := form.at(n)) is not None]
    if len(known) < len(values):
        return None
    (x, value), (last_x, last_value) = known[0], known[-1]
    if constant and x == last_x:
        return None
    factor = (last_value - value) / (last_x - x) if constant else value / x
    rest = value - factor * x
    return (factor, rest) if all(factor * x + rest == v for x, v in known) else None


def _written(form: str, factor: Fraction, constant: Fraction, over_n: bool) -> str:
    """factor * form + constant as text, perhaps divided by n, with one fraction bar."""
    below = lcm(factor.denominator, constant.denominator)
    times, plus = int(factor * below), int(constant * below)
    above = str(times) if form == "1" else _times(times, form)
    if plus:
        above += f"{plus:+d}"
    under = ("n" if below == 1 else f"({below}n)") if over_n else str(below)
    if under == "1" or above == "0":
        return above
    return f"{above}/{under}" if _is_one_factor(above) else f"({above})/{under}"


def _times(factor: int, form: str) -> str:
    """factor * form as text."""
    if factor == 1:
        return form
    if not _is_one_factor(form) and not form.startswith("log2"):
        return f"{factor}({form})"
    return f"{factor}{form}" if form.startswith("n") else f"{factor} {form}"


def _is_one_factor(text: str) -> bool:
    """Whether a text needs no brackets as a factor: it has no sum and no bare logarithm."""
    while text != (shorter := re.sub(r"\([^()]*\)", "", text)):
        text = shorter
    return not re.search(r"[-+ ]|log2", text.replace(" ceil", "").replace(" floor", ""))
