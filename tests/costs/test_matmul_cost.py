"""The price of a matmul with a collective: worked out on paper, and beside compiled programs."""

import functools
import json
import statistics
from collections import defaultdict
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ringcoll import algorithms
from ringcoll.costs import DEVICES, Model
from ringcoll.costs.matmul import (
    APART,
    AWAITED,
    COPIED,
    FUSED,
    PLACING,
    READ_INSIDE,
    SUMMED,
    Round,
    Work,
    bare_seconds,
    hidden_seconds,
    rounds,
    rounds_of,
)
from ringcoll.matmuls import auto, exchange
from ringcoll.matmuls.labels import Gather, Product, Scatter

pytestmark = pytest.mark.quick

RING, TWO_ENDED = "bidirectional_ring", "two_ended"


def hidden(work, shard_bytes, model, joining=None, n=8, algorithm=RING):
    return hidden_seconds([work], shard_bytes, n, model, rounds_of(algorithm, n), joining)


def test_rounds_are_read_off_the_schedule():
    own, *rest = rounds_of(RING, 4)
    assert own == Round(2, 1, 0)
    assert rest == [Round(2, 1, 0.5)] * 3
    assert rounds_of(TWO_ENDED, 4) == (Round(1, 1, 0), Round(2, 2, 1), Round(1, 1, 1))
    assert rounds(algorithms.build("all_gather", "ring", (3,))) == (
        *(Round(1, 1, 0), Round(1, 1, 1), Round(1, 1, 1)),
    )


def test_a_collective_under_its_matmul_takes_the_longer_of_the_two_a_round():
    machine = Model(alpha=1, beta=1, gamma=3, delta=1)  # a byte of memory: 1 s
    assert hidden(Work(80), 10, machine) == 10 + 7 * 10  # a piece 10, a hop 6
    assert hidden(Work(16), 10, machine) == 2 + 7 * 6  # a piece 2
    assert hidden(Work(80, 5), 10, machine) == 8 * 15
    assert hidden(Work(16, 5), 10, machine) == 7 * (6 + 5) + 2 + 5  # a sum is sent on after adding
    assert bare_seconds([Work(80, 5)], 10, 8, machine) == 80 + 7 * 5
    assert hidden(Work(80, 5), 10, machine, n=1) == 85
    assert bare_seconds([Work(80)], 12, 8, machine, links=3) == 80 + 7 * 4
    # Whole shards: 1, 2, 2, 2 and 1 eighths of the work, under hops of 11.
    assert hidden(Work(80), 10, machine, algorithm=TWO_ENDED) == 11 + 3 * 20 + 10
    assert hidden(Work(160, 5), 10, machine, algorithm=TWO_ENDED) == 8 * (20 + 5)  # as many sums


def test_a_matmul_takes_as_long_as_its_operations_or_as_the_memory():
    machine = Model(alpha=1, beta=1, gamma=3, delta=1, start=2, far=4, near=2, near_bytes=9)
    assert hidden(Work(80), 10, machine) == 8 * (2 + 10)
    assert hidden(Work(80, once=40), 10, machine) == 8 * 20  # an eighth is read a round
    assert bare_seconds([Work(80, once=40)], 10, 8, machine) == 160 + 7 * 5
    # An operand is held after the first round, or read from main memory in each round.
    assert hidden(Work(80, again=9), 10, machine) == 4 * 9 + 7 * 18
    assert hidden(Work(80, again=10), 10, machine) == 8 * 40
    assert bare_seconds([Work(8, again=9)], 10, 8, machine) == 9 + 18 + 7 * 5
    assert bare_seconds([Work(8, again=10)], 10, 8, machine) == 40 + 7 * 5
    # A gather fills the memory meanwhile, or before it is cut.
    assert bare_seconds([Work(8, again=9)], 10, 8, machine, gathers=True) == 7 * 5 + 18
    assert bare_seconds([Work(8, again=9)], 1, 8, machine, gathers=True) == 9 + 18
    assert hidden(Work(80, again=9), 0, machine, APART) == 9 + 16 * 18  # read for each half
    # Sums held in the memory beside the core are added to there.
    assert hidden(Work(80, added=3, again=6), 10, machine) == 24 + 7 * 12 + 8 * 6
    assert hidden(Work(80, added=4, again=6), 10, machine) == 24 + 7 * 12 + 8 * 4


def test_a_sum_that_is_not_held_is_read_and_written_by_every_matmul():
    machine = Model(alpha=0, beta=0, gamma=0, delta=1, far=1, near_bytes=9)
    assert hidden(Work(80, added=2), 0, machine, FUSED) == 80
    assert hidden(Work(80, added=10), 0, machine, FUSED) == 8 * 4 * 10
    # Beside a sum there are two shards, and a slice.
    assert hidden(Work(80, added=5), 2, machine, FUSED) == 80
    assert hidden(Work(80, added=6), 2, machine, FUSED) == 8 * 4 * 6
    assert hidden(Work(80, added=6, sliced=8), 1, machine, FUSED) == 80
    assert hidden(Work(80, added=6, sliced=16), 1, machine, FUSED) == 8 * 4 * 6


