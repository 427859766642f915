"""Whole steps: all forms compute the same, and the page is what the figures give."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from support import mostly_exhaustive

from benchmarks.compiled import whole
from benchmarks.compiled.whole_steps import BY, program

#: Sums of float32 in a different order differ by about 1e-6 of the largest element.
TOLERANCE = 1e-4
NAMES = list(whole.STEPS)


def tiny(name):
    step = whole.STEPS[name]
    heads = step.layer in ("block", "context")
    sizes = {"width": 1024 if heads else 64, "hidden": 2048 if step.layer == "attention" else 64}
    return replace(step, tokens=(8, 64), vocabulary=64 * bool(step.vocabulary), **sizes)


def values(step, like):
    """Weights and tokens of order one; all experts get as many tokens, in every layer."""
    rng = np.random.default_rng(0)
    weights, x = jax.tree.map(lambda of: rng.standard_normal(of.shape) * of.size**-0.25, like)
    if step.layer == "experts":  # tokens choose by their first features, and results are small
        weights = jax.tree.map(lambda of: 0.1 * of, weights)
        router = weights["layers"]["router"]
        router[:] = 0
        router[:, :8] = np.tile(np.eye(8), router.shape[2] // 8)
        x[..., :8] += 2 * np.resize(np.eye(8), (*x.shape[:2], 8))
    return jax.tree.map(
        lambda x, of: jax.device_put(x.astype(of.dtype), of.sharding), (weights, x), like
    )


@pytest.mark.parametrize("name", mostly_exhaustive(NAMES, "fsdp2-tp4-mlp8192".__eq__))
def test_all_forms_of_a_step_have_the_same_loss_and_gradients(name):
    step = tiny(name)
    kinds = (AxisType.Auto,) * len(step.axes)
    mesh = jax.make_mesh((*step.axes.values(),), (*step.axes,), axis_types=kinds)
    plain = None
    for form in (*step.forms, BY + "ring"):
        function, like = program(step, form, mesh, jnp.float32)
        found = jax.tree.leaves(jax.jit(function)(*values(step, like)))
        plain = plain or found
        for expected, actual in zip(plain, found, strict=True):
            largest = np.abs(expected).max()
            assert 0 < largest < np.inf
            assert np.abs(np.asarray(actual) - expected).max() < TOLERANCE * largest, form
