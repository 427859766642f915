"""Gradients of what a caller's function closes over are as exact as those of one matmul."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ringcoll import exchange, gather, per_shard, reduce, tour
from tests.support import make_mesh

BF16, F32 = jnp.bfloat16, jnp.float32


def placed(x, multiply, algorithm):
    whole = jax.ShapeDtypeStruct((lax.axis_size("x") * len(x), 32), x.dtype)
    visit = lambda y, a: a.place(y, multiply(a.value))  # noqa: E731
    return gather(x, "x", visit, whole, algorithm=algorithm)


def each(x, multiply, algorithm):
    whole = jnp.zeros((lax.axis_size("x") * len(x), 32), x.dtype)
    visit = per_shard(lambda y, a: a.place(y, multiply(a.value)))
    return gather(x, "x", jax.checkpoint(visit), whole, algorithm=algorithm)


def reduced(x, multiply, algorithm):
    return reduce(lambda wanted: multiply(wanted.take(x)), "x", algorithm=algorithm)


def toured(x, multiply, algorithm):
    return tour(x, "x", lambda c, a: (c, multiply(a.value)), None, algorithm=algorithm)[1]


def exchanged(x, multiply, algorithm):
    whole = jax.ShapeDtypeStruct((len(x), 32), x.dtype)
    visit = lambda y, a: a.place(y, multiply(a.value))  # noqa: E731
    return exchange(x, "x", visit, whole, algorithm=algorithm)


MULTIPLY = {
    "plain": lambda x, w: x @ w,
    "jit": jax.jit(lambda x, w: x @ w),
    "checkpoint": jax.checkpoint(lambda x, w: jnp.einsum("ij,kj->ik", x, w.T)),
    "turned": lambda x, w: (w.T.reshape(w.shape[::-1])[:, None] @ x.T[None]).reshape(-1, len(x)).T,
}
CASES = [
    (placed, "plain", 2, "ring", BF16),
    (placed, "jit", 8, "two_ended", F32),
    (placed, "checkpoint", 8, "bidirectional_ring", BF16),
    (placed, "turned", 8, "lax", BF16),
    (each, "plain", 8, "bidirectional_ring", BF16),
    (reduced, "checkpoint", 8, "ring", BF16),
    (reduced, "plain", 5, "bidirectional_ring", F32),
    (toured, "jit", 8, "ring", BF16),
    (exchanged, "plain", 8, "pairwise", BF16),
]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("recipe", "how", "n", "algorithm", "dtype"), CASES)
def test_a_gradient_is_rounded_once(recipe, how, n, algorithm, dtype, check_vma):
    """Up to 1.2 of the error of one rounding; w, of `dtype`, is cast in the visit."""
    rng, rows = np.random.default_rng(0), n * 16 if recipe in (reduced, exchanged) else 16
    x, w, g = (
        np.asarray(jnp.asarray(rng.normal(size=shape), BF16), np.float32)
        for shape in ((n * rows, 32), (32, 32), (n * n * rows, 32))
    )

    def gradient(narrow, algorithm, w, x, g):
        def loss(w):
            y = recipe(x, lambda x: MULTIPLY[how](x, w.astype(narrow)), algorithm)
            return (y.astype(F32) * g[: len(y)]).sum()

        return jax.grad(loss)(lax.pcast(w, "x", to="varying") if check_vma else w)[None]

    def error(dtype, narrow, algorithm):
        specs, out = (P(), P("x"), P("x")), P("x")
        f = partial(gradient, narrow, algorithm)
        f = jax.shard_map(f, mesh=make_mesh(n), in_specs=specs, out_specs=out, check_vma=check_vma)
        return np.asarray(jax.jit(f)(jnp.asarray(w, dtype), jnp.asarray(x, narrow), g), np.float32)

    exact = error(F32, F32, "lax")
    found, rounded = error(dtype, BF16, algorithm), np.asarray(jnp.asarray(exact, BF16), F32)
    assert np.linalg.norm(found - exact) < 1.2 * np.linalg.norm(rounded - exact)
