"""Rounding: the same bits on every rank, and errors within what the schedule promises."""

from functools import reduce
from math import prod

import jax.numpy as jnp
import numpy as np
import pytest
from support import bits, make_mesh, mostly_exhaustive, per_rank, runnable

import ringcoll
from ringcoll.costs import error_bound


def every(collective, shape, **keywords):
    """The collective of one rank's operand by every algorithm, as a dict."""
    call = getattr(ringcoll, collective)

    def run(x):
        algorithms = set(runnable(collective, *shape))
        if len(shape) == 1:
            algorithms -= {"torus", "hamiltonian"}  # they are the bidirectional ring
        axes = tuple("xyz"[: len(shape)])
        return {a: call(x, axes, algorithm=a, **keywords) for a in sorted(algorithms)}

    return run


def assert_same_on_all_ranks(result):
    """NaNs count by their bits, and so do the signs of zeros."""
    np.testing.assert_array_equal(bits(result), np.stack([bits(result)[0]] * len(result)))


def errors(collective, result, x):
    """The error of every element relative to the sum of the absolute values."""
    x, result = np.asarray(x, np.float64), np.asarray(result, np.float64)
    exact, size = x.sum(0), abs(x).sum(0)
    if collective == "pmean":
        exact, size = exact / len(x), size / len(x)
    if collective != "psum_scatter":  # every rank has all of it
        exact, size = exact[None], size[None]
    return (abs(result - exact) / size).max()


@pytest.mark.parametrize(
    ("collective", "shape"),
    mostly_exhaustive(
        [
            *(("psum_scatter", shape) for shape in ((8,), (4, 2))),
            *(("psum", shape) for shape in ((2,), (3,), (4,), (5,), (7,), (8,), (2, 2), (3, 2))),
            ("pmean", (3,)),
        ],
        lambda _, shape: shape == (5,),
    ),
)
def test_errors_are_within_the_bound(collective, shape):
    n = prod(shape)
    sizes = (n, 60) if collective == "psum_scatter" else (601,)  # the last chunk is padded
    rng = np.random.default_rng(0)
    x = abs(rng.normal(size=(n, *sizes))).astype(np.float32)  # of one sign, where sums err most
    half = x.astype(jnp.bfloat16)

    def program(x, half):
        wide = every(collective, shape, accumulate_dtype=jnp.float32)
        return every(collective, shape)(x), every(collective, shape)(half), wide(half)

    found = per_rank(make_mesh(*shape), program, x, half)
    single, narrow = (float(jnp.finfo(d).eps) for d in (jnp.float32, jnp.bfloat16))
    kinds = [(x, single, None), (half, narrow, None), (half, narrow, single)]
    seen = []
    for results, (operand, eps, wide) in zip(found, kinds, strict=True):
        seen.append({a: errors(collective, y, operand) for a, y in results.items()})
        for algorithm, error in seen[-1].items():
            bound = error_bound(collective, algorithm, shape, eps, wide)
            assert bound / 50 < error <= bound, (algorithm, eps, wide)  # else it says little
            if collective != "psum_scatter":
                assert_same_on_all_ranks(results[algorithm])
    if n > 2:
        assert all(error < seen[1][algorithm] for algorithm, error in seen[2].items())


def test_all_ranks_have_the_same_maximum_of_any_bits():
    """NaNs with any payload, infinities, zeros of both signs."""
    rng = np.random.default_rng(1)
    random = [rng.integers(2**b - 1, size=(3, 37), dtype=f"uint{b}") for b in (16, 32)]
    operands = [x.view(dtype) for x, dtype in zip(random, (jnp.bfloat16, "float32"), strict=True)]
    for x in operands:
        x[:, :8] = np.where(rng.random((3, 8)) < 0.5, 0.0, -0.0)
    found = per_rank(make_mesh(3), lambda *x: [every("pmax", (3,))(one) for one in x], *operands)
    for x, results in zip(operands, found, strict=True):
        for y in results.values():
            assert_same_on_all_ranks(y)
            np.testing.assert_array_equal(y[0].astype("float32"), x.astype("float32").max(0))


def test_one_shot_adds_in_the_order_of_the_ranks():
    x = np.random.default_rng(0).normal(size=(5, 37)).astype("float32")
    results = per_rank(make_mesh(5), lambda x: ringcoll.psum(x, "x", algorithm="one_shot"), x)
    in_order = reduce(np.add, x)
    assert (bits(in_order) != bits(reduce(np.add, x[::-1]))).any()
    np.testing.assert_array_equal(bits(results), np.stack([bits(in_order)] * 5))
