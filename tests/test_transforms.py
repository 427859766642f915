"""Under vmap, pmap, scan, cond, remat, jit and on explicit and automatic mesh axes: as lax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MAIN, first_algorithm, operand
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import assert_same, data, make_mesh, per_rank

import ringcoll.lax


def both(transform, mesh, axes="x", cases=MAIN, n=3):
    """Every case by ours and by lax on the same operands, each put through `transform`."""

    def program(operands):
        ours, theirs = {}, {}
        for case in cases:
            x = operands[str(case)]
            theirs[str(case)] = transform(lambda x: case.theirs(x, axes, n), x)  # noqa: B023
            for extra in first_algorithm(case, n):
                ours[str(case)] = transform(
                    lambda x: case.ours(ringcoll.lax, x, axes, n, **extra),  # noqa: B023
                    x,
                )
        return ours, theirs

    assert_same(*per_rank(mesh, program, {str(case): operand(case, mesh, n) for case in cases}))


# --- control flow ---------------------------------------------------------------------


def scanned(function, x):
    def step(carry, x):
        return carry, function(x)

    return lax.scan(step, 0, jnp.stack([x, 2 * x]))[1]


def looped(function, x):
    return lax.fori_loop(0, 2, lambda i, y: y + function(x + i), jnp.zeros_like(function(x)))


def chosen(function, x):
    """Every rank takes the same branch, as it must where branches communicate."""
    at_once = lax.axis_size("x") == 3
    return lax.cond(jnp.bool_(at_once), function, lambda x: 2 * function(x), x)


TRANSFORMS = {
    "scan": scanned,
    "fori_loop": looped,
    "cond": chosen,
    "jit": lambda function, x: jax.jit(function)(x),
    "checkpoint": lambda function, x: jax.checkpoint(function)(x),
    "custom_jvp": lambda function, x: jax.custom_jvp(function)(x),
    "optimization_barrier": lambda function, x: function(lax.optimization_barrier(x)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform):
    both(TRANSFORMS[transform], make_mesh(3))
