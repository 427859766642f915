"""Slices: which axes are rings, by rule and by link; the command `cost` on one."""

from collections import Counter
from fractions import Fraction
from itertools import product

import pytest
from machine import neighbour

from ringcoll.__main__ import main
from ringcoll.algorithms import build
from ringcoll.costs import place_of, price
from ringcoll.costs.counts import price_backward
from ringcoll.costs.routes import on_torus
from ringcoll.costs.slices import along, closed, rings
from ringcoll.placement.network import Network
from ringcoll.placement.topology import FLAT
from ringcoll.schedules.schedule import ScheduleError

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("axes", "size", "expected"),
    [
        (2, (4, 2), (False, False)),
        (2, (16, 16), (True, True)),
        (2, (16, 8, 1), (True, False, False)),
        (2, (32, 4), (False, False)),
        (3, (4, 4, 4), (True, True, True)),
        (3, (4, 8, 12), (True, True, True)),
        (3, (2, 4, 4), (False, False, False)),
        (3, (4, 4), (False, False)),
    ],
)
def test_axes_of_a_slice_that_are_rings(axes, size, expected):
    assert closed(axes, size) == expected


def test_which_axes_of_ranks_are_rings():
    assert [rings(2, (n,)) for n in (1, 2, 3, 4, 6, 9, 16)] == [
        (is_ring,) for is_ring in (False, False, False, True, True, False, True)
    ]
    assert rings(2, (1, 8)) == (False, True)
    assert rings(2, (16, 8)) == closed(2, (16, 8))
    assert FLAT == ("v5e", "v6e")


@pytest.mark.parametrize("n", range(1, 9))
def test_neighbours_along_a_line_are_two_apart_at_most(n):
    order = along(n, False)
    assert sorted(order) == along(n, True) == list(range(n))
    assert max(abs(a - b) for a, b in zip(order, [*order[1:], order[0]], strict=True)) <= 2


def placed(shape, wrap):
    """A network, and the places of ranks on it along lines and rings."""
    lines = [along(n, is_ring) for n, is_ring in zip(shape, wrap, strict=True)]
    return Network(tuple(product(*lines)), wrap)


@pytest.mark.parametrize(
    "algorithm", ["ring", "bidirectional_ring", "two_ended", "torus", "direct", "bruck"]
)
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        *((one, one) for one in ((2,), (3,), (5,), (2, 3), (3, 5), (4, 2), (2, 3, 2), (1, 6))),
        *(((8,), (4, 2)), ((4, 2), (8,)), ((2, 4), (4, 2)), ((2, 2, 2), (8,)), ((9,), (3, 3))),
        *(((12,), (6, 2)), ((3, 4), (6, 2))),
    ],
)
def test_loads_are_those_of_messages_that_go_link_by_link(algorithm, shape, size):
    for wrap in product([False, True], repeat=len(size)):
        schedule, network = build("all_gather", algorithm, shape), placed(size, wrap)
        startups, hops, link, uneven = 0, 0, 0, []
        for moves in schedule.rounds:
            load, ports, far, sent = {}, {}, 0, []
            for move in moves:
                for rank in range(schedule.size):
                    path = network.path(rank, neighbour(shape, rank, move))
                    far = max(far, len(path))
                    sent.append((path, Fraction(len(move.offsets), schedule.lanes)))
                    ports[path[0]] = ports.get(path[0], 0) + 1
                    for one in path:
                        load[one] = load.get(one, 0) + len(move.offsets)
            startups, hops = startups + max(ports.values()), hops + far
            link += max(load.values())
            uneven += reach_of(sent)
        found = on_torus(schedule, size, wrap)
        passed = (found.startups, found.hops, found.link * schedule.lanes)
        assert passed == (startups, hops, link), wrap
        reach = [reach for times, reach in found.uneven for _ in range(times)]
        assert sorted(reach) == sorted(uneven)


def reach_of(sent):
    """`UnevenRounds.reach` for paths and shards of a round; nothing if paths are equally long."""
    distances = sorted({len(path) for path, _ in sent})
    reach = []
    for links in distances:
        load = Counter()
        for path, shards in sent:
            load.update(dict.fromkeys(path, shards) if len(path) >= links else {})
        reach.append((links, max(load.values())))
    farther = [max((s for _, s in reach[i + 1 :]), default=0) for i in range(len(reach))]
    kept = [one for one, most in zip(reach, farther, strict=True) if one[1] > most]
    return [tuple(kept)] if len(kept) > 1 else []


def test_closed_needs_a_value_for_each_axis():
    with pytest.raises(ScheduleError, match=r"closed \(True,\) is not of the axes of \(4, 2\)"):
        price_backward(build("all_gather", "ring", (4, 2)), (4, 2), (True,))
    everything = price("all_gather", "ring", (4, 2), (4, 2))
    assert price("all_gather", "ring", (4, 2), (4, 2), (True, True)) == everything


# -- the command --


def test_a_network_by_its_shape_is_a_slice(capsys):
    for ranks, network, counts in (
        ("2", "2x1", (1, 1, 1)),
        ("16", "16x1", (15, 15, 15)),
        ("8", "8x1", (7, 14, 7)),  # two links a step
        ("16x16", "16x16", (30, 30, 255)),
    ):
        shape = tuple(map(int, ranks.split("x")))
        paid = place_of(shape, "v5e", network=network).price("all_gather", "ring")
        assert (paid.startups, paid.hops, paid.link) == counts
        asked = ["--algorithm", "ring", "-n", ranks, "--network", network]
        assert main(["cost", "all_gather", *asked, "--device", "v5e"]) == 0
        printed = capsys.readouterr().out
        assert ("axis of 8 is a line, not a ring" in printed) == (network == "8x1")
