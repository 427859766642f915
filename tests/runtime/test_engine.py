"""The engine by itself: visits and contributions in every round, unrolled and as a loop.

No collective is involved. What the engine must do is computed here from the schedule as data. The
data are integers, or are compared bit by bit, so results must be equal.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import SIZES, distinct, make_mesh, mostly_exhaustive, per_rank, runnable

from ringcoll import algorithms
from ringcoll.runtime import engine, turns
from ringcoll.runtime.barriers import Summing
from ringcoll.runtime.contributions import Contributions
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.order import Order
from ringcoll.schedules.schedule import Move, Schedule, stretches

FORMS = {"unrolled": 24, "loop": 2}  # UNROLL_UP_TO; with 8 devices, no stretch is longer than 7

#: A ring that sends offset 1 again at the end: backward, its sum is there before the loop.
RESENT = Schedule((6,), (*((Move(1, (t,)),) for t in range(4)), (Move(4, (1,)),))).check()


#: Every shape unrolled, and as a loop if a stretch is long enough.
CASES = [
    *((shape, "unrolled", True) for shape in [*((n,) for n in SIZES), (4, 2), (2, 2, 2)]),
    *((shape, "unrolled", False) for shape in [(5,), (4, 2)]),
    *((shape, "loop", True) for shape in [(5,), (6,), (8,), (4, 2), (2, 4)]),
    *((shape, "loop", False) for shape in [(6,), (4, 2)]),
]
#: Odd and even, on one axis and on two, typed or not.
USUAL = [
    *(((3,), "unrolled", True), ((8,), "unrolled", True), ((4, 2), "unrolled", False)),
    *(((6,), "loop", True), ((4, 2), "loop", False)),
]


everywhere = pytest.mark.parametrize(
    ("shape", "form", "check_vma"), mostly_exhaustive(CASES, lambda *case: case in USUAL)
)


def schedules(shape, form):
    built = {a: algorithms.build("all_gather", a, shape) for a in distinct("all_gather", *shape)}
    if shape == (6,):
        built["resent"] = RESENT
    long = {a for a, s in built.items() if len(stretches(s, 2)) < len(s.rounds)}
    return {a: s for a, s in built.items() if form == "unrolled" or a in long}


def everyone(shape):
    return Ranks.over(tuple("xyz"[: len(shape)]), None)


def minus(shape, rank, offset):
    """rank - offset, digit by digit."""
    here, back = np.unravel_index(rank, shape), np.unravel_index(offset, shape)
    return np.ravel_multi_index([h - b for h, b in zip(here, back, strict=True)], shape, "wrap")


def rounds_by_origin(schedule, rank):
    """[lane, origin]: in which round its shard reaches the rank (0: its own)."""
    when = np.zeros((schedule.lanes, schedule.size), int)
    for number, move in schedule.numbered_moves():
        for offset in schedule.arrivals(move):
            when[move.lane, minus(schedule.shape, rank, offset)] = number
    return when


def diary(schedule, ranks, own, order):
    """Gather; record by [lane, origin] how often the visitor got a shard, when, and its value."""

    def visit(carry, shards):
        clock, book = carry
        for value, origin, lane, *_ in shards:
            at, page = (lane, origin, 0), (1, 1, book.shape[2])
            entry = jnp.concatenate([jnp.stack([1, clock]), value]).reshape(page)
            entry += lax.dynamic_slice(book, at, page)
            book = lax.dynamic_update_slice(book, entry, at)
        return clock + 1, book

    blank = jnp.zeros((schedule.lanes, ranks.size, 2 + own[0].size), jnp.int32)
    start = (jnp.int32(0), blank + ranks.number() * 0)  # varying, as what is written into it
    ranks = replace(ranks, shape=schedule.shape)
    book = engine.gather(schedule, ranks, own, visit, start, order=order)[1]
    return book[..., 0], book[..., 1], book[..., 2:]


@everywhere
def test_gather_visits_every_origin_once_in_its_round(shape, form, check_vma, monkeypatch):
    monkeypatch.setattr(engine, "UNROLL_UP_TO", FORMS[form])
    every, n = schedules(shape, form), int(np.prod(shape))
    assert every
    x = np.random.default_rng(0).integers(2**30, size=(n, 6, 3), dtype=np.int32)

    def program(x):
        return {
            f"{type(order).__name__} {a}": diary(s, everyone(shape), list(x[: s.lanes]), order)
            for a, s in every.items()
            for order in ((Order(), Summing()) if form == "loop" else (Order(),))
        }

    results = per_rank(make_mesh(*shape), program, x, check_vma=check_vma)
    for name, (times, when, values) in results.items():
        schedule = every[name.split()[1]]
        assert (times == 1).all(), name
        for rank in range(n):
            np.testing.assert_array_equal(when[rank], rounds_by_origin(schedule, rank), name)
            np.testing.assert_array_equal(values[rank], x[:, : schedule.lanes].swapaxes(0, 1), name)


@everywhere
def test_reduce_asks_once_for_every_slot_and_sums_all(shape, form, check_vma, monkeypatch):
    monkeypatch.setattr(engine, "UNROLL_UP_TO", FORMS[form])
    every, n = schedules(shape, form), int(np.prod(shape))
    assert every
    x = np.random.default_rng(0).integers(2**24, size=(n, n, 6), dtype=np.int32)

    def program(x):  # [origin, lane]
        def reduced(schedule):
            asked = []

            def produce(_, slots):
                asked.extend(slots)
                return Contributions([x[origin, lane] for origin, lane in slots])

            ranks = replace(everyone(shape), shape=schedule.shape)
            mine = engine.reduce(schedule, ranks, produce, lax.add)
            if form == "loop":  # its slots are of another trace
                return mine, []
            return mine, [[o for o, lane in asked if lane == i] for i in range(len(mine))]

        return {name: reduced(schedule) for name, schedule in every.items()}

    results = per_rank(make_mesh(*shape), program, x, check_vma=check_vma)
    for name, (mine, asked) in results.items():
        for lane, total in enumerate(mine):
            np.testing.assert_array_equal(total, x.sum(0)[:, lane], name)
        for by_lane in asked:
            seen = np.sort(np.stack(by_lane, axis=1))
            np.testing.assert_array_equal(seen, [np.arange(n)] * n, name)


def in_both_forms(monkeypatch, trace):
    """The results with rounds unrolled, and as a loop."""

    def traced(loop_from):
        monkeypatch.setattr(engine, "UNROLL_UP_TO", loop_from)
        return trace()

    return [traced(loop_from) for loop_from in FORMS.values()]


def of_floats(schedule, ranks, x, w):
    """A user's visitor and producer, and the gradient through both."""
    ranks = replace(ranks, shape=schedule.shape)
    own = list(x[: schedule.lanes])

    def gathered(own):
        def visit(carry, shards):
            for value, origin, lane, *_ in shards:
                carry += w[origin, lane] * value * value
            return carry

        return engine.gather(schedule, ranks, own, visit, 0 * x[0] + 0 * ranks.number())

    def reduced(own):
        def produce(_, slots):
            return Contributions([w[origin, lane] * own[lane] ** 2 for origin, lane in slots])

        return engine.reduce(schedule, ranks, produce, lax.add)

    def loss(own):
        return gathered(own).sum() + sum(part.sum() for part in reduced(own))

    return gathered(own), reduced(own), jax.grad(loss)(own)


