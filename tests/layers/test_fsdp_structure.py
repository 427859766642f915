"""Programs of a scan over sharded layers: what is kept, what is computed again, how they grow."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support import make_mesh

from ringcoll.layers import fsdp


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


def test_gathered_parameters_are_not_kept():
    """For each layer a few x of [2, 64] are kept, and no parameters of [64, 64]."""

    def held(length):
        mapped, operands = trained(None, length, fused=True)
        return mapped.lower(*operands).compile().memory_analysis().temp_size_in_bytes

    a_layer = (held(12) - held(4)) / 8
    assert a_layer < 4 * 8 * 2 * 64 + 64 * 64  # and the gradient's shards, which may be copied


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
