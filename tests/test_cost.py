"""Prices, seconds and bounds: against links walked hop by hop, and against real sums.

(The price of each algorithm by itself is in test_algorithms.)
"""

from collections import Counter
from fractions import Fraction as F
from itertools import product as pairs
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_algorithms import ANY, TWOS, lg
from test_schedule import digits, exists, neighbour

from ringcoll.algorithms import ALL_TO_ALLS, GATHERS, REDUCES, build, ring
from ringcoll.cost import DEVICES, Model, Sample, error_bound, fit, price, roundings, wire_bytes
from ringcoll.cost import seconds as modelled
from ringcoll.schedule import Move, Schedule, ScheduleError


def test_stages_on_a_physical_ring():
    # Partners 4, 2 and 1 away; from 4 away, half goes either way: 2, 2 and 1 vectors a link.
    paid = price("psum", "exchange", (8,), network=(8,))
    assert (paid.sent, paid.link) == (3 * 8, 5 * 8)
    # On their own axes of a torus, partners are nearer: 1 and 1, and 1/2 on an axis of 2.
    assert price("psum", "exchange", (4, 2), network=(4, 2)).link == F(5, 2) * 8
    with pytest.raises(ScheduleError, match=r"network \(4,\) is not of 8 ranks"):
        price("psum", "exchange", (8,), network=(4,))


def test_stages_of_several_lanes_are_priced():
    stages = (ring(2), GATHERS["bidirectional_ring"](3))
    paid = price("psum", stages, (6,))
    assert (paid.rounds, paid.messages, paid.sent, paid.additions) == (3, 5, 18, 18)
    assert paid.raw == 6  # the first stage; the second sends sums


@pytest.mark.parametrize("collective", ["pmean", "pmax", "pmin", "pbroadcast"])
def test_every_all_reduce_is_priced_like_psum(collective):
    for algorithm in [*GATHERS, *REDUCES]:
        assert price(collective, algorithm, (4, 2)) == price("psum", algorithm, (4, 2))


def my_star(n):
    """Not in the library: direct, but in as many rounds as messages."""
    return Schedule((n,), tuple((Move(s, (0,)),) for s in range(1, n)))


def test_what_is_not_in_the_library_is_priced_too():
    assert price("psum", my_star, (5,)).rounds == 8
    assert price("psum_scatter", my_star, (5,)) == price("psum_scatter", my_star(5), [5])
    with pytest.raises(ValueError, match="no algorithm 'rign'; choose from ring"):
        price("psum", "rign", (5,))


def test_one_rank_pays_nothing():
    for collective, kinds in [("psum", {**GATHERS, **REDUCES}), ("all_to_all", ALL_TO_ALLS)]:
        for name in kinds:
            paid = price(collective, name, (1, 1))
            assert (paid.rounds, paid.sent, paid.link, paid.additions) == (0, 0, 0, 0)
            assert modelled(paid, 1e9, DEVICES["v5e"], 2) == 0


# -- links, hop by hop --


def loads(schedule, moves, network):
    """What every link of a torus carries, each message walked along one axis at a time."""
    load = Counter()
    for move, rank in pairs(moves, range(schedule.size)):
        share = F(len(move.offsets), schedule.lanes)
        at = digits(network, rank)
        there = digits(network, neighbour(schedule.shape, rank, move))
        for axis, length in enumerate(network):
            ahead = (there[axis] - at[axis]) % length
            back = (at[axis] - there[axis]) % length
            for way, hops, other in [(1, ahead, back), (-1, back, ahead)]:
                if hops <= other:  # both ways are as short: half goes either way
                    for hop in range(hops):
                        link = [*at, axis, way]
                        link[axis] = (at[axis] + way * hop) % length
                        load[tuple(link)] += share / (2 if hops == other else 1)
            at[axis] = there[axis]
    return load


NETWORKS = [(2,), (5,), (8,), (4, 2), (2, 4), (2, 2, 2), (9,), (3, 3), (6, 2), (3, 4), (1, 6)]


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(NETWORKS))
def test_link_is_the_load_of_the_busiest_link(data, network):
    shape = data.draw(st.sampled_from([s for s in NETWORKS if prod(s) == prod(network)]))
    names = [name for name in GATHERS if exists(name, shape)]
    schedule = GATHERS[data.draw(st.sampled_from(names))](*shape)
    busiest = [max(loads(schedule, moves, network).values()) for moves in schedule.rounds]
    assert price("all_gather", schedule, shape, network).link == sum(busiest)


# -- bytes and seconds --


