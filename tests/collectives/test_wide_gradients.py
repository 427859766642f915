"""Gradients of what a caller's function closes over are as exact as those of one matmul."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import assert_rounded_once, make_mesh

from ringcoll import all_gather_map, gather, map_reduce_scatter, per_shard, tour

BF16, F32 = jnp.bfloat16, jnp.float32


def placed(x, multiply, algorithm):
    return all_gather_map(multiply, x, "x", algorithm=algorithm)


def each(x, multiply, algorithm):
    visit = per_shard(lambda c, a: (c, multiply(a.value)))
    return gather(x, "x", jax.checkpoint(visit), None, algorithm=algorithm)[1]


def reduced(x, multiply, algorithm):
    options = {"algorithm": algorithm, "accumulate_dtype": F32}
    return map_reduce_scatter(multiply, x, "x", **options)


def toured(x, multiply, algorithm):
    options = {"algorithm": algorithm, "accumulate_dtype": F32}
    return tour(x, "x", lambda c, a: (c, multiply(a.value)), None, **options)[1]


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
]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("recipe", "how", "n", "algorithm", "dtype"), CASES)
def test_a_gradient_is_rounded_once(recipe, how, n, algorithm, dtype, check_vma):
    """w, of `dtype`, is cast in the visit."""
    rng, rows = np.random.default_rng(0), n * 16 if recipe is reduced else 16
    x, w, g = (
        np.asarray(jnp.asarray(rng.normal(size=shape), BF16), np.float32)
        for shape in ((n * rows, 32), (32, 32), (n * n * rows, 32))
    )

    def gradient(narrow, algorithm, w, x, g):
        def loss(w):
            y = recipe(x, lambda x: MULTIPLY[how](x, w.astype(narrow)), algorithm)
            return (y.astype(F32) * g[: len(y)]).sum()

        return jax.grad(loss)(lax.pcast(w, "x", to="varying") if check_vma else w)[None]

    def run(dtype, narrow, algorithm):
        specs, out = (P(), P("x"), P("x")), P("x")
        f = partial(gradient, narrow, algorithm)
        f = jax.shard_map(f, mesh=make_mesh(n), in_specs=specs, out_specs=out, check_vma=check_vma)
        return jax.jit(f)(jnp.asarray(w, dtype), jnp.asarray(x, narrow), g)

    found = run(dtype, BF16, algorithm)
    assert found.dtype == dtype
    assert_rounded_once(found.astype(BF16), run(F32, F32, "lax"))


@pytest.mark.parametrize("algorithm", ["lax", "auto", "ring", "bidirectional_ring", "bruck"])
@pytest.mark.parametrize("recipe", [reduced, toured])
def test_sums_that_travel_are_rounded_once(recipe, algorithm):
    """Odd ranks add x, or what arrives, twice; integers keep their dtype."""
    x = np.asarray(np.random.default_rng(0).normal(size=(64, 5)), BF16)

    def total(x):
        both = {"a": x, "b": jnp.arange(len(x), dtype=jnp.int8)}
        one = 2.0 ** (lax.axis_index("x") % 2)
        return recipe(both, lambda x: {"a": one.astype(BF16) * x["a"], "b": x["b"]}, algorithm)

    specs = (P(), P("x")) if recipe is reduced else (P("x"), P("x"))
    found = jax.jit(jax.shard_map(total, mesh=make_mesh(8), in_specs=specs[0], out_specs=specs[1]))(
        x
    )
    every = [2.0 ** (rank % 2) * x.astype(np.float32) for rank in range(8)]
    np.testing.assert_array_equal(found["a"], sum(every).astype(BF16))
    assert found["b"].dtype == jnp.int8
