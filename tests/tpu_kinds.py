"""Compile programs that communicate in less common ways; print what a timeline reads, as JSON."""

import json
import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll import overlap
from ringcoll.commands.overlap import mesh_on
from ringcoll.overlap.chips import chip
from ringcoll.overlap.hlo import parse
from ringcoll.overlap.timeline import Timeline


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


def read(topology, function, x, w, specs, out):
    """What a timeline reads in the compiled function of x and w."""
    mesh = mesh_on(topology)
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip((x, w), specs, strict=True)
    ]
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    program = overlap.compile_for(topology, mapped, *operands)
    known = chip(program.kind)
    timeline = Timeline(parse(program.text), program.network, known, {}).run()
    return {
        "kinds": [wire.kind for wire, _ in timeline.transfers.values()],
        "exposed": timeline.tally["exposed",],
        "unread": sorted(timeline.unread),
        "notes": sorted(timeline.notes),
    }


GATHERED = (P("x"), P(None, "x")), P(None, "x")
SUMMED = (P(None, "x"), P("x")), P("x")
found = {"kernel": read("v5e:2x2", kernel, (1024, 512), (512, 512), (P("x"), P()), P("x"))}
if jax.__version_info__ >= (0, 12):  # older ones cannot write the text of what starts there
    found |= {
        "gathered": read("tpu7x:2x2x1", plain, (8192, 4096), (4096, 8192), *GATHERED),
        "summed": read("tpu7x:2x2x1", scattered, (4096, 8192), (8192, 4096), *SUMMED),
    }
json.dump(found, sys.stdout)
