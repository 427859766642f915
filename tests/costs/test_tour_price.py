"""Prices of tours and of cut schedules, in closed form."""

from fractions import Fraction

import pytest

from ringcoll.costs import Model, place_of, predict, price, price_tour, seconds
from ringcoll.costs.counts import price_on_hosts

pytestmark = pytest.mark.quick


def test_a_tour_pays_for_shards_and_for_the_sums_that_follow_them():
    paid = price_tour("bidirectional_ring", (8,), (8,))
    assert (paid.rounds, paid.shards.link, paid.sums.link) == (9, Fraction(7, 2), Fraction(7, 2))
    full = price("tour", "bidirectional_ring", (8,), (8,))
    assert (full.rounds, full.sent, full.raw, full.additions) == (9, 14, 7, 7)
    line = Model(0, 1, 0)
    assert seconds(full, 2, line, accumulate_ratio=3) == 2 * (Fraction(7, 2) * (1 + 3))
    on_hosts = price_on_hosts("tour", "ring", (8,), 2)
    assert sum(times * far.link for times, _, far in on_hosts.rounds) == 14
    for rank_count in (1, 2, 3, 5):
        alone = price_tour("ring", (rank_count,))
        assert alone.shards.sent == alone.sums.sent == rank_count - 1


def test_a_cut_schedule_is_priced_as_it_is_cut():
    near = frozenset({1, 2})
    paid = price_tour("ring", (8,), (8,), offsets=near)
    assert (paid.shards.rounds, paid.shards.link, paid.sums.link) == (2, 2, 2)
    assert price("all_gather", "ring", (8,), (8,), offsets=near).hops == 2
    assert price("all_gather", "ring", (8,), offsets=frozenset()).sent == 0
    (round_,) = price_on_hosts("all_gather", "ring", (8,), 2, offsets=near).rounds
    assert round_[0] == 2
    few = predict("all_gather", 8e6, place_of(8, "v5e"), "ring", offsets=near)
    assert few == pytest.approx(2 / 7 * predict("all_gather", 8e6, place_of(8, "v5e"), "ring"))
    with pytest.raises(ValueError, match="only an all_gather or a tour is cut"):
        price("psum", "ring", (8,), offsets=near)
    with pytest.raises(ValueError, match="name an algorithm"):
        predict("tour", 8e6, place_of(8, "v5e"))
