"""Runs of schedules by themselves: visits and contributions in every round, unrolled and as a loop.

No collective is involved. What a run must do is computed here from the schedule as data. The
data are integers, or are compared bit by bit, so results must be equal.
"""

from dataclasses import replace
from functools import partial
from itertools import groupby, product
from math import prod

import jax.numpy as jnp
import numpy as np
import pytest
from covering import SEEDS, covering
from jax import lax
from machine import plus
from support import exists, make_mesh, per_rank

from ringcoll import algorithms
from ringcoll.algorithms import GATHERS
from ringcoll.runtime import run
from ringcoll.runtime.barriers import GATHER_ADD, GATHER_PLACE, NO_WORK, REDUCE
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.parts import Layout, shares
from ringcoll.schedules.schedule import Move, Schedule, stretches
from ringcoll.schedules.tour import tour

#: A ring that sends offset 1 again at the end: backward, its sum is there before the loop.
RESENT = Schedule((6,), (*((Move(1, (t,)),) for t in range(4)), (Move(4, (1,)),))).check()


def everyone(shape):
    return Ranks.over(tuple("xyz"[: len(shape)]), None)


def rounds_by_origin(schedule, rank):
    """[lane, origin]: in which round its shard reaches the rank (0: its own)."""
    when = np.zeros((schedule.lanes, schedule.size), int)
    for number, move in schedule.numbered_moves():
        for offset in schedule.arrivals(move):
            when[move.lane, plus(schedule.shape, rank, offset, -1)] = number
    return when


def layout_of(schedule, lanes=1):
    """Three rows for each lane."""
    rows = 3 * lanes * schedule.lanes
    return Layout(0, rows, 0, shares(rows, lanes * schedule.lanes))


def gathered(schedule, ranks, x, order):
    """How often every part was visited, when, and its value: by lane and origin."""

    def visit(carry, parts):
        clock, book = carry
        for part in parts:
            at, page = (part.lane, part.origin, 0), (1, 1, book.shape[2])
            entry = jnp.concatenate([jnp.stack([1, clock]), part.value]).reshape(page)
            entry += lax.dynamic_slice(book, at, page)
            book = lax.dynamic_update_slice(book, entry, at)
        return clock + 1, book

    own = x[0, : schedule.lanes].reshape(-1)
    blank = jnp.zeros((schedule.lanes, ranks.size, 2 + 3), jnp.int32)
    zero = ranks.number() * 0  # varying, as all that is computed from it
    start = zero, blank + zero
    ranks = replace(ranks, shape=schedule.shape)
    layout = layout_of(schedule)
    book = run.gather(schedule, ranks, layout, own, visit, start, order=order)[1]
    return book[..., 0], book[..., 1], book[..., 2:]


def reduced(schedule, ranks, x, order):
    """The sums for this rank, and if nothing is looped, the origins that were asked for by lane."""
    asked = []

    def produce(parts):
        asked.extend(parts)
        return [x[part.origin, part.lane] for part in parts]

    sums = run.reduce(schedule, ranks, layout_of(schedule), produce, lax.add, order=order)
    limit = 0 if order.always_loops else run.UNROLL_UP_TO
    if len(stretches(schedule, limit)) < len(schedule.rounds):  # parts of a loop's own trace
        return jnp.stack(sums), []
    by_lane = [[p.origin for p in asked if p.lane == i] for i in range(schedule.lanes)]
    return jnp.stack(sums), by_lane


def toured(schedule, ranks, x, order, halves=False):
    """What a rank has seen, weighed by origin; and the sums that came home."""

    def visit(carry, parts):
        contributions = []
        for part in parts:
            first, count = part.rows
            first -= 3 * part.lane
            carry += (1 + part.origin) * jnp.sum(part.value)
            contributions.append(x[part.origin, part.lane, first : first + count])
        return carry, contributions

    own, nothing = x[0, : schedule.lanes].reshape(-1), jnp.int32(0) + ranks.number() * 0
    path, layout = tour(schedule), layout_of(schedule)
    carry, sums = run.tour(path, ranks, layout, own, visit, nothing, order, halved=halves)
    return carry, jnp.stack(sums)


