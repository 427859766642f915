"""The examples that put their own work under messages, against NumPy on one device."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import make_mesh, mostly_exhaustive

import ringcoll
from examples import muon, nearest_neighbours

SIZES = (1, 2, 3, 5, 8)


@pytest.mark.parametrize(
    "algorithm",
    mostly_exhaustive(
        ["lax", "ring", "bidirectional_ring", "two_ended", "bruck", "direct"],
        lambda algorithm: algorithm == "bidirectional_ring",
    ),
)
def test_nearest_points_are_those_of_one_device(algorithm):
    """Whole numbers, so that many distances are equal; the first of such points are nearer."""
    k = 7
    for n in SIZES:
        rng = np.random.default_rng(n)
        queries, points = (rng.integers(-2, 3, (n * rows, 3)) for rows in (4, 5))
        apart = ((queries[:, None] - points) ** 2).sum(-1)
        expected = np.argsort(apart, axis=1, kind="stable")[:, :k]
        find = partial(nearest_neighbours.nearest, k=min(k, n * 5), axis="x")
        mapped = jax.shard_map(find, mesh=make_mesh(n), in_specs=P("x"), out_specs=P("x"))
        with ringcoll.algorithm(algorithm):
            squares, found = jax.jit(mapped)(np.float32(queries), np.float32(points))
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(squares, np.take_along_axis(apart, expected, 1))


def orthogonal(x):
    x = x / np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


@pytest.mark.parametrize("n", SIZES)
def test_a_step_of_muon_is_that_of_one_device(n):
    """Of square, tall and wide matrices. A tall one is not transposed by the reference."""
    step = partial(muon.muon, axis="x", rate=0.1, decay=0.9)
    mapped = jax.shard_map(
        lambda stacks: [step(*stack) for stack in stacks],
        mesh=make_mesh(n),
        in_specs=P(None, "x"),
        out_specs=P(None, "x"),
    )
    rng, rows = np.random.default_rng(n), 2 * n
    stacks = [rng.standard_normal((3, 2 * n, rows, columns)) for columns in (rows, 1, 3, 40)]
    found = jax.jit(mapped)([list(map(np.float32, stack)) for stack in stacks])
    for (weights, momentum, gradients), ours in zip(stacks, found, strict=True):
        new = 0.9 * momentum + gradients
        updates = np.stack([orthogonal(x) for x in 0.9 * new + gradients])
        scale = max(1, rows / weights.shape[2]) ** 0.5
        np.testing.assert_allclose(ours[0], weights - 0.1 * scale * updates, rtol=0, atol=1e-4)
        np.testing.assert_allclose(ours[1], new, rtol=0, atol=1e-6)