@pytest.mark.parametrize(
    ("shape", "check_vma"),
    mostly_exhaustive(
        [((8,), True), ((4, 2), True), ((6,), False)], lambda shape, _: shape == (6,)
    ),
    ids=str,
)
def test_user_visitors_and_their_gradients(shape, check_vma, monkeypatch):
    every, n = schedules(shape, "loop"), int(np.prod(shape))
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, size=(n, 4, 3)).astype(np.float32)  # every sum is exact
    w = rng.integers(-9, 9, size=(n, n, 4)).astype(np.float32)

    def program(x, w):
        def trace():
            return {a: of_floats(s, everyone(shape), x, w) for a, s in every.items()}

        return in_both_forms(monkeypatch, trace)

    for form in per_rank(make_mesh(*shape), program, x, w, check_vma=check_vma):
        for name, (gathered, reduced, slope) in form.items():
            own, weight = x[:, : every[name].lanes], w[:, :, : every[name].lanes]
            expected = np.einsum("rol,olk->rk", weight, own**2)
            np.testing.assert_array_equal(gathered, expected, name)
            expected = np.einsum("rol,rlk->lok", weight, own**2)
            np.testing.assert_array_equal(np.stack(reduced), expected, name)
            expected = 2 * own * (weight.sum(0) + weight.sum(1))[:, :, None]
            np.testing.assert_array_equal(np.stack(slope, 1), expected, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(30,), (4, 4)], ids=str)
def test_loops_of_more_ranks_than_devices(shape, monkeypatch):
    # vmap axes instead of a mesh: the engine does not know. Only so many ranks have a
    # torus whose lanes loop at the same time, or a ring longer than UNROLL_UP_TO as it is.
    n = int(np.prod(shape))
    if len(shape) > 1:
        monkeypatch.setattr(engine, "UNROLL_UP_TO", 2)
    schedule = algorithms.build("all_gather", "torus", shape)
    assert len(stretches(schedule, engine.UNROLL_UP_TO)) == len(shape)
    x = np.random.default_rng(0).integers(2**24, size=(n, n, 6), dtype=np.int32)

    def program(x):
        ranks = replace(everyone(shape), shape=schedule.shape)
        shards = list(x[0, : schedule.lanes, None])

        def produce(_, slots):
            return Contributions([x[origin, lane] for origin, lane in slots])

        mine = engine.reduce(schedule, ranks, produce, lax.add)
        return mine, diary(schedule, ranks, shards, Order())

    for name in reversed("xyz"[: len(shape)]):
        program = jax.vmap(program, axis_name=name)
    results = jax.jit(program)(x.reshape(*shape, n, 6))
    flat = jax.tree.map(lambda y: np.asarray(y).reshape(n, *y.shape[len(shape) :]), results)
    mine, (times, _, values) = flat
    np.testing.assert_array_equal(np.stack(mine, 1), x.sum(0)[:, : schedule.lanes])
    assert (times == 1).all()
    by_lane = x[:, 0, : schedule.lanes].T
    np.testing.assert_array_equal(values[..., 0], np.broadcast_to(by_lane, values.shape[:-1]))