def test_several_matmuls_each_have_a_start():
    machine = Model(alpha=0, beta=0, gamma=0, delta=1, start=2)
    works = [Work(8), Work(16)]
    assert bare_seconds(works, 0, 8, machine) == 4 + 24
    assert hidden_seconds(works, 0, 8, machine, rounds_of(RING, 8), FUSED) == 8 * (2 + 1 + 2 + 2)


def test_a_slice_of_a_factor_is_copied_before_the_hop():
    """As compiled for v6e: contraction, 512 x 8192 x 14336: a slice 2.2 us, a hop 6.8."""
    machine = Model(alpha=0, beta=1, gamma=3, delta=1)
    assert hidden(Work(8, added=1e-9, sliced=16), 10, machine, APART) == pytest.approx(
        8 * 2 + 7 * 5 + 1
    )
    # A matmul with one part reads most of the slice itself.
    assert hidden(Work(80, added=1e-9, sliced=16), 10, machine, FUSED, algorithm="ring") == (
        pytest.approx(8 * (10 + READ_INSIDE * 2))
    )
    # The whole is fetched while a built-in gather is under way.
    holds = Model(alpha=0, beta=1, gamma=3, delta=1, far=1, near_bytes=16)
    assert bare_seconds([Work(8, sliced=16)], 10, 8, holds, gathers=True) == 35 + 8


def test_a_scatter_cuts_slices_under_its_hops_and_joins_its_result():
    """As compiled for v5e, 8192 x 8192 x 28672: products 2515 us, cuts 73, the result 21."""
    machine = Model(alpha=0, beta=1, gamma=3, delta=1)  # a byte of memory: 1 s
    assert hidden(Work(80, cut=16), 10, machine) == 8 * (10 + 2)
    assert hidden(Work(8, cut=16), 10, machine) == 7 * 5 + 1 + 2  # a hop is longer
    assert hidden(Work(80, joined=10), 10, machine) == 80 + 10
    assert bare_seconds([Work(80, cut=16, joined=10)], 10, 8, machine) == 80 + 7 * 5


def test_after_other_work_what_is_read_again_is_in_the_memory_beside_the_core():
    """As compiled for v6e, both gradients of 512 x 8192 x 14336: the last product 19 us, not 37."""
    machine = Model(alpha=1, beta=1, gamma=3, delta=1, far=4, near=2, near_bytes=9)
    slow = Model(alpha=1, beta=0, gamma=3, delta=1, near_bytes=9)
    assert bare_seconds([Work(8, again=9)], 10, 8, machine) == 9 + 18 + 7 * 5
    assert bare_seconds([Work(8, again=9)], 10, 8, machine, follows=True) == 18 + 7 * 5
    assert bare_seconds([Work(8, again=6, cut=3)], 10, 8, machine, follows=True) == 18 + 7 * 5
    assert bare_seconds([Work(8, again=6, cut=4)], 10, 8, machine, follows=True) == 28 + 7 * 5
    by = rounds_of(RING, 8)
    assert hidden_seconds([Work(80, again=9)], 10, 8, machine, by) == 4 * 9 + 7 * 18
    rounds = 8 * 18 + AWAITED * (4 * 9 - 18)  # it waits for a part of the fetch
    assert hidden_seconds([Work(80, again=9)], 10, 8, machine, by, follows=True) == rounds
    # So it does for what is cut, if both are held.
    for cut, held in ((8, True), (16, False)):
        whole, after = (
            hidden_seconds([Work(800, cut=cut)], 10, 8, slow, by, follows=follows)
            for follows in (False, True)
        )
        assert after - whole == pytest.approx(AWAITED * cut * held)


def test_a_sum_that_is_not_held_is_moved_several_times_before_a_built_in_scatter():
    machine = Model(alpha=0, beta=1, gamma=0, delta=1, far=1, near_bytes=80)
    assert bare_seconds([Work(100, written=80)], 10, 8, machine) == 100 + 7 * 5
    assert bare_seconds([Work(100, written=81)], 10, 8, machine) == SUMMED * 81 + 7 * 5
    assert bare_seconds([Work(1000, written=81)], 10, 8, machine) == 1000 + 7 * 5


