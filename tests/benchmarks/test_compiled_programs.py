"""The programs of each command that compiles: all of them compute the same."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import make_mesh, mostly_exhaustive

from benchmarks.compiled import context, experts
from benchmarks.compiled.block_halves import half
from benchmarks.compiled.programs import COMPILER, PLAIN, with_gradient

FLOAT32 = jnp.float32
#: Sums of float32 in a different order differ by about 1e-6 of the largest element.
TOLERANCE = 1e-4


def of_half(name, algorithm):
    function, operands = half(name, "16x32x2048", algorithm, make_mesh(8), FLOAT32)
    return with_gradient(function), operands


def of_context(layout, algorithm):
    return context.program(make_mesh(2), layout, "both", "1x64x4x2x8", algorithm, FLOAT32)


def of_experts(algorithm):
    return experts.program(make_mesh(2), "both", "8x8x6x8x4", algorithm, FLOAT32)


#: A function that makes a program of an algorithm, and the algorithms besides plain.
PROGRAMS = {
    "gated_mlp": (partial(of_half, "gated_mlp"), (COMPILER, "auto", "ring")),
    "attention": (partial(of_half, "attention"), (COMPILER, "auto", "ring")),
    "experts": (of_experts, experts.ALGORITHMS),
    **{f"context, {name}": (partial(of_context, name), context.ALGORITHMS)
       for name in ("zigzag", "contiguous")},
}  # fmt: skip


def values(name, like):
    """The first operand is of order one, and so are its products with the others."""
    rng = np.random.default_rng(0)

    def drawn(of):
        is_weight = of is not jax.tree.leaves(like)[0] and len(of.shape) > 1
        scale = of.shape[-2] ** -0.5 if is_weight else 1
        return (rng.standard_normal(of.shape) * scale).astype(of.dtype)

    found = jax.tree.map(drawn, like)
    if name == "experts":  # even tokens choose even experts, so all experts get as many
        x, router, *weights = found
        numbers = np.arange(len(x))[:, None] + np.arange(x.shape[1])[None]
        x = (0.1 * x + np.where(numbers % 2, -2, 2)).astype(x.dtype)
        found = (x, np.eye(*router.shape, dtype=x.dtype), *weights)
    return jax.tree.map(lambda x, of: jax.device_put(x, of.sharding), found, like)


@pytest.mark.parametrize("name", mostly_exhaustive(PROGRAMS, "gated_mlp".__eq__))
def test_all_programs_compute_the_same_results_and_gradients(name):
    make, algorithms = PROGRAMS[name]
    results = {}
    for algorithm in dict.fromkeys((PLAIN, *algorithms)):
        function, like = make(algorithm)
        results[algorithm] = jax.tree.leaves(jax.jit(function)(*values(name, like)))
    plain = results.pop(PLAIN)
    for algorithm, ours in results.items():
        for expected, actual in zip(plain, ours, strict=True):
            largest = np.abs(expected).max()
            assert np.abs(np.asarray(actual) - expected).max() < TOLERANCE * largest, algorithm