@pytest.mark.parametrize("n", [2, 3, 8])
def test_wire_bytes_of_a_narrow_operand_with_wide_sums(n):
    def elements(collective, algorithm, narrow, wide):
        sent = wire_bytes(collective, algorithm, (n,), 10, 2, 4)
        assert sent == 10 * (2 * narrow + 4 * wide)
        assert wire_bytes(collective, algorithm, (n,), 10, 2) == 10 * 2 * (narrow + wide)

    elements("psum_scatter", "ring", 1, n - 2)
    elements("psum_scatter", "direct", n - 1, 0)
    elements("psum", "ring", 1 + (n - 1), n - 2)
    elements("psum", "direct", 2 * (n - 1), 0)
    elements("all_gather", "ring", n - 1, 0)
    elements("all_to_all", "pairwise", n - 1, 0)


def test_a_message_with_a_partial_sum_in_it_is_wide():
    # 4, 5 and 6 go raw to 0, 1 and 2; then 2, a sum, and 3, raw, in one message; then 1.
    assert price("psum_scatter", "bruck", (7,)).raw == 3


def test_only_the_first_stage_is_narrow():
    assert wire_bytes("psum", "exchange", (8,), 10, 2, 4) == 80 * (2 + 4 + 4)
    assert wire_bytes("psum", (ring(1), ring(2)), (2,), 10, 2, 4) == 20 * 4
    assert wire_bytes("psum", "torus", (2, 3, 4), 6, 4) == 6 * 4 * 2 * 23  # sixths are exact


def test_seconds_are_the_sum_of_rounds_bytes_and_additions():
    paid = price("psum", "ring", (4,))  # 6 rounds, 6 shards sent, 3 added, 4 of them raw
    assert modelled(paid, 100, Model(1, 0, 0)) == 6
    assert modelled(paid, 100, Model(0, 1, 0)) == 600
    assert modelled(paid, 100, Model(0, 0, 1)) == 300
    assert modelled(paid, 100, Model(1, 10, 100), 2) == pytest.approx(6 + 10 * 800 + 100 * 600)


def test_device_models_are_the_stated_constants():
    assert set(DEVICES) == {"v5e", "v5p", "v6e", "tpu7x"}
    paid = price("psum_scatter", "bidirectional_ring", (8,), network=(8,))
    time = modelled(paid, 1e9, DEVICES["v5e"])
    assert time == pytest.approx(7 * 1e-6 + 3.5 * 1e9 / 45e9 + 7 * 3 * 1e9 / 810e9)
    assert [round(1e-9 / m.beta) for m in DEVICES.values()] == [45, 90, 90, 90]
    assert [round(3e-9 / m.gamma) for m in DEVICES.values()] == [810, 2760, 1640, 3690]


# -- fit --


def samples(model, noise=0.0, collective="psum", algorithms=("ring", "exchange", "direct")):
    random = np.random.default_rng(0)
    for algorithm in algorithms:
        for p in (2, 4, 8):
            for shard in (16, 4096, 2**20, 2**26):
                paid = price(collective, algorithm, (p,))
                time = modelled(paid, shard, model) * (1 + noise * random.uniform(-1, 1))
                sent, added = float(paid.link) * shard, float(paid.additions) * shard
                yield Sample(paid.rounds, sent, added, time)


@pytest.mark.parametrize(
    "model", [Model(3e-5, 2e-10, 7e-11), Model(1e-6, 1e-9, 0), Model(0, 1e-11, 1e-9)]
)
def test_fit_finds_the_model_again(model):
    found, residual = fit(samples(model))
    assert found.alpha == pytest.approx(model.alpha, rel=1e-6, abs=1e-15)
    assert found.beta == pytest.approx(model.beta, rel=1e-6, abs=1e-19)
    assert found.gamma == pytest.approx(model.gamma, rel=1e-6, abs=1e-19)
    assert residual < 1e-9


def test_fit_through_noise():
    model = Model(3e-5, 2e-10, 1e-10)
    found, residual = fit(samples(model, noise=0.1))
    assert found.alpha == pytest.approx(model.alpha, rel=0.1)  # from the small payloads
    assert found.beta == pytest.approx(model.beta, rel=0.3)
    assert 0.01 < residual < 0.1


def test_fit_gives_nothing_to_what_was_never_paid_or_cannot_be_told_apart():
    model = Model(3e-5, 2e-10, 1e-10)  # (a reduce-scatter adds what it sends)
    for collective, beta in [("all_gather", 2e-10), ("psum_scatter", 3e-10)]:
        found, _ = fit(samples(model, collective=collective, algorithms=["ring"]))
        assert found == Model(pytest.approx(3e-5), pytest.approx(beta), 0)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_fit_is_the_least_squares_with_no_negative_coefficient(seed, count):
    random = np.random.default_rng(seed)
    rows = random.uniform(0, 1, (count, 4))
    rows[:, 3] += 0.1
    rows[:, :3] *= random.uniform(0, 1, 3) < 0.9  # now and then a column of zeros
    model, residual = fit(Sample(*row) for row in rows)
    found = np.array([model.alpha, model.beta, model.gamma])
    relative = rows[:, :3] / rows[:, 3:]
    gradient = relative.T @ (relative @ found - 1)  # Karush, Kuhn and Tucker
    assert (found >= 0).all()
    assert (gradient > -1e-4 * count).all()
    assert (abs(gradient[found > 0]) < 1e-4 * count).all()
    assert residual == pytest.approx(np.median(abs(relative @ found - 1)), abs=1e-9)


