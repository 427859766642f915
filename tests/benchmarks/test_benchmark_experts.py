"""The programs of `python -m benchmarks experts` compute the same layer if the choice is even."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import make_mesh, mostly_exhaustive

from benchmarks.compiled import experts


def operands(like):
    """Even tokens choose even experts, and odd tokens odd experts, so all experts get as many."""
    rng = np.random.default_rng(0)
    x, router, *weights = (rng.standard_normal(one.shape).astype(one.dtype) for one in like)
    numbers = np.arange(len(x))[:, None] + np.arange(x.shape[1])[None]
    x = 0.1 * x + np.where(numbers % 2, -2, 2)
    return jnp.asarray(x, jnp.float32), jnp.eye(*router.shape), *map(jnp.asarray, weights)


@pytest.mark.parametrize("n", mostly_exhaustive([2, 4], lambda n: n == 2))
def test_all_programs_compute_the_same_results_and_gradients(n):
    found = {}
    for algorithm in experts.ALGORITHMS:
        program = experts.program(make_mesh(n), "both", "8x8x6x8x4", algorithm, jnp.float32)
        function, like = program
        found[algorithm] = jax.jit(function)(*operands(like))
    plain = found.pop(experts.PLAIN)
    assert np.isfinite(plain[0]).all()
    for ours in found.values():
        chex.assert_trees_all_close(ours, plain, rtol=1e-4, atol=1e-5)
