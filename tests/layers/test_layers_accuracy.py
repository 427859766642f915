"""Layers in bfloat16 on data that show where float32 is lost: few roundings, or none at all.

The tables compare norms of data with the mean 100, losses of logits of 100, experts and attention
with float64. Here are the data for which one rounding in between changes a result visibly.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layer_cases import compiled
from support import make_mesh

from ringcoll.layers import context_parallel as cp
from ringcoll.layers import fsdp
from ringcoll.layers import tensor_parallel as tp
from ringcoll.layers.expert_parallel import moe

NARROW = jnp.bfloat16


def summed_in_float32(layer, in_specs, out, *operands):
    """The result on eight ranks, one of which adds 256 and the others 1: 263, and so 264."""
    mapped = jax.shard_map(layer, mesh=make_mesh(8), in_specs=in_specs, out_specs=out)
    found = compiled(jax.jit(mapped).trace(*operands))(*operands)
    assert found.dtype == NARROW
    np.testing.assert_array_equal(np.float32(found), 264)


@pytest.mark.parametrize("layer", ["row_linear", "whole row_linear", "mlp", "attention", "fsdp"])
def test_sums_over_ranks_in_the_dtype_that_is_asked_for(layer):
    kernel = jnp.ones((8, 2), NARROW)
    x = jnp.ones((8, 8), NARROW).at[:, 0].set(256)
    options = {"algorithm": "ring", "accumulate_dtype": jnp.float32}
    if layer == "fsdp":
        linear = partial(fsdp.linear, axis_name="x", **options)
        summed_in_float32(linear, (P("x"), P()), P("x"), kernel, x)
    elif layer == "mlp":
        params = {"up": jnp.eye(8, dtype=NARROW), "down": kernel}
        mlp = partial(tp.mlp, axis_name="x", activation=jax.nn.relu, **options)
        summed_in_float32(mlp, ({"up": P(None, "x"), "down": P("x")}, P("x")), P("x"), params, x)
    elif layer == "attention":  # each head returns its own feature, because all tokens are alike
        heads = jnp.eye(8, dtype=NARROW)[:, :, None]
        params = dict.fromkeys(("query", "key", "value"), heads) | {"out": kernel[:, None]}
        specs = tp.partition_specs(params, "x")
        attend = partial(tp.attention, axis_name="x", rotary_base=None, **options)
        summed_in_float32(attend, (specs, P("x")), P("x"), params, x)
    else:
        whole = layer.startswith("whole")
        linear = partial(tp.row_linear, axis_name="x", sequence_parallel=not whole, **options)
        out = P() if whole else P("x")
        summed_in_float32(linear, (P("x"), P(None, "x")), out, kernel, x)


@pytest.mark.parametrize("algorithm", ["ring", "lax"])
def test_gradients_of_attention_are_zero_where_all_values_are_the_same(algorithm):
    """Scores do not matter then. The sum of result times cotangent is odd, and above 256."""
    q, k = jnp.zeros((1, 8, 2, 4), NARROW), jnp.ones((1, 8, 2, 4), NARROW)
    k = k * jnp.arange(8)[None, :, None, None].astype(NARROW)
    v = jnp.broadcast_to(jnp.array([7, 11, 13, 19], NARROW), q.shape)
    ct = jnp.broadcast_to(jnp.array([9, 9, 9, 2], NARROW), q.shape)  # 9 * 31 + 2 * 19 = 317
    spec = P(None, "x")
    attend = jax.shard_map(
        partial(cp.attention, axis_name="x", causal=False, algorithm=algorithm),
        mesh=make_mesh(2),
        in_specs=(spec,) * 3,
        out_specs=spec,
    )

    def gradients(q, k, v, ct):
        out, back = jax.vjp(attend, q, k, v)
        return out, *back(ct)

    program = compiled(jax.jit(gradients).trace(q, k, v, ct))
    out, dq, dk, dv = program(q, k, v, ct)
    np.testing.assert_array_equal(np.float32(out), np.float32(v))
    np.testing.assert_array_equal(np.float32(dq), 0)
    np.testing.assert_array_equal(np.float32(dk), 0)
    np.testing.assert_array_equal(np.float32(dv), np.float32(ct))


def by_experts(down, x):
    """The first expert gets all tokens."""
    ones = jnp.ones((1, 1, 1), NARROW)
    experts = {"gate": ones, "up": ones, "down": down}
    options = {"top_k": 1, "algorithm": "ring", "activation": lambda x: x}
    return moe(x, jnp.zeros((1, 8), NARROW), experts, "x", **options).output


OPTIONS = {"axis_name": "x", "algorithm": "ring"}
WITH_WEIGHTS = {
    # A layer, its weights, their spec, and that of its tokens.
    "columns": (
        partial(tp.column_linear, **OPTIONS, residuals="regather"),
        (1, 8),
        P(None, "x"),
        P("x"),
    ),
    "rows": (partial(tp.row_linear, **OPTIONS), (8, 1), P("x"), P(None, "x")),
    "experts": (by_experts, (8, 1, 1), P("x"), P("x")),
}


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_gradients_that_stay_on_a_rank_are_rounded_once(name):
    """To the gradient of a weight, the tokens of one rank add 256 and those of the others 1."""
    layer, shape, spec, of_x = WITH_WEIGHTS[name]
    mapped = jax.shard_map(
        layer, mesh=make_mesh(8), in_specs=(spec, of_x), out_specs=P(*of_x[::-1])
    )
    x = jnp.ones((8, 1) if name != "rows" else (8, 8), NARROW)

    def gradient(w, x):
        y, pull_back = jax.vjp(mapped, w, x)
        ct = jnp.ones(y.shape, y.dtype).at[3].set(256)
        return pull_back(ct)[0]

    found = jax.jit(gradient)(jnp.ones(shape, NARROW), x)
    np.testing.assert_array_equal(np.float32(found).max(), 264)
