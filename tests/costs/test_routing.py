"""Messages over networks: between hosts against those walked one by one, and at scale."""

from collections import Counter
from fractions import Fraction as F
from itertools import product as pairs
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import neighbour
from support import exists

from ringcoll.algorithms import GATHERS, build, direct, ring
from ringcoll.costs import price
from ringcoll.costs.routes import on_hosts, on_torus
from ringcoll.schedules.schedule import ScheduleError

pytestmark = pytest.mark.quick

SHAPES = [(2,), (6,), (8,), (4, 2), (2, 4), (3, 4), (2, 2, 2), (12,), (1, 6)]


def walked(schedule, moves, hosts):
    """Startups, and the shards of the busiest port, within hosts and between them."""
    local = schedule.size // hosts
    starts, load = Counter(), Counter()
    for move, rank in pairs(moves, range(schedule.size)):
        to = neighbour(schedule.shape, rank, move)
        between = rank // local != to // local
        starts[between, rank] += 1
        for way, port in (("out", rank), ("in", to)):
            share = F(len(move.offsets), schedule.lanes)
            load[between, way, port // local if between else port] += share
    return [
        (
            max((n for (b, *_), n in starts.items() if b == between), default=0),
            0,
            max((n for (b, *_), n in load.items() if b == between), default=0),
        )
        for between in (False, True)
    ]


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(SHAPES))
def test_ports_of_ranks_and_hosts_are_those_of_the_busiest(data, shape):
    hosts = data.draw(st.sampled_from([h for h in range(1, 13) if prod(shape) % h == 0]))
    names = [name for name in GATHERS if exists("all_gather", name, shape)]
    schedule = GATHERS[data.draw(st.sampled_from(names))](*shape)
    found = Counter()
    for times, inner, outer in on_hosts(schedule, hosts):
        found[inner[:3], outer[:3]] += times
    assert found == Counter(tuple(walked(schedule, moves, hosts)) for moves in schedule.rounds)


# -- at scale: quadratic work would take minutes --


def test_a_flat_ring_of_many_ranks():
    n = 2**14
    paid = price("all_gather", "ring", (n,), network=(n,))
    assert (paid.startups, paid.sent, paid.link) == (n - 1, n - 1, n - 1)
    along_rows = on_torus(build("all_gather", "ring", (n,)), (n // 128, 128))
    # The end of a row sends to the next row by other links: two, to the row's start and one on.
    assert along_rows == (n - 1, 2 * (n - 1), n - 1, ())
    ((times, inner, outer),) = on_hosts(build("all_gather", "ring", (n,)), 128)
    assert (times, inner[:3], outer[:3]) == (n - 1, (1, 0, 1), (1, 0, 1))


def test_bad_routes_are_refused_in_words():
    paid = price("all_gather", "direct", (2**12,), network=(2**12,))
    assert (paid.startups, paid.hops, paid.link) == (2**11, 2**11, 2**21 + 2**10)
    # Of 2048 distances, 16 are looked at: every 137th, and the last.
    assert paid.uneven[0].reach[1] == (138, sum(range(138, 2049)))
    for hosts in (0, 4):
        with pytest.raises(ScheduleError, match=f"6 ranks do not divide among {hosts} hosts"):
            on_hosts(ring(6), hosts)
    for route, network in ((on_torus, (64, 64)), (on_hosts, 64)):
        with pytest.raises(ScheduleError, match="4096 ranks that send 4095 messages each in a rou"):
            route(direct(2**12), network)
