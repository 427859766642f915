"""`ringcoll.replacing` in other people's code: batch norms and optimizers, to the last bit.

Nothing is rounded, so the order of additions does not matter: for each feature, as many rows are
its mean + 2 as its mean - 2. So the variance is 4, and its root 2.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import assert_same, crossed, data, make_mesh

import ringcoll

pytest.importorskip("flax")
pytest.importorskip("optax")

import optax
from flax import linen, nnx

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


def by_nnx(x, scale, axis_name):
    norm = nnx.BatchNorm(FEATURES, momentum=0.5, epsilon=0.0, axis_name=axis_name, rngs=nnx.Rngs(0))
    norm.scale[...], norm.bias[...] = scale, scale + 1
    y = norm(x)
    return y, {"mean": norm.mean[...], "var": norm.var[...]}


def gradients_summed(x, scale, axis_name):
    """An optimizer whose transformation sums over an axis."""
    across = (
        optax.stateless(lambda updates, _: jax.lax.psum(updates, axis_name))
        if axis_name
        else optax.identity()
    )
    optimizer = optax.chain(across, optax.sgd(0.5, momentum=0.5))
    return stepped(optimizer, x, scale)


def sharpness_aware(x, scale, axis_name):
    """An optimizer of Optax that averages over an axis."""
    options = {"sync_period": 2, "opaque_mode": True, "batch_axis_name": axis_name}
    return stepped(optax.contrib.sam(optax.sgd(0.5), optax.sgd(0.25), **options), x, scale)


def stepped(optimizer, x, scale):
    """One step from a rank's rows; the losses are quadratic, so gradients are exact."""

    def gradient(params, _=None):
        return {name: x.mean(0) * w for name, w in params.items()}

    params = {"a": scale, "b": 2 * scale}
    extra = optax.with_extra_args_support(optimizer)
    updates, _ = extra.update(gradient(params), extra.init(params), params, grad_fn=gradient)
    return jnp.zeros_like(x), optax.apply_updates(params, updates)


LIBRARIES = {
    "linen": by_linen,
    "nnx": by_nnx,
    "a sum over an axis": gradients_summed,
    "sam": sharpness_aware,
}


def step(x, scale, weights, axis_name):
    """The results of each library, and the gradients of a loss that weighs every element."""

    def loss(x, scale, call):
        y, state = call(x, scale, axis_name)
        return (y * weights).sum(), (y, state)

    return {
        name: jax.grad(loss, argnums=(0, 1), has_aux=True)(x, scale, call)
        for name, call in LIBRARIES.items()
    }


@pytest.mark.parametrize(("n", "check_vma"), crossed([2, 4, 8], [True, False]))
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
    for name in ("linen", "nnx"):
        y, state = results[name][1]
        whole, of_whole = LIBRARIES[name](x, scale[0], None)
        assert_same(y.reshape(x.shape), whole)
        assert_same(jax.tree.map(lambda leaf: leaf[-1], state), of_whole)


def test_a_batch_norm_sends_the_messages_of_a_ring():
    n, x = 4, features(4)

    def norm(x):
        return by_linen(x, jnp.ones(FEATURES), "x")

    mapped = jax.shard_map(norm, mesh=make_mesh(n), in_specs=P("x"), out_specs=(P("x"), P()))
    with ringcoll.replacing(jax.lax, algorithm="ring"):
        text = jax.jit(mapped).lower(x).as_text()
    assert text.count("stablehlo.collective_permute") == 2 * (n - 1)
    assert "all_reduce" not in text
