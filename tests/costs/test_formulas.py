"""Closed forms are recognised from counts; those of algorithms agree with the literature."""

from fractions import Fraction as F
from math import ceil, log2

import pytest

from ringcoll.algorithms import ring
from ringcoll.costs import price
from ringcoll.costs.closed_forms import Formula, closed_form, prices, recognised
from ringcoll.schedules.schedule import Move, Schedule

pytestmark = pytest.mark.quick

RANKS = (*range(2, 18), 32, 64)
TWOS = [n for n in RANKS if not n & (n - 1)]


def test_counts_that_no_algorithm_has_are_recognised_too():
    for form, count in {
        "0": lambda n: 0,
        "2n-3": lambda n: 2 * n - 3,
        "3 ceil(log2 n)": lambda n: 3 * ceil(log2(n)),
        "(n^2+1)/3": lambda n: F(n * n + 1, 3),
    }.items():
        assert recognised({n: count(n) for n in RANKS}) == Formula(form)


def test_a_form_for_powers_of_two_only():
    digits = {n: F(sum(d.bit_count() for d in range(n)), n) for n in RANKS}
    assert str(recognised(digits)) == "(log2 n)/2 (n = 2^k)"
    assert recognised({n: digits[n] for n in TWOS}) == Formula("(log2 n)/2")
    assert str(recognised({n: max(1, n - 2) for n in RANKS})) == "None"
    assert recognised({n: n for n in (2, 4, 8)}) is None  # too few to tell
    assert recognised({n: n**3 for n in RANKS}) is None


# Prices of the literature, p ranks, B bytes of the full vector; of two directions on a ring.
# fmt: off
LITERATURE = [
    ("all_gather", "ring", False, "(n-1) alpha + (n-1)/n B beta"),
    ("psum_scatter", "ring", False, "(n-1) alpha + (n-1)/n B beta + (n-1)/n B gamma"),
    ("all_gather", "bidirectional_ring", True, "(n-1) alpha + (n-1) hop + (n-1)/(2n) B beta"),
    ("all_gather", "two_ended", True,
     "ceil((n-1)/2) alpha + ceil((n-1)/2) hop + ceil((n-1)/2)/n B beta"),
    ("all_gather", "bruck", False, "ceil(log2 n) alpha + (n-1)/n B beta"),
    ("all_gather", "recursive_doubling", False, "(log2 n) alpha + (n-1)/n B beta (n = 2^k)"),
    ("psum_scatter", "direct", False, "(n-1) alpha + (n-1)/n B beta + (n-1)/n B gamma"),
    ("psum", "ring", False, "2(n-1) alpha + 2(n-1)/n B beta + (n-1)/n B gamma"),
    ("psum_scatter", "recursive_doubling", False,
     "(log2 n) alpha + (n-1)/n B beta + (n-1)/n B gamma (n = 2^k)"),
    ("psum", "recursive_doubling", True,
     "(log2 n) alpha + (n-1) hop + (n-1) B beta + (log2 n) B gamma (n = 2^k)"),
    ("psum", "one_shot", False, "ceil(log2 n) alpha + (n-1) B beta + (n-1) B gamma"),
    ("all_gather", "bidirectional_ring", False, "2(n-1) alpha + (n-1)/n B beta"),  # by one port
    ("all_gather", "torus", True, "(n-1) alpha + (n-1) hop + (n-1)/(2n) B beta"),
    ("all_gather", "hamiltonian", True, "(n-1) alpha + (n-1) hop + (n-1)/(2n) B beta"),
    ("all_gather", "two_ended", False, "(n-1) alpha + (n-1)/n B beta"),
    ("psum", "ring", True, "2(n-1) alpha + 2(n-1) hop + 2(n-1)/n B beta + (n-1)/n B gamma"),
    ("psum", "halving_doubling", True,
     "(2 log2 n) alpha + 2(n-1) hop + (log2 n) B beta + (n-1)/n B gamma (n = 2^k)"),
    ("psum", "one_shot", True,
     "ceil(log2 n) alpha + (n-1) hop + (n^2-1)/3 B beta + (n-1) B gamma (n = 2^k)"),
    ("all_gather", "direct", True,
     "at most ceil((n-1)/2) alpha + ceil((n-1)/2) hop + (n+2)/8 B beta (n = 2^k)"),
    ("all_to_all", "pairwise", True,
     "(n-1) alpha + floor(n^2/4) hop + floor(n^2/4)/n B beta"),
    ("all_to_all", "pairwise", False, "(n-1) alpha + (n-1)/n B beta"),
    ("all_to_all", "bruck", False, "ceil(log2 n) alpha + (log2 n)/2 B beta (n = 2^k)"),
]
# fmt: on


@pytest.mark.parametrize(("collective", "algorithm", "on_a_ring", "form"), LITERATURE)
def test_closed_forms_are_those_of_the_literature(collective, algorithm, on_a_ring, form):
    assert str(closed_form(prices(collective, algorithm, on_a_ring))) == form


def test_a_users_schedule_has_a_formula():
    def round_about(n):  # in twice the rounds
        moves = [Move(-1, (n + 1 - t,)) if t > 1 else Move(-1, (0,)) for t in range(1, n)]
        return Schedule((n,), tuple(m for move in moves for m in ((move,), ())))

    paid = prices("all_gather", round_about)
    assert recognised({n: p.rounds for n, p in paid.items()}) == Formula("2(n-1)")
    assert str(closed_form(paid)) == "(n-1) alpha + (n-1)/n B beta"

    def odd(n):
        return ring(n) if n % 3 else ring(n, direction=-1)

    assert closed_form(prices("all_gather", odd)) == closed_form(prices("all_gather", "ring"))
    assert closed_form({n: price("psum", "ring", (n**3,)) for n in range(2, 7)}) is None
