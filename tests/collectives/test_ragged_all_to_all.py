"""`ragged_all_to_all`: every rank's rows against NumPy, gradients, `vmap`, refusals.

jax.lax cannot run its own on CPU; it is asked for types and errors alone.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import SIZES, assert_same, data, make_mesh, mostly_exhaustive, per_rank, runnable

import ringcoll
from benchmarks.collectives.references import ragged_all_to_all as reference

ROW = (2, 3)


def packed(sizes, order):
    """Where slices of these sizes start if they lie in this order, with gaps between them."""
    starts = np.zeros_like(sizes)
    starts[order] = np.cumsum(sizes[order] + 1) - sizes[order]
    return starts


def integers(n, slices=1, seed=0):
    """Offsets and sizes of all ranks, which are no two alike: gaps, empty slices, any order."""
    rng = np.random.default_rng([seed, n, slices])
    sends = rng.integers(0, 4, (n, n, slices))
    gets = sends.swapaxes(0, 1).reshape(n, -1)
    at = np.stack([packed(one.reshape(-1), rng.permutation(n * slices)) for one in sends])
    to = np.stack([packed(one, rng.permutation(n * slices)) for one in gets])
    to = to.reshape(n, n, slices).swapaxes(0, 1).reshape(n, -1)
    return [x.astype(np.int32) for x in (at, sends.reshape(n, -1), to, gets)]


def arrays(n, numbers, dtype="float32", row=ROW):
    """Operands and outputs that hold all slices, and a row more."""
    at, sends, to, _ = numbers
    rows, ends = int((at + sends).max()) + 1, int((to + sends).max()) + 1
    whole = data((n, rows + ends, *row), jnp.dtype(dtype), n)
    return [whole[:, :rows], whole[:, rows:]]


def call(*xs, **how):
    return ringcoll.ragged_all_to_all(*xs, axis_name="x", **how)


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("n", mostly_exhaustive(SIZES, (1, 3, 5).__contains__))
def test_rows_arrive_and_the_others_stay(n, slices):
    numbers = integers(n, slices)
    xs = *arrays(n, numbers), *numbers

    def program(*xs):
        algorithms = "auto", "lax", *runnable("all_to_all", n)
        return {algorithm: call(*xs, algorithm=algorithm) for algorithm in algorithms}

    for algorithm, y in per_rank(make_mesh(n), program, *xs).items():
        assert_same({algorithm: np.asarray(y)}, {algorithm: reference(*xs)})


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_in_every_mode(jit, check_vma):
    numbers = integers(3)
    xs = *arrays(3, numbers), *numbers
    y = per_rank(make_mesh(3), partial(call, algorithm="bruck"), *xs, jit=jit, check_vma=check_vma)
    assert_same(np.asarray(y), reference(*xs))


GROUPS = ((4, 1, 2), (0, 5, 3))


def in_groups():
    """The operands of six ranks in two groups, whose ranks are in no order, and their results."""
    places = np.argsort(np.ravel(GROUPS))
    both = zip(integers(3), integers(3, seed=1), strict=True)
    numbers = [np.concatenate(two)[places] for two in both]
    xs = *arrays(6, numbers), *numbers
    expected = np.empty_like(xs[1])
    for group in map(list, GROUPS):
        expected[group] = reference(*(x[group] for x in xs))
    return xs, expected


@pytest.mark.parametrize("algorithm", ["auto", "pairwise"])
def test_in_groups(algorithm):
    """A rank counts the ranks of its group."""
    xs, expected = in_groups()
    program = partial(call, axis_index_groups=GROUPS, algorithm=algorithm)
    y = per_rank(make_mesh(6), program, *xs, check_vma=False)
    assert_same(np.asarray(y), expected)


def test_over_two_axes():
    numbers = integers(6)
    xs = *arrays(6, numbers), *numbers

    def program(*xs):
        return ringcoll.ragged_all_to_all(*xs, axis_name=("x", "y"), algorithm="pairwise")

    assert_same(np.asarray(per_rank(make_mesh(3, 2), program, *xs)), reference(*xs))


def test_a_rank_may_have_nothing_at_all():
    n, nothing = 2, [np.zeros((2, 2), np.int32)] * 4
    full, empty = data((n, 3, 2)), np.zeros((n, 0, 2), np.float32)
    for operand, output in ((full, full + 1), (empty, full), (full, empty)):
        y = per_rank(make_mesh(n), call, operand, output, *nothing)
        assert_same(np.asarray(y), output)


# -- max_send --


@pytest.mark.parametrize("slices", [1, 3])
def test_messages_are_as_small_as_max_send_says(slices):
    numbers = integers(3, slices)
    xs, most = (*arrays(3, numbers), *numbers), int(numbers[1].reshape(3, 3, slices).sum(2).max())
    program = partial(call, algorithm="pairwise", max_send=most)
    assert_same(np.asarray(per_rank(make_mesh(3), program, *xs)), reference(*xs))
    text = jax.jit(lambda *xs: per_rank(make_mesh(3), program, *xs)).lower(*xs).as_text()
    assert text.count(f"-> tensor<1x{most}x2x3xf32>") >= 2, text


REFUSED = jax.errors.JaxRuntimeError


@pytest.mark.parametrize("slices", [1, 3])
def test_more_rows_than_max_send_are_refused_by_all_ranks(slices):
    """Also along the other axis of the mesh, whose ranks have fewer: they would wait for ever."""
    numbers = [np.tile(x, (2, 1)) for x in integers(3, slices)]
    numbers[1][:3] = numbers[3][:3] = 0
    most = int(numbers[1].reshape(6, 3, slices).sum(2).max())
    xs = *arrays(6, numbers), *numbers

    def run(max_send):
        def program(*xs):
            y = ringcoll.ragged_all_to_all(*xs, axis_name="y", max_send=max_send)
            return y, lax.psum(y, ("x", "y"))

        return jax.block_until_ready(per_rank(make_mesh(2, 3), program, *xs))[0]

    with pytest.raises(REFUSED, match=f"has {most} rows for another.*{most - 1}"):
        run(most - 1)
    expected = [reference(*(x[half] for x in xs)) for half in (slice(3), slice(3, 6))]
    assert_same(np.asarray(run(most)), np.concatenate(expected))
    jax.effects_barrier()  # JAX waits for callbacks, and no longer for those that raised


def test_rows_that_are_sent_twice_to_a_rank_may_be_more_than_there_are():
    """Two slices of the same rows: by default a block has no room for both."""
    operand, output = data((1, 3, 2)), np.zeros((1, 6, 2), np.float32)
    numbers = [np.array([x], np.int32) for x in ([0, 0], [3, 3], [0, 3], [3, 3])]
    with pytest.raises(REFUSED, match="a rank has 6 rows for another"):
        jax.block_until_ready(per_rank(make_mesh(1), call, operand, output, *numbers))
    y = per_rank(make_mesh(1), partial(call, max_send=6), operand, output, *numbers)
    assert_same(np.asarray(y), np.concatenate([operand, operand], 1))
    jax.effects_barrier()