RUNS = {
    "gather": gathered,
    "reduce": reduced,
    "tour": toured,
    "tour by halves": partial(toured, halves=True),
}
FACTORS = {
    "run": [*RUNS],
    "algorithm": [*GATHERS, "resent"],
    "shape": [(1,), (2,), (3,), (6,), (8,), (4, 2)],
    "order": [NO_WORK, GATHER_PLACE, GATHER_ADD, REDUCE],
    "unroll up to": [24, 2],
    "check_vma": [True, False],
}


def schedule_of(algorithm, shape):
    """The schedule; None if there is none."""
    if algorithm == "resent":
        return RESENT if shape == (6,) else None
    return (
        algorithms.build("all_gather", algorithm, shape)
        if exists("all_gather", algorithm, shape)
        else None
    )


def forbidden(case):
    options = ([case[key]] if key in case else FACTORS[key] for key in ("algorithm", "shape"))
    return not any(schedule_of(*some) for some in product(*options))


def check(case, found, x):
    kind, shape, name = case["run"], case["shape"], str(case)
    schedule, n = schedule_of(case["algorithm"], shape), prod(shape)
    lanes = schedule.lanes
    if kind == "gather":
        times, when, values = found
        assert (times == 1).all(), name
        for rank in range(n):
            np.testing.assert_array_equal(when[rank], rounds_by_origin(schedule, rank), name)
            np.testing.assert_array_equal(values[rank], x[:, 0, :lanes].swapaxes(0, 1), name)
    elif kind == "reduce":
        sums, asked = found
        np.testing.assert_array_equal(sums, x.sum(0)[:, :lanes], name)
        for by_lane in asked:
            seen = np.sort(np.stack(by_lane, axis=1))
            np.testing.assert_array_equal(seen, [np.arange(n)] * n, name)
    else:
        carry, sums = found
        seen = (x[:, 0, :lanes].sum((1, 2)) * (1 + np.arange(n))).sum()
        np.testing.assert_array_equal(carry, [seen] * n, name)
        np.testing.assert_array_equal(sums, x.sum(0)[:, :lanes], name)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_run_by_every_schedule(seed, monkeypatch):
    def program_of(case):
        return case["shape"], case["check_vma"]

    cases = sorted(covering(FACTORS, forbidden, seed), key=program_of)
    for (shape, check_vma), group in groupby(cases, program_of):
        some, n = list(group), prod(shape)
        # [rank, origin or target, lane, row]
        x = np.random.default_rng(0).integers(2**16, size=(n, n, 8, 3), dtype=np.int32)

        def program(x, some=some, shape=shape):
            results = []
            for case in some:
                monkeypatch.setattr(run, "UNROLL_UP_TO", case["unroll up to"])
                schedule = schedule_of(case["algorithm"], shape)
                ranks = replace(everyone(shape), shape=schedule.shape)
                results.append(RUNS[case["run"]](schedule, ranks, x, case["order"]))
            return results

        found = per_rank(make_mesh(*shape), program, x, check_vma=check_vma)
        for case, result in zip(some, found, strict=True):
            check(case, result, x)


@pytest.mark.parametrize("unroll", [24, 2])
def test_the_order_of_combine(unroll, monkeypatch):
    """On a ring, received sums are doubled, so the number of the rank k ahead counts 2**k times."""
    monkeypatch.setattr(run, "UNROLL_UP_TO", unroll)

    def program(x):
        def produce(parts):
            return [x[None] for _ in parts]

        ring, ranks = algorithms.ring(5), everyone((5,))
        return run.reduce(
            ring, ranks, Layout(0, 1, 0, shares(1, 1)), produce, lambda a, b: 2 * a + b
        )[0]

    results = per_rank(make_mesh(5), program, np.arange(5, dtype=np.float32))
    expected = [[sum(2**k * ((rank + k) % 5) for k in range(5))] for rank in range(5)]
    np.testing.assert_array_equal(results, expected)
