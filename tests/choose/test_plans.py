"""Plans: the cheapest, and how it is printed."""

from dataclasses import replace

from ringcoll.choose.plan import Plan, cheapest


def test_within_the_error_of_the_price_the_built_in_wins():
    ring, late = Plan("ring", 1.0), Plan("two_ended", 1.0, late=(1,))
    assert cheapest([Plan("lax", 1.04), ring]).algorithm == "lax"
    assert str(cheapest([Plan("lax", 1.06), ring])) == "ring: 1 s; lax 1.06 s"
    assert cheapest([Plan("lax", 1.06), ring, late]) == cheapest([ring, late])
    rows = Plan("lax", 1.04, swapped=Plan("lax", 0.5))
    assert cheapest([ring, rows]).algorithm == "ring"  # the built-in there is not the whole form
    assert late.form == "two_ended, sums at the end"
    assert replace(ring, by_turns=True).form == "ring, by turns"
    assert rows.form == "rows travel, then lax"
