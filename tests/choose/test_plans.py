"""Plans: the cheapest, how it is printed, and what a sum between hosts costs."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from ringcoll.choose.hosts import scatter_plan
from ringcoll.choose.plan import Plan, cheapest
from ringcoll.costs.under_work import Work


def test_within_the_error_of_the_price_the_built_in_wins():
    ring, late = Plan("ring", 1.0), Plan("two_ended", 1.0, late=(1,))
    assert cheapest([Plan("lax", 1.04), ring]).algorithm == "lax"
    assert str(cheapest([Plan("lax", 1.06), ring])) == "ring: 1 s; lax 1.06 s"
    assert cheapest([Plan("lax", 1.06), ring, late]) == cheapest([ring, late])
    rows = Plan("lax", 1.04, in_place=Plan("lax", 0.5))
    assert cheapest([ring, rows]).algorithm == "ring"  # the built-in there is not the whole form
    assert late.form == "two_ended, sums at the end"
    assert replace(ring, by_turns=True).form == "ring, by turns"
    assert rows.form == "rows travel, then lax"


@pytest.mark.parametrize(("dtype", "built_in"), [("float32", "101"), ("bfloat16", "201")])
def test_between_hosts_the_built_in_sends_twice_the_bytes_of_the_ring(dtype, built_in):
    """3 blocks of 1 MiB at 62.5 MB/s, and 1 ms for each of three messages of the ring."""
    plan = scatter_plan(Work(0.0), 2**20, jnp.dtype(dtype), 4, "0.12")
    assert str(plan) == f"ring: 53.3 ms; lax {built_in} ms"
