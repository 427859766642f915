"""`ringcoll.replacing` in other people's code: a batch norm and its gradients, to the last bit.

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

linen = pytest.importorskip("flax.linen")

ROWS, FEATURES = 4, 6  # of a rank


def features(n):
    """`[n rows, f]`: features differ in their means and in the order of their signs."""
    random = np.random.default_rng(n)
    signs = np.repeat([-2.0, 2.0], n * ROWS // 2)
    columns = [mean + random.permutation(signs) for mean in range(FEATURES)]
    return np.stack(columns, 1).astype(np.float32)


@pytest.mark.parametrize(("n", "check_vma"), [(2, True), (4, False)])
def test_a_batch_norm_makes_the_same_by_ours(n, check_vma):
    x, weights = features(n), data((n * ROWS, FEATURES), ranks=n * ROWS)
    norm = linen.BatchNorm(False, momentum=0.5, epsilon=0.0, axis_name="x")
    statistics = {"mean": jnp.zeros(FEATURES), "var": jnp.ones(FEATURES)}

    def per_rank(x, weights):
        def loss(x, scale):
            parameters = {"scale": scale, "bias": scale + 1}
            variables = {"params": parameters, "batch_stats": statistics}
            y, changed = norm.apply(variables, x, mutable=["batch_stats"])
            return (y * weights).sum(), (y, changed)

        results = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, x[0])
        return jax.tree.map(lambda leaf: leaf[None], results)

    program = jax.jit(
        jax.shard_map(
            per_rank, mesh=make_mesh(n), in_specs=P("x"), out_specs=P("x"), check_vma=check_vma
        )
    )
    with ringcoll.replacing(jax.lax, algorithm="ring"):
        text = str(program.trace(x, weights).jaxpr)
        results = program(x, weights)
    assert "ringcoll_psum" in text
    assert "psum" not in text.replace("ringcoll_psum", "").replace("psum_invariant", "")
    assert_same(results, program(x, weights))
