"""The algorithm set around calls: `with ringcoll.algorithm("ring"):`."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from sent import permutes
from support import every_rank, make_mesh

import ringcoll
from ringcoll import algorithms, lax
from ringcoll.choose.table import Table, TableRow, runs
from ringcoll.schedules.schedule import Schedule, ScheduleError

N = 3
TABLE = Table((TableRow("psum", "cpu", "ring"),))


def psum(x, **options):
    return lax.psum(x, "x", **options)


def gradient(call, x):
    y, pull_back = jax.vjp(call, x)
    return pull_back(y)[0]


def test_it_holds_for_what_says_auto_within():
    assert permutes(psum) == 0
    with ringcoll.algorithm("ring"):
        assert permutes(psum) == 2 * (N - 1)
        assert permutes(partial(psum, algorithm="lax")) == 0
        assert permutes(partial(psum, algorithm="direct")) == 2 * (N - 1)
        with ringcoll.algorithm("recursive_doubling"):
            assert permutes(psum) == 2  # the nearest holds
        with ringcoll.algorithm("auto"):
            assert permutes(psum) == 0
        assert permutes(psum) == 2 * (N - 1)
    assert permutes(psum) == 0


def test_jit_keeps_a_program_for_each():
    traced = []

    @jax.jit
    def program(x):
        traced.append(x)
        return every_rank(make_mesh(N), psum, check_vma=False)(x)

    for _ in range(2):
        program(jnp.ones((N, 2)))
        with ringcoll.algorithm("ring"):
            program(jnp.ones((N, 2)))
    assert len(traced) == 2


@pytest.mark.parametrize(
    ("name", "call", "messages"),
    [
        ("ring", lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True), 0),
        ("pairwise", lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True), N - 1),
        ("pairwise", psum, 0),
        ("one_shot", lambda x: lax.all_gather(x, "x"), 0),
        ("halving_doubling", psum, 0),  # there is none on three ranks
        ("one_shot", psum, 2),
        ("ring", lambda x: lax.psum(x, "x", axis_index_groups=[[0], [1, 2]]), 0),
        ("ring", lambda x: lax.pmean(x, "x", axis_index_groups=[[0, 1, 2]]), 2 * (N - 1)),
        ("ring", lambda x: lax.ppermute(x, "x", [(0, 1)]), 1),
        ("ring", lambda x: x * lax.psum(1, "x"), 0),
        ("two_ended", lambda x: ringcoll.all_gather_matmul(x, x.T, "x"), N - 1),
        ("ring", lambda x: ringcoll.matmul_reduce_scatter(x, x.T, "x"), N - 1),
        ("one_shot", lambda x: ringcoll.all_gather_matmul(x, x.T, "x"), 0),
        (TABLE, psum, 2 * (N - 1)),
        (TABLE, lambda x: lax.all_gather(x, "x"), 0),
        (TABLE, lambda x: lax.psum(x, "x", axis_index_groups=[[0], [1, 2]]), 0),
        (TABLE, lambda x: ringcoll.all_gather_matmul(x, x.T, "x"), 0),
        (TABLE, partial(gradient, psum), 4 * (N - 1)),
    ],
)
def test_what_cannot_go_by_it_goes_by_auto(name, call, messages):
    with ringcoll.algorithm(name):
        assert permutes(call) == messages


def test_an_algorithm_that_is_wrong_is_not_replaced_in_silence(monkeypatch):
    monkeypatch.setitem(algorithms.GATHERS, "idle", lambda n: Schedule((n,), ()))
    with pytest.raises(ScheduleError, match="offset 1 never arrives"):
        runs("psum", "idle", (N,))
    assert not runs("psum", "halving_doubling", (N,))


@pytest.mark.parametrize(
    "call",
    [
        psum,
        lambda x: lax.all_gather(x, "x", tiled=True),
        lambda x: ringcoll.all_gather_matmul(x, x.T, "x"),
    ],
)
def test_a_gradient_goes_by_the_algorithm_of_its_function_wherever_it_is_taken(call):
    def forward_then_backward(x):
        with ringcoll.algorithm("ring"):
            y, pull_back = jax.vjp(call, x)
        return pull_back(y)[0]

    with ringcoll.algorithm("ring"):
        expected = permutes(partial(gradient, call))
    assert expected > permutes(call) == 0
    assert permutes(forward_then_backward) == expected


def test_what_is_no_name_is_refused():
    with pytest.raises(TypeError, match="neither a name nor a Table; pass a Schedule or a func"):
        ringcoll.algorithm(algorithms.ring)
