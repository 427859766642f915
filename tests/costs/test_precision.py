"""Rounding: the same bits on every rank, and errors within what the schedule promises.

Bits are compared as integers, so that NaNs and the signs of zeros count.
"""

from functools import reduce
from math import prod

import jax.numpy as jnp
import numpy as np
import pytest
from support import make_mesh, mostly_exhaustive, per_rank, runnable

import ringcoll
from ringcoll.costs import error_bound

WIDTH = 37  # no multiple of a number of ranks: the last chunk is padded


def names(shape):
    return tuple("xyz"[: len(shape)])


def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


def normal(shape, dtype, n=None, seed=0):
    """Numbers of N(0, 1), rounded: `[rank, ...]`."""
    return np.random.default_rng(seed).normal(size=(n or prod(shape), WIDTH)).astype(dtype)


def strange(shape, dtype):
    """Random bits: NaNs with any payload, infinities, zeros of both signs."""
    rng = np.random.default_rng(1)
    kind = f"uint{8 * jnp.dtype(dtype).itemsize}"
    x = rng.integers(np.iinfo(kind).max, size=(prod(shape), WIDTH), dtype=kind).view(dtype)
    x[:, :8] = np.where(rng.random((prod(shape), 8)) < 0.5, 0.0, -0.0)
    return x


def every(collective, shape, **keywords):
    """The collective of one rank's operand by every algorithm, as a dict."""
    call = getattr(ringcoll, collective)

    def run(x):
        algorithms = set(runnable(collective, *shape))
        if len(shape) == 1:
            algorithms -= {"torus", "hamiltonian"}  # they are the bidirectional ring
        return {a: call(x, names(shape), algorithm=a, **keywords) for a in sorted(algorithms)}

    return run


SHAPES = [(2,), (3,), (4,), (5,), (6,), (7,), (8,), (3, 2)]


@pytest.mark.parametrize(
    "shape",
    [pytest.param(s, marks=() if s == (3,) else pytest.mark.exhaustive) for s in SHAPES],
    ids=str,
)
def test_all_ranks_hold_the_same_bits(shape):
    def program(floats, bits):
        sums = []
        for x, y in zip(floats, bits, strict=True):
            sums += [every("psum", shape)(x), every("pmax", shape)(y)]
        return sums

    dtypes = (np.float32, jnp.bfloat16)
    operands = [[make(shape, dtype) for dtype in dtypes] for make in (normal, strange)]
    results = per_rank(make_mesh(*shape), program, *operands)
    for result in results:
        for algorithm, x in result.items():
            np.testing.assert_array_equal(bits(x), np.stack([bits(x)[0]] * len(x)), algorithm)
    for result, y in zip(results[1::2], operands[1], strict=True):
        for algorithm, x in result.items():
            expected = np.max(np.asarray(y, np.float32), 0)
            np.testing.assert_array_equal(np.asarray(x[0], np.float32), expected, algorithm)


@pytest.mark.parametrize(
    "dtype",
    mostly_exhaustive(["float32", "bfloat16", "float16", "float8_e5m2"], "bfloat16".__eq__),
)
def test_gathers_and_broadcasts_keep_bits(dtype):
    x = strange((4,), dtype)

    def program(x):
        gathered = every("all_gather", (4,))(x)
        return gathered, every("pbroadcast", (4,), source=2)(x)

    gathered, broadcast = per_rank(make_mesh(4), program, x)
    for algorithm, y in broadcast.items():
        np.testing.assert_array_equal(bits(y), np.stack([bits(x)[2]] * 4), algorithm)
    for algorithm, y in gathered.items():
        np.testing.assert_array_equal(bits(y), np.stack([bits(y)[0]] * 4), algorithm)
        # XLA:CPU may make a quiet NaN of a signalling one when it copies 16-bit floats.
        if dtype in ("bfloat16", "float16"):
            with np.errstate(invalid="ignore"):
                nan = np.isnan(x) & np.isnan(np.asarray(y)[0])
            assert (nan | (bits(y)[0] == bits(x))).all()
        else:
            np.testing.assert_array_equal(bits(y)[0], bits(x))


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
            ("psum_scatter", (8,)),
            ("psum_scatter", (4, 2)),
            ("psum", (5,)),
            ("psum", (2, 2)),
            ("pmean", (3,)),
        ],
        lambda _, shape: shape == (5,),
    ),
)
def test_errors_are_within_the_bound(collective, shape):
    n = prod(shape)
    sizes = (n, 60) if collective == "psum_scatter" else (600,)
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
    for algorithm, error in seen[2].items():
        assert error < seen[1][algorithm]


def test_one_shot_adds_in_the_order_of_the_ranks():
    x = normal((5,), np.float32)
    results = per_rank(make_mesh(5), lambda x: ringcoll.psum(x, "x", algorithm="one_shot"), x)
    in_order = reduce(np.add, x)
    assert (bits(in_order) != bits(reduce(np.add, x[::-1]))).any()
    np.testing.assert_array_equal(bits(results), np.stack([bits(in_order)] * 5))