@pytest.mark.parametrize("check_vma", [True, False])
def test_exchange_carries_every_block_to_its_rank(check_vma):
    for shape in [(1,), (5,), (8,), (4, 2)]:
        n = int(np.prod(shape))
        every = {a: algorithms.build("all_to_all", a, shape) for a in ("pairwise", "bruck")}
        blocks = np.arange(n * n).reshape(n, n)  # [rank, for rank r + d]

        def program(blocks, shape=shape, every=every):
            return [
                engine.all_to_all(s, replace(everyone(shape), shape=s.shape), list(blocks))
                for s in every.values()
            ]

        for exchanged in per_rank(make_mesh(*shape), program, blocks, check_vma=check_vma):
            for d, block in enumerate(exchanged):
                sender = [minus(shape, rank, d) for rank in range(n)]
                np.testing.assert_array_equal(block, blocks[sender, d])


@pytest.mark.parametrize("unroll", [24, 2])
def test_what_was_received_is_combined_with_what_is_mine_in_that_order(unroll, monkeypatch):
    """On a ring, received sums are doubled, so the number of the rank k ahead counts 2**k times."""
    monkeypatch.setattr(engine, "UNROLL_UP_TO", unroll)

    def program(x):
        def produce(_, slots):
            return Contributions([x[None] for _ in slots])

        ranks = everyone((5,))
        return engine.reduce(algorithms.ring(5), ranks, produce, lambda a, b: 2 * a + b)[0]

    results = per_rank(make_mesh(5), program, np.arange(5, dtype=np.float32))
    expected = [[sum(2**k * ((rank + k) % 5) for k in range(5))] for rank in range(5)]
    np.testing.assert_array_equal(results, expected)


def test_ranks_in_groups_are_numbered_by_their_place():
    groups = ((5, 0, 3, 6), (1, 7, 2, 4))
    x = np.arange(8) ** 2

    def program(x):
        ranks = Ranks.over(("x",), groups)
        ring = algorithms.ring(4)

        def produce(_, slots):
            return Contributions([x * (1 + origin) for origin, _ in slots])

        mine = engine.reduce(ring, ranks, produce, lax.add)
        return diary(ring, ranks, [x[None].astype(jnp.int32)], Order()), mine[0], ranks.number()

    (_, _, values), mine, number = per_rank(make_mesh(8), program, x)
    for group in groups:
        for place, rank in enumerate(group):
            assert number[rank] == place
            assert mine[rank] == x[list(group)].sum() * (1 + place)
            np.testing.assert_array_equal(values[rank, 0, :, 0], x[list(group)])


@pytest.mark.parametrize("n", [25, 26, 64, 512])
def test_stretches(n):
    def looped(algorithm, *shape):
        schedule = algorithms.build("all_gather", algorithm, shape)
        runs = stretches(schedule, engine.UNROLL_UP_TO)
        assert [i for start, stop in runs for i in range(start, stop)] == [
            *range(len(schedule.rounds))
        ]
        return [run for run in runs if run[1] - run[0] > 1]

    as_loop = [(0, n - 1)] if n - 1 > engine.UNROLL_UP_TO else []
    assert looped("ring", n) == looped("bidirectional_ring", n) == as_loop
    assert looped("bruck", n) == looped("direct", n) == []
    if n >= 64:  # in the last round of an even n, one end has nothing to send
        assert looped("two_ended", n) == [(0, n // 2 - 1)]
    if as_loop:
        assert looped("ring", n, 2) == as_loop
        assert looped("ring", 2, n) == [(1, n)]
    if n == 26:  # every lane turns into its next axis at the same time
        assert looped("torus", n, n) == [(0, n - 1), (n - 1, 2 * n - 2)]


def test_turns_are_possible_where_every_lane_forwards_its_one_shard():
    def possible(n):
        every = runnable("all_gather", n)
        built = {a: algorithms.build("all_gather", a, (n,)) for a in every}
        return {a for a, schedule in built.items() if turns.are_possible(schedule)}

    rings = {"ring", "bidirectional_ring", "torus", "hamiltonian"}  # the last three are one here
    assert possible(8) == possible(5) == rings
    assert possible(1) == possible(2) == set()
    assert not turns.are_possible(RESENT)
    assert not turns.are_possible(algorithms.build("all_gather", "ring", (4, 2)))
