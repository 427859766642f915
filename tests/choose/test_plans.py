"""Plans: the cheapest, and how it is printed."""

import pytest

from ringcoll.choose.plan import Late, Plan, cheapest


@pytest.mark.parametrize(
    ("lax", "ring", "two_ended", "chosen"),
    [
        (1.08, 1.0, 1.0, "lax: 1.08 s; ring 1 s"),  # within the error
        (1.10, 1.0, 1.0, "ring: 1 s; two_ended 1 s"),
        (1.10, 1.02, 1.0, "ring: 1.02 s; two_ended 1 s"),  # the simpler, within a third of it
        (1.10, 1.04, 1.0, "two_ended: 1 s; ring 1.04 s"),
        (1.10, 1.0, 1.04, "ring: 1 s; two_ended 1.04 s"),
    ],
)
def test_the_simplest_plan_within_the_error_of_the_price_wins(lax, ring, two_ended, chosen):
    plans = [Plan("lax", lax), Plan("ring", ring), Plan("two_ended", two_ended)]
    assert str(cheapest(plans)) == chosen
    assert cheapest(plans, error=0.0).seconds == min(lax, ring, two_ended)


def test_a_plan_is_named_by_its_algorithm_and_form():
    ring, late = Plan("ring", 1.0), Plan("two_ended", 1.0, form=Late((1,)))
    assert late.name == "two_ended, sums at the end"
    assert ring.name == "ring"
