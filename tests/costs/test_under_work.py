"""The price of a schedule under work: worked out on paper, and beside compiled programs."""

import json
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import pytest

from ringcoll import algorithms
from ringcoll.choose.plan import ERROR, cheapest
from ringcoll.commands.cost_matmul import GATHER, SUM, Matmul
from ringcoll.costs import DEVICES, Model
from ringcoll.costs.under_work import (
    RoundLoad,
    Work,
    all_to_all_seconds,
    built_in_seconds,
    overlapped_seconds,
    rounds,
    tour_rounds,
)
from ringcoll.schedules.registry import LAX
from ringcoll.schedules.tour import Tour, tour

pytestmark = pytest.mark.quick

HALVES, WHOLE, RING = "bidirectional_ring", "two_ended", "ring"


def of(name, *shape, closed=None):
    return rounds(algorithms.build("all_gather", name, shape), closed)


# -- on paper --


@pytest.mark.parametrize(
    ("found", "own_and_rest"),
    [
        (of(RING, 4), [(1, 0), *[(1, 1)] * 3]),
        (of(HALVES, 4), [(1, 0), *[(1, 0.5)] * 3]),
        (of(WHOLE, 4), [(1, 0), (2, 1), (1, 1)]),
        # On a line, each message passes two links, and both directions share them.
        (of(RING, 4, closed=[False]), [(1, 0), *[(1, 2)] * 3]),
        (of(HALVES, 4, closed=[False]), [(1, 0), *[(1, 2)] * 3]),
        (of(WHOLE, 4, closed=[False]), [(1, 0), (2, 4), (1, 2)]),
        (of(RING, 2, closed=[False]), [(1, 0), (1, 1)]),  # two ranks are a ring
        (of(RING, 3, 3, closed=[True, False]), [(1, 0), *[(1, 1)] * 2, *[(3, 6)] * 2]),
    ],
)
def test_rounds_are_read_off_the_schedule(found, own_and_rest):
    assert list(found) == own_and_rest


def test_in_a_tour_sums_travel_home_beside_the_shards():
    """As `schedules.tour` draws it: the first sum leaves at time 3, the last comes at time 5."""
    path = tour(algorithms.build("all_gather", RING, (4,)))
    out, home = [(1, 1), (1, 1), (1, 1 + 3)], [(0, 3), (0, 3)]
    assert list(tour_rounds(path, 3.0)) == [(1, 0), *out, *home]
    # Over two axes, the last two rounds of a gather send three shards. Sums go backward.
    path = Tour(*[algorithms.build("all_gather", RING, (3, 3))] * 2)
    out, home = [(1, 1), (1, 1), (3, 3), (3, 3)], [(0, 3), (0, 3), (0, 1), (0, 1)]
    assert list(tour_rounds(path)) == [(1, 0), *out, (0, 0), *home]


#: As in a tour: the last round brings no shard.
WITH_A_HOP_AT_THE_END = [RoundLoad(1, 0), RoundLoad(1, 1), RoundLoad(0, 2)]
#: A message takes 1 second, and one more a byte; main memory takes one a byte.
BARE = Model(alpha=1, beta=1, gamma=3, delta=1)
#: The same with memory that matmuls read, of which 9 bytes are near.
FULL = Model(
    alpha=1, beta=1, gamma=3, delta=1, start=2, hbm_seconds=5, vmem_seconds=3, vmem_bytes=9
)