@pytest.mark.parametrize("bad", [[], [Sample(1, 2, 3, 0.0)], [Sample(1, 2, 3, float("nan"))]])
def test_fit_refuses_what_took_no_time(bad):
    with pytest.raises(ValueError, match="fit needs samples of more than 0 seconds, got "):
        fit(bad)


# -- rounding --

# The additions on the longest way into a sum.
CHAINS = [
    ("ring", ANY, lambda p: p - 1),
    ("bidirectional_ring", ANY, lambda p: p - 1),
    ("two_ended", range(3, 65), lambda p: p // 2 + 1),
    ("direct", ANY, lambda p: p - 1),
    ("recursive_doubling", TWOS, lg),
    ("bruck", ANY, lg),
    ("exchange", TWOS, lg),
    ("exchange", [6, 12, 7], lambda p: {6: 1 + 2, 12: 2 + 2, 7: 6}[p]),
    ("one_shot", ANY, lambda p: p - 1),
]


@pytest.mark.parametrize(("algorithm", "sizes", "form"), CHAINS)
def test_roundings_are_the_longest_chain(algorithm, sizes, form):
    for p in sizes:
        assert roundings("psum", algorithm, (p,)) == form(p)
        assert roundings("pmean", algorithm, (p,)) == form(p) + 1


def test_nothing_is_rounded_where_nothing_is_summed():
    for collective in ("all_gather", "pmax", "pmin", "pbroadcast"):
        assert error_bound(collective, "ring", (8,), 2**-7) == 0
    assert error_bound("all_to_all", "bruck", (8,), 2**-7) == 0
    assert error_bound("psum", "ring", (1,), 2**-7, 2**-23) == 0
    with pytest.raises(ValueError, match="no collective 'allgather'"):
        error_bound("allgather", "ring", (8,), 2**-7)


def summed(algorithm, n, x, dtype):
    """The sum that rank 0 holds, with x[r] of rank r, rounded to `dtype` at every addition."""
    made = build("psum", algorithm, (n,))
    if isinstance(made, tuple):
        parts = x.astype(dtype).reshape([stage.size for stage in made])
        for stage in made:
            total = parts[0]
            for i in range(1, stage.size):
                total = total + parts[i]
            parts = total
        return [parts]
    sums = np.repeat(x.astype(dtype)[:, None], made.lanes, axis=1)  # at each offset, for rank 0
    for moves in reversed(made.rounds):
        before = sums.copy()
        for move in moves:
            for offset, arrival in zip(move.offsets, made.arrivals(move), strict=True):
                sums[offset, move.lane] += before[arrival, move.lane]
    assert sums.dtype == dtype
    return sums[0]


@pytest.mark.parametrize("algorithm", [*GATHERS, *REDUCES])
def test_sums_err_by_less_than_the_bound(algorithm):
    random = np.random.default_rng(1)
    narrow, wide = np.finfo(np.float16).eps, np.finfo(np.float32).eps
    for n in (2, 8, 64, 2, 8, 64):
        x = random.uniform(-1, 1, n).astype(np.float16)
        exact, size = x.astype(float).sum(), abs(x.astype(float)).sum()
        bound = error_bound("psum", algorithm, (n,), narrow)
        assert type(bound) is float  # not computed in float16, as eps is
        assert all(abs(s - exact) <= bound * size for s in summed(algorithm, n, x, np.float16))
        bound = error_bound("psum", algorithm, (n,), narrow, wide)
        assert bound < 1.01 * narrow / 2
        once = [np.float16(s) for s in summed(algorithm, n, x, np.float32)]
        assert all(abs(s - exact) <= bound * size for s in once)


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_the_bound_of_a_ring_is_reached(n):
    eps = float(np.finfo(np.float32).eps)
    x = np.full(n, eps / 2)  # of each, 1 + eps/2 loses all
    x[n - 1] = 1  # where the chain starts
    (total,) = summed("ring", n, x, np.float32)
    error = (x.sum() - float(total)) / x.sum()
    assert error <= error_bound("psum", "ring", (n,), eps)
    assert n == 2 or error > error_bound("psum", "ring", (n - 1,), eps)


def test_wide_sums_are_rounded_once():
    narrow, wide = 2**-7, 2**-23
    bound = error_bound("psum", "ring", (256,), narrow, wide)
    assert bound == pytest.approx(narrow / 2 + 255 * wide / 2, rel=1e-2)
    assert error_bound("psum", "ring", (100,), narrow) == pytest.approx(99 / 256 / (1 - 99 / 256))
    with pytest.raises(ValueError, match=r"^psum: no bound after 256 roundings of 0\.0039"):
        error_bound("psum", "ring", (257,), narrow)
