"""Messages over networks at scale, where quadratic work would take minutes."""

import pytest

from ringcoll.algorithms import build, direct
from ringcoll.costs import price
from ringcoll.costs.routes import on_torus
from ringcoll.schedules.schedule import ScheduleError

pytestmark = pytest.mark.quick


def test_a_flat_ring_of_many_ranks():
    n = 2**14
    paid = price("all_gather", "ring", (n,), network=(n,))
    assert (paid.startups, paid.sent, paid.link) == (n - 1, n - 1, n - 1)
    along_rows = on_torus(build("all_gather", "ring", (n,)), (n // 128, 128))
    # The end of a row sends to the next row by other links: two, to the row's start and one on.
    assert along_rows == (n - 1, 2 * (n - 1), n - 1, ())


def test_bad_routes_are_refused_in_words():
    paid = price("all_gather", "direct", (2**12,), network=(2**12,))
    assert (paid.startups, paid.hops, paid.link) == (2**11, 2**11, 2**21 + 2**10)
    # Of 2048 distances, 16 are looked at: every 137th, and the last.
    assert paid.uneven[0].reach[1] == (138, sum(range(138, 2049)))
    with pytest.raises(ScheduleError, match="4096 ranks that send 4095 messages each in a round"):
        on_torus(direct(2**12), (64, 64))