@pytest.mark.parametrize(
    ("seconds", "work", "shard_bytes", "model", "of_rounds"),
    [
        # The longer of a piece and a hop, in each round.
        (4 * 20, Work(80), 10, BARE, of(RING, 4)),
        (3 * 11 + 4, Work(16), 10, BARE, of(RING, 4)),
        (3 * 6 + 4, Work(16), 10, BARE, of(HALVES, 4)),
        (11 + 16 + 8, Work(32), 10, BARE, of(WHOLE, 4)),
        (3 * 15 + 4, Work(16), 10, Model(9, 1, 3, 1, hop=5), of(RING, 4)),
        (11 + 21 + 2 * 2 * 5, Work(20, accumulated=5), 10, BARE, WITH_A_HOP_AT_THE_END),
        # FLOPs and a start, or the bytes that are read.
        (4 * (2 + 20), Work(80), 10, FULL, of(RING, 4)),
        (4 * 10 * 5, Work(80, read_once=40), 10, FULL, of(RING, 4)),
        (4 * 10 * 5, Work(80, reread=10), 10, FULL, of(RING, 4)),
        (4 * (50 + 50), Work(80, read_once=40, reread=10), 10, FULL, of(RING, 4)),
        (9 + 4 * 9 * 3, Work(80, reread=9), 10, FULL, of(RING, 4)),  # it is fetched, and is near
        # Slices are copied.
        (4 * 22 + 16, Work(80, slice_reads=16), 10, FULL, of(RING, 4)),
        # A sum is read and written by each piece, in the near memory if shards fit beside it.
        (4 * 22 + 4 * 2 * 10, Work(80, accumulated=10), 0, FULL, of(RING, 4)),
        (22 + 42 + 22 + 3 * 2 * 10, Work(80, accumulated=10), 0, FULL, of(WHOLE, 4)),
        (4 * 22 + 4 * 2 * 5 * 3, Work(80, accumulated=5), 2, FULL, of(RING, 4)),
        (4 * 22 + 4 * 2 * 5, Work(80, accumulated=5), 2.5, FULL, of(RING, 4)),
        (4 + 4 * 22 + 4 * 2 * 4 * 3, Work(80, reread=4, accumulated=4), 0.5, FULL, of(RING, 4)),
        (4 * 22 + 4 * 2 * 4, Work(80, reread=4, accumulated=4), 1, FULL, of(RING, 4)),
    ],
)
def test_a_schedule_under_work(seconds, work, shard_bytes, model, of_rounds):
    assert overlapped_seconds([work], shard_bytes, model, of_rounds) == seconds


def test_several_matmuls_each_have_a_start_and_share_the_memory():
    ring = of(RING, 4)
    assert overlapped_seconds([Work(8), Work(16)], 0, FULL, ring) == 4 * (2 + 2 + 2 + 4)
    near, far = ([Work(8, reread=5), Work(8, reread=some)] for some in (4, 5))
    assert overlapped_seconds(near, 0, FULL, ring) == 9 + 4 * (15 + 12)
    assert overlapped_seconds(far, 0, FULL, ring) == 4 * (25 + 25)
    assert built_in_seconds(near, 0, 4, FULL, gathers=False) == 9 + 15 + 12
    assert built_in_seconds(far, 0, 4, FULL, gathers=False) == 25 + 25


def test_encoded_messages_are_decoded_after_each_hop_or_all_at_the_end():
    decoding = 4 * 0.5 * 10 * 5
    assert overlapped_seconds([Work(16)], 10, FULL, of(RING, 4), 0.5) == 4 * 6 + decoding
    encoding = (1 + 4) * 10 * 1.5
    built_in = built_in_seconds([Work(80)], 10, 4, FULL, gathers=True, ratio=0.5)
    assert built_in == 2 + 3 * 5 / 2 + encoding + 82


@pytest.mark.parametrize(
    ("gather", "scatter", "work", "shard_bytes"),
    [
        # It starts, for two links to the farthest rank.
        (17 + 82, 17 + 82, Work(80), 10),
        (17 + 82, 17 + 9 + 82, Work(80, reread=9), 10),  # fetched while the gather travels
        (9 + 82, 8 + 9 + 82, Work(80, reread=9), 4),
        (17 + 27, 17 + 9 + 27, Work(8, reread=9), 10),
        (17 + 50, 17 + 50, Work(8, reread=10), 10),
        # Nothing is sliced: a gather fetches all, a scatter reads it where it is.
        (17 + 27, 17 + 6 + 15 + 18, Work(8, reread=6, slice_reads=3), 10),
        (17 + 50, 17 + 6 + 20 + 18, Work(8, reread=6, slice_reads=4), 10),
        (17 + 25 + 27, 17 + 9 + 25 + 27, Work(8, read_once=5, reread=9), 10),
        (17 + 10, 17 + 10, Work(8, accumulated=99), 10),  # no piece adds to a sum
        (10, 10, Work(8), 0),  # nothing is sent, and so nothing starts
    ],
)
def test_a_built_in_collective_travels_alone(gather, scatter, work, shard_bytes):
    for gathers, seconds in ((True, gather), (False, scatter)):
        assert built_in_seconds([work], shard_bytes, 4, FULL, gathers=gathers) == seconds


