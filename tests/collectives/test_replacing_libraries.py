"""`ringcoll.replacing` in other people's code: batch norms and optimizers, to the last bit.

Nothing is rounded, so the order of additions does not matter: for each feature, as many rows are
its mean + 2 as its mean - 2. So the variance is 4, and its root 2.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import assert_same, data, make_mesh

import ringcoll

pytest.importorskip("flax")
pytest.importorskip("optax")

import optax
from flax import linen

ROWS, FEATURES = 4, 6  # of a rank


def features(n):
    """`[n rows, f]`: features differ in their means and in the order of their signs."""
    random = np.random.default_rng(n)
    signs = np.repeat([-2.0, 2.0], n * ROWS // 2)
    columns = [mean + random.permutation(signs) for mean in range(FEATURES)]
    return np.stack(columns, 1).astype(np.float32)


def by_linen(x, scale, axis_name):
    norm = linen.BatchNorm(False, momentum=0.5, epsilon=0.0, axis_name=axis_name)
    variables = {
        "params": {"scale": scale, "bias": scale + 1},
        "batch_stats": {"mean": jnp.zeros(FEATURES), "var": jnp.ones(FEATURES)},
    }
    y, changed = norm.apply(variables, x, mutable=["batch_stats"])
    return y, changed["batch_stats"]


def gradients_summed(x, scale, axis_name):
    """An optimizer whose transformation sums over an axis."""
    across = (
        optax.stateless(lambda updates, _: jax.lax.psum(updates, axis_name))
        if axis_name
        else optax.identity()
    )
    optimizer = optax.chain(across, optax.sgd(0.5, momentum=0.5))
    params = {"a": scale, "b": 2 * scale}
    gradient = {name: x.mean(0) * w for name, w in params.items()}  # of quadratic losses: exact
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    return jnp.zeros_like(x), optax.apply_updates(params, updates)


LIBRARIES = {"batch norm": by_linen, "optimizer": gradients_summed}


def step(x, scale, weights, axis_name):
    """The results of each library, and the gradients of a loss that weighs every element."""

    def loss(x, scale, call):
        y, state = call(x, scale, axis_name)
        return (y * weights).sum(), (y, state)

    return {
        name: jax.grad(loss, argnums=(0, 1), has_aux=True)(x, scale, call)
        for name, call in LIBRARIES.items()
    }


@pytest.mark.parametrize(("n", "check_vma"), [(2, True), (4, False)])
def test_libraries_make_the_same_by_ours(n, check_vma):
    mesh, x = make_mesh(n), features(n)
    scale, weights = data((n, FEATURES), ranks=n), data(x.shape, ranks=x.shape[0])

    def per_rank(x, scale, weights):
        results = step(x, scale[0], weights, "x")
        return jax.tree.map(lambda leaf: leaf[None], results)

    program = jax.jit(
        jax.shard_map(per_rank, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    )
    scale[:] = scale[0]  # the same on all ranks, as parameters are
    by_lax = program.trace(x, scale, weights)
    with ringcoll.replacing(jax.lax, algorithm="ring"):
        ours = program.trace(x, scale, weights)
        results = program(x, scale, weights)
    assert "ringcoll" not in str(by_lax.jaxpr)
    text = str(ours.jaxpr)
    assert text.count("ringcoll_psum") >= len(LIBRARIES)
    assert "psum" not in text.replace("ringcoll_psum", "").replace("psum_invariant", "")
    assert_same(results, program(x, scale, weights))
    y, state = results["batch norm"][1]
    whole, of_whole = by_linen(x, scale[0], None)
    assert_same(y.reshape(x.shape), whole)
    assert_same(jax.tree.map(lambda leaf: leaf[-1], state), of_whole)
