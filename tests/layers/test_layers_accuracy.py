"""Layers in bfloat16 on data that show where float32 is lost: few roundings, or none at all.

The tables compare norms of data with the mean 100, losses of logits of 100, experts and attention
with float64. Here are the data for which one rounding in between changes a result visibly.
"""

from functools import partial

import jax
import jax.numpy as jnp
import layer_references as reference
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layer_cases import compiled
from support import make_mesh

from ringcoll.layers import context_parallel as cp
from ringcoll.layers import expert_parallel as ep
from ringcoll.layers import fsdp
from ringcoll.layers import tensor_parallel as tp

NARROW = jnp.bfloat16


@pytest.mark.parametrize("positions", ["of the sequence", "of each row"])
@pytest.mark.parametrize("dtype", [NARROW, jnp.float32])
def test_rotary_at_positions_over_a_thousand(positions, dtype):
    """In bfloat16, 1001 is 1000: a quarter of a turn and more for the first pairs."""
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 8)).astype(dtype)
    where = np.arange(1001, 1006)
    where = where if positions == "of the sequence" else np.stack([where, 7 * where])
    found = compiled(jax.jit(tp.rotary).trace(x, where))(x, where)
    assert found.dtype == dtype
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        right = reference.turned(np.float64(x), np.float64(where))
    # An angle is off by two roundings of 8000, in radians; the result is rounded once.
    off = 2 * 8000 * 2.0**-24 + float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(np.float64(found), right, rtol=0, atol=off * np.abs(x).max() * 1.5)


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


@pytest.mark.parametrize("form", ["gather", "ragged_all_to_all"])
def test_logits_of_a_router_that_are_equal_in_bfloat16(form):
    """64 and 64.25 are both 64 there, and then the first expert would be chosen."""
    x = jnp.array([[64, 0.25], [64, -0.25]], NARROW)
    router = jnp.array([[1, 1], [0, 1]], NARROW)
    experts = {"gate": jnp.ones((2, 2, 1)), "up": jnp.zeros((2, 2, 1)), "down": jnp.ones((2, 1, 2))}
    experts["up"] = experts["up"].at[:, 0, 0].set(jnp.array([1.0, 2.0]) / 64)
    experts = jax.tree.map(lambda w: w.astype(NARROW), experts)
    options = {"axis_name": "x", "top_k": 1, "activation": jnp.ones_like, "algorithm": form}
    layer = jax.shard_map(
        partial(ep.moe, **options),
        mesh=make_mesh(2),
        in_specs=(P("x"), P(), P("x")),
        out_specs=ep.Routed(P("x"), P()),
    )
    output = compiled(jax.jit(layer).trace(x, router, experts))(x, router, experts).output
    np.testing.assert_array_equal(np.float32(output), [[2, 2], [1, 1]])


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