def test_parts_are_copied_or_read_once_more():
    machine = Model(alpha=0, beta=0, gamma=3, delta=1)
    assert hidden(Work(80), 3, machine, FUSED) == 80 + 7 * 3
    assert hidden(Work(80), 3, machine, COPIED) == 80 + 7 * 6
    assert hidden(Work(80), 3, machine, APART) == 80


def test_a_hop_that_compilers_reckon_shorter_than_placing_the_result_is_bare():
    """As compiled for v5p: start, place two halves, done; then the matmul."""
    seconds = 2 * PLACING[0]
    slow = Model(alpha=0, beta=1, gamma=0, delta=1, reckoned_alpha=seconds, reckoned_beta=0)
    work = Work(80, placed=1e-9)
    assert hidden(work, 2, slow, FUSED) == pytest.approx(80 + 7)
    assert hidden(work, 2, slow, APART) == 80  # placed within the matmul
    # As compiled for v5e: if a result is not held, placing takes as long as writing.
    written = Model(alpha=0, beta=0, gamma=3, delta=1, near_bytes=16)
    assert hidden(Work(80, placed=16), 0, written, FUSED) == 80
    assert hidden(Work(80, placed=17), 0, written, FUSED) == 80 + 17
    assert hidden(Work(80, placed=17), 0, written, APART) == 80
    surer = Model(alpha=0, beta=1, gamma=0, delta=1, reckoned_alpha=1.1 * seconds, reckoned_beta=0)
    assert hidden(work, 2, surer, FUSED) == 80


# -- beside compiled programs --

GRID = Path(__file__).parents[2] / "benchmarks" / "pages" / "grid.json"
TWO_BYTES = np.dtype(np.float16)


def array(*shape):
    return SimpleNamespace(shape=shape, size=prod(shape), dtype=TWO_BYTES)


def priced(form, topology, shape):
    """For a cell of the grid: the algorithm of "auto", and seconds by algorithm."""
    name, _, sides = topology.partition(":")
    n, model = prod(map(int, sides.split("x"))) * (1 + (name == "tpu7x")), DEVICES[name]
    m, k, f = map(int, shape.split("x"))
    if form == "matmul_reduce_scatter":
        sums = Scatter("m", "mf", (("mk", "kf"),), TWO_BYTES)
        args = sums, [(array(m, f // n), array(f // n, k))], (n,), model
        return auto.to_scatter(*args), auto.scatter_seconds(*args)
    label, moving, other, x, w = {
        "all_gather_matmul": ("m", "mk", "kf", array(m // n, k), array(k, f // n)),
        "contraction_gather": ("k", "mk", "kf", array(m, k // n), array(k, f // n)),
        "weight_gather": ("k", "kf", "mk", array(k // n, f), array(8 * m // n, k)),
    }[form]
    args = Gather(label, moving, (Product(other, "mf", TWO_BYTES),)), x, [w], (n,), model
    seconds = {**auto.gather_seconds(*args), exchange.EXCHANGED: exchange.seconds(*args)}
    return exchange.EXCHANGED if exchange.pays(*args) else auto.to_gather(*args)[0], seconds


FORMS = "all_gather_matmul", "contraction_gather", "weight_gather", "matmul_reduce_scatter"


@functools.cache
def errors():
    """The relative errors of prices against compiled programs, by kind of algorithm."""
    found = defaultdict(list)
    for row in json.loads(GRID.read_text(encoding="utf-8")):
        which = row["which"]
        if which["form"] not in FORMS or which["direction"] != "forward":
            continue
        chosen, seconds = priced(which["form"], which["topology"], which["shape"])
        algorithm = {"plain": "lax", "auto": chosen}.get(which["algorithm"])
        if algorithm and (algorithm == "lax") == (
            which["algorithm"] == "plain"
        ):  # each program once
            kind = {"lax": "bare", exchange.EXCHANGED: "exchanged"}.get(algorithm, "hidden")
            found[kind].append(abs(1e6 * seconds[algorithm] / row["total"] - 1))
    return found


@pytest.mark.parametrize("kind", ["bare", "hidden"])
def test_prices_are_within_the_stated_error_of_compiled_programs(kind):
    """As `ringcoll.costs.matmul` says: half within 4 %, nine of ten 14, all but one 25."""
    found = sorted(errors()[kind])
    assert len(found) > 90
    assert statistics.median(found) < 0.04
    assert found[int(0.9 * len(found))] < 0.14
    assert found[-1 if kind == "bare" else -2] < 0.25
    assert found[-1] < 0.34


def test_nine_of_ten_prices_of_exchanged_rows_are_within_15_percent_of_compiled_programs():
    """One is a quarter too high: 512 x 8192 x 28672 on v6e:4x2, whose sum is 235 MB."""
    found = sorted(errors()["exchanged"])
    assert len(found) > 10
    assert found[int(0.9 * len(found))] < 0.15
    assert found[-1] < 0.25
