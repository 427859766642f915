"""Compile programs that communicate in less common ways; print what a timeline reads, as JSON."""

import json
import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll import overlap
from ringcoll.commands.overlap import mesh_on


def plain(x, w):
    return lax.all_gather(x, "x", tiled=True) @ w


def scattered(x, w):
    return lax.psum_scatter(lax.psum(x @ w, "x"), "x", tiled=True)


def to_the_right(x_ref, out_ref, sent, received):
    right = lax.rem(lax.axis_index("x") + 1, lax.axis_size("x"))
    copy = pltpu.make_async_remote_copy(x_ref, out_ref, sent, received, device_id=(right,))
    copy.start()
    copy.wait()


def kernel(x, w):
    """One hop by a kernel's own copy, then a product."""
    hop = pl.pallas_call(
        to_the_right,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
    )
    return hop(x) @ w


def splash(x, w):
    """Attention of 4 heads x 1024 x 128, and the gradient of q, k and v."""
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((1024, 1024))] * 4)
    attend = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    q = jnp.stack([x @ w] * 4)

    def loss(*operands):
        return (attend(*operands).astype(jnp.float32) ** 2).sum()

    return sum(jax.grad(loss, (0, 1, 2))(q, q, q))


def offloaded(x, w):
    """The inputs of four layers wait on the host for the gradient."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def layer(x, w):
        return jnp.tanh(checkpoint_name(x, "x") @ w), None

    def loss(x):
        layers = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return lax.scan(layers, x, jnp.stack([w, 2 * w, 3 * w, 4 * w]))[0].sum()

    return jax.grad(loss)(x)


def read(topology, function, x, w, specs, out):
    """What a report says of the compiled function of x and w."""
    mesh = mesh_on(topology)
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip((x, w), specs, strict=True)
    ]
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    program = overlap.compile_for(topology, mapped, *operands)
    report = overlap.report(program)
    of_report = ("exposed", "unread", "host", "sources", "unpriced", "assumptions")
    kinds = [row.kind for row in report.rows]
    return {"kinds": kinds, **{name: getattr(report, name) for name in of_report}}


GATHERED = (P("x"), P(None, "x")), P(None, "x")
SUMMED = (P(None, "x"), P("x")), P("x")
found = {
    "kernel": read("v5e:2x2", kernel, (1024, 512), (512, 512), (P("x"), P()), P("x")),
    "splash": read("v6e:2x2", splash, (1024, 256), (256, 128), (P(), P()), P()),
    "offloaded": read("v6e:2x2", offloaded, (4096, 1024), (1024, 1024), (P(), P()), P()),
}
if jax.__version_info__ >= (0, 12):  # older ones cannot write the text of what starts there
    found |= {
        "gathered": read("tpu7x:2x2x1", plain, (8192, 4096), (4096, 8192), *GATHERED),
        "summed": read("tpu7x:2x2x1", scattered, (4096, 8192), (8192, 4096), *SUMMED),
    }
json.dump(found, sys.stdout)
