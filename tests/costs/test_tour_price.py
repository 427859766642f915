"""Prices of tours, in closed form."""

from fractions import Fraction

import pytest

from ringcoll.costs import Model, place_of, predict, price, seconds
from ringcoll.costs.counts import price_on_hosts

pytestmark = pytest.mark.quick


def test_a_tour_pays_for_shards_and_for_the_sums_that_follow_them():
    full = price("tour", "bidirectional_ring", (8,), (8,))
    assert (full.rounds, full.link) == (9, 7)
    assert (full.sent, full.raw, full.additions) == (14, 7, 7)
    line = Model(0, 1, 0)
    assert seconds(full, 2, line, accumulate_ratio=3) == 2 * (Fraction(7, 2) * (1 + 3))
    on_hosts = price_on_hosts("tour", "ring", (8,), 2)
    assert sum(times * far.link for times, _, far in on_hosts.rounds) == 14
    for rank_count in (1, 2, 3, 5):
        alone = price("tour", "ring", (rank_count,))
        assert alone.raw == alone.sent - alone.raw == rank_count - 1
    with pytest.raises(ValueError, match="name an algorithm"):
        predict("tour", 8e6, place_of(8, "v5e"))