@pytest.mark.parametrize(("ranks", "shards"), [(1, 0), (2, 1), (4, 2), (6, 4)])
def test_what_arrives_at_a_chip_is_for_all_its_devices(ranks, shards):
    chip = replace(BARE, devices=2)  # with two links
    start = 1 * min(ranks - 1, ranks / 2)
    found = built_in_seconds([], 10, ranks, chip, gathers=True)
    assert found == start + shards * 10 / 2


@pytest.mark.parametrize(
    ("seconds", "block_bytes", "ranks", "axes"),
    [
        # two links; the average message passes 8 / 4 of them, the start 8 / 2
        (40 + 7 / 8 * 16 * 2 / 2, 16, 8, 1),
        # a grid has two links, and a message passes at least one
        (20 + 3 / 4 * 16 / 2, 16, 4, 2),
        (60 + 15 / 16 * 32 * 2 / 2, 32, 16, 2),
        (160 + 255 / 256 * 512 * 8 / 4, 512, 256, 2),  # a torus has four
        (30 + 7 / 8 * 16 * 1.5 / 3, 16, 8, 3),
        (0, 16, 1, 1),
    ],
)
def test_an_all_to_all_passes_a_quarter_of_each_axis(seconds, block_bytes, ranks, axes):
    model = Model(alpha=9, hop=1, beta=1, gamma=9, axes=axes)
    assert all_to_all_seconds(block_bytes, ranks, model) == seconds


# -- beside compiled programs --

GRID = Path(__file__).parents[2] / "benchmarks" / "pages" / "grid.json"
#: The calls of the grid's forms; the rows of `weight_gather` are 8 times the first size.
CALLS = {
    "all_gather_matmul": (GATHER, 0, -2),
    "contraction_gather": (GATHER, 0, -1),
    "weight_gather": (GATHER, 1, -2),
    "matmul_reduce_scatter": (SUM, 0, -2),
}


def planned(form, topology, shape):
    """For a cell of the grid: the price of the built-in, and the plan of "auto"."""
    name, _, sides = topology.partition(":")
    ranks = prod(map(int, sides.split("x"))) * (1 + (name == "tpu7x"))
    m, k, f = map(int, shape.split("x"))
    rows = m * (8 if form == "weight_gather" else 1)
    matmul, cell = Matmul(*CALLS[form], None, (ranks,)), ((rows, k, f), DEVICES[name])
    forms = matmul.forms(*cell)
    return forms[0].seconds, cheapest(forms)


@cache
def errors():
    """The relative errors of prices against compiled programs, by kind of form.

    A cell's "auto" counts if it is not the plain program, and would not be it by price.
    """
    cells, found = defaultdict(dict), defaultdict(list)
    for row in json.loads(GRID.read_text(encoding="utf-8")):
        which = row["which"]
        if which["form"] in CALLS and which["direction"] == "forward":
            cell = which["form"], which["topology"], which["shape"]
            cells[cell][which["algorithm"]] = row["total"] / 1e6
    for cell, compiled in cells.items():
        built_in, plan = planned(*cell)
        found["built-in"].append(abs(built_in / compiled["plain"] - 1))
        is_plain = abs(compiled["auto"] / compiled["plain"] - 1) < 0.01
        if not is_plain and plan.name != LAX:
            found["hidden"].append(abs(plan.seconds / compiled["auto"] - 1))
    return found


@pytest.mark.parametrize(
    ("kind", "count", "half", "nine_of_ten", "most"),
    [
        ("built-in", 32, 0.07, 0.11, 0.22),
        ("hidden", 14, 0.06, 0.14, 0.16),
    ],
)
def test_prices_are_within_the_stated_error_of_compiled_programs(
    kind, count, half, nine_of_ten, most
):
    found = sorted(errors()[kind])
    assert len(found) >= count
    assert statistics.median(found) < half
    assert found[int(0.9 * len(found))] < nine_of_ten
    assert found[-1] < most
    every = sorted(share for kind in errors().values() for share in kind)
    assert round(every[int(0.75 * len(every))], 2) == ERROR
    row = f"| {kind} | {half:.0%} | {nine_of_ten:.0%} | {most:.0%} |".replace("%", " %")
    assert row in (GRID.parents[2] / "docs" / "auto.md").read_text(encoding="utf-8")
