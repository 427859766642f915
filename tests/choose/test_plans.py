"""Plans: the cheapest, and how it is printed."""

from dataclasses import replace

from ringcoll.choose.plan import Late, Plan, Turns, cheapest


def test_within_the_error_of_the_price_the_built_in_wins():
    ring, late = Plan("ring", 1.0), Plan("two_ended", 1.0, form=Late((1,)))
    assert cheapest([Plan("lax", 1.04), ring]).algorithm == "lax"
    assert str(cheapest([Plan("lax", 1.06), ring])) == "ring: 1 s; lax 1.06 s"
    assert cheapest([Plan("lax", 1.06), ring, late]) == cheapest([ring, late])
    assert late.name == "two_ended, sums at the end"
    assert replace(ring, form=Turns()).name == "ring, by turns"
