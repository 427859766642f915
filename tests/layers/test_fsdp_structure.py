"""Programs of sharded parameters: what is sent in which dtype, what is kept, how they grow."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import make_mesh, mostly_exhaustive
from test_fsdp import POLICIES

from ringcoll.layers import fsdp


def test_dtypes_of_the_wire():
    """Parameters in float32, on the wire in bfloat16, summed in float32."""
    mesh, spec = make_mesh(4), {"w": P("x", None), "b": P()}
    params = {"w": jnp.ones((8, 4), jnp.float32), "b": jnp.ones((4,), jnp.float32)}
    params["w"] = params["w"] * 257.0  # not a bfloat16

    def loss(params, reduce_dtype):
        options = {"dtype": jnp.bfloat16, "reduce_dtype": reduce_dtype, "algorithm": "ring"}
        gathered = fsdp.gather(params, spec, "x", **options)
        assert gathered["w"].dtype == gathered["b"].dtype == jnp.bfloat16
        return jax.lax.psum(sum(leaf.sum() for leaf in jax.tree.leaves(gathered)), "x")

    def program(reduce_dtype):
        return jax.shard_map(
            jax.value_and_grad(partial(loss, reduce_dtype=reduce_dtype)),
            mesh=mesh,
            in_specs=(spec,),
            out_specs=(P(), spec),
        )

    value, grads = jax.jit(program(jnp.float32))(params)
    assert value == 4 * (256 * 32 + 4)
    assert grads["w"].dtype == grads["b"].dtype == jnp.float32
    for reduce_dtype, sums in ((jnp.float32, {"f32"}), (None, {"bf16"})):
        text = str(jax.make_jaxpr(program(reduce_dtype))(params))
        sent = {
            line.split(":")[1].split("[")[0] for line in text.splitlines() if "_scatter" in line
        }
        assert sent == sums, text
        assert "bf16[8,4]{V:x} = ringcoll_all_gather" in text


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_summed_in_the_dtype_that_is_asked_for(fused):
    """Ranks add 256 and seven ones: 263 in float32; in bfloat16 256, or 264, or in between."""
    spec, rows = P("x", None), np.ones((8, 8), jnp.bfloat16)
    rows[0] = 256

    def loss(w, x):
        options = {"dtype": jnp.bfloat16, "reduce_dtype": jnp.float32, "algorithm": "ring"}
        gathered = fsdp.gather(w, spec, "x", fused=fused, **options)
        y = fsdp.linear(gathered, x, "x", algorithm="ring") if fused else x @ gathered
        return jax.lax.psum(y.astype(jnp.float32).sum(), "x")

    mapped = jax.shard_map(
        jax.grad(loss), mesh=make_mesh(8), in_specs=(spec, P("x")), out_specs=spec
    )
    results = jax.jit(mapped)(np.ones((8, 8), np.float32), rows)
    np.testing.assert_array_equal(results, np.full((8, 8), 263))


def test_sums_over_replicas_are_in_the_dtype_that_is_asked_for():
    """Of sharded and of unsharded parameters: 256 and seven ones are 264 in bfloat16."""
    spec = {"sharded": P("x"), "whole": P()}

    def loss(params, weight):
        options = {"dtype": jnp.bfloat16, "reduce_dtype": jnp.float32, "replicas": "y"}
        gathered = fsdp.gather(params, spec, "x", **options, algorithm="ring")
        return jax.lax.psum(sum((weight * leaf).sum() for leaf in gathered.values()), ("x", "y"))

    mapped = jax.shard_map(
        jax.grad(loss), mesh=make_mesh(2, 4), in_specs=(spec, P(("x", "y"))), out_specs=spec
    )
    params = {name: np.ones(4, np.float32) for name in spec}
    for dw in jax.jit(mapped)(params, np.array([256] + [1] * 7, jnp.bfloat16)).values():
        np.testing.assert_array_equal(dw, np.full(4, 263, np.float32))


def trained(policy, length, width=64, **options):
    """The gradient of a scan over square layers on four ranks."""
    mesh, spec = make_mesh(4), {"w": P(None, None, "x")}

    def layer(p, x):
        linear = partial(fsdp.linear, axis_name="x", algorithm="ring")
        y = linear(p["w"], x) if options.get("fused") else x @ p["w"]
        return jnp.tanh(y)

    def loss(params, x):
        all_options = {"algorithm": "ring", "policy": policy, **options}
        y = fsdp.scan_layers(layer, params, x, spec, "x", **all_options)
        return jax.lax.psum(y.sum(), "x")

    mapped = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(spec, P("x")), out_specs=spec)
    operands = (
        {"w": jax.ShapeDtypeStruct((length, width, width), jnp.float32)},
        jax.ShapeDtypeStruct((8, width), jnp.float32),
    )
    return jax.jit(mapped), operands


@pytest.mark.parametrize(
    ("fused", "policy"),
    mostly_exhaustive(product([True, False], POLICIES), lambda *case: case == (True, "nothing")),
)
def test_gathered_parameters_are_not_kept(policy, fused):
    """For each layer a few x of [2, 64] are kept, and no parameters of [64, 64]."""

    def held(length):
        mapped, operands = trained(POLICIES[policy], length, fused=fused)
        return mapped.lower(*operands).compile().memory_analysis().temp_size_in_bytes

    a_layer = (held(12) - held(4)) / 8
    shard = 4 * 64 * 64 / 4
    assert a_layer < 4 * 8 * 2 * 64 + shard  # the gradient's shards may be copied


@pytest.mark.parametrize("fused", [True, False])
def test_products_that_a_policy_saves_are_not_computed_again(fused):
    def products(policy):
        mapped, operands = trained(policy, 4, fused=fused)
        return str(jax.make_jaxpr(mapped)(*operands)).count("= dot_general[")

    saved = jax.checkpoint_policies.dots_saveable
    assert products(None) - products(saved) == 1


@pytest.mark.parametrize(("fused", "gathers", "scatters"), [(False, 4, 2), (True, 4, 0)])
def test_a_loop_of_equal_rounds(fused, gathers, scatters):
    """Forward: a gather before the loop, one inside. Backward: one inside, then a reduction."""
    mapped, operands = trained(None, 5, fused=fused)
    text = str(jax.make_jaxpr(mapped)(*operands))
    assert text.count("= ringcoll_all_gather[") == gathers
    assert text.count("= ringcoll_psum_scatter[") == scatters
    assert text.count("length=5") == 2
    longer, operands = trained(None, 50, fused=fused)
    assert len(str(jax.make_jaxpr(longer)(*operands)).splitlines()) == len(text.splitlines())
