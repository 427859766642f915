"""Compile a mixture of experts over all devices: ringcoll against built-in all-to-alls.

Programs are compiled in bfloat16 for chips that you need not have, and `ringcoll.overlap` computes
their times.

  plain      rows sorted by expert, in blocks of equal size; the built-in all-to-all sends them to
             the experts' ranks and back
  others     ringcoll.layers.expert_parallel.moe with that algorithm

The choice is even: every expert gets the same number of tokens from each rank, and `max_send` says
so. In all programs, experts multiply blocks of that size by one batched product. It replaces a
grouped matmul of uneven blocks, whose time cannot be read from a compiled program. Routing, sorting
and the moves of rows are in the programs.

A shape is tokens of a rank x width of a token x width of an expert x experts x experts of a token.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.compiled import compiling
from benchmarks.compiled.programs import PLAIN, with_gradient
from ringcoll.commands.overlap import mesh_on
from ringcoll.layers import expert_parallel
from ringcoll.layers.expert_parallel.experts import orders, permute, spread, weighted_sum
from ringcoll.layers.expert_parallel.routing import route

TOPOLOGIES, SHAPE = "v5p:2x2x4,v6e:4x2", "8192x4096x4096x64x8"
ALGORITHMS = (PLAIN, *expert_parallel.ALGORITHMS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which programs, for which chips, and where to write the results."""
    compiling.add_programs(
        parser, topology=TOPOLOGIES, shape=SHAPE, algorithms=ALGORITHMS, direction="all"
    )


def run(args: argparse.Namespace) -> int:
    """Compile, and return the exit status: 1 if the compiler refused a program."""
    todo = compiling.every(
        topology=compiling.devices_of(args),
        direction=args.direction,
        shape=args.shape,
        algorithm=args.algorithm,
    )
    return compiling.compile_all(args, todo, program_of)


def program_of(topology: str, direction: str, shape: str, algorithm: str) -> tuple[Callable, tuple]:
    """The program that the flags of the command name, and its operands."""
    return program(mesh_on(topology), direction, shape, algorithm, jnp.bfloat16)


def program(
    mesh: Mesh, direction: str, shape: str, algorithm: str, dtype: Any
) -> tuple[Callable, tuple]:
    """The layer over a mesh of one axis, and the operands x, router, gate, up and down."""
    tokens, d, f, total, top_k = map(int, shape.split("x"))
    n = mesh.size
    layer = partial(all_to_alls, axis_name="x", top_k=top_k)
    if algorithm != PLAIN:
        most = tokens * top_k // n
        layer = partial(ours, axis_name="x", top_k=top_k, algorithm=algorithm, max_send=most)
    specs = P("x"), P(), P("x"), P("x"), P("x")
    shapes = (n * tokens, d), (d, total), (total, d, f), (total, d, f), (total, f, d)
    operands = tuple(
        jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))
        for size, spec in zip(shapes, specs, strict=True)
    )
    function = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("x"))
    return (with_gradient(function, lambda y: y) if direction == "both" else function), operands


def ours(x: Array, router: Array, gate: Array, up: Array, down: Array, **options: Any) -> Array:
    """The layer of ringcoll."""
    experts = {"gate": gate, "up": up, "down": down}
    return expert_parallel.moe(x, router, experts, kernel=_even_blocks, **options).output


def _even_blocks(rows: Array, weights: Array, sizes: Array) -> Array:
    """Multiply equal blocks of rows, one for each expert: `[r, d], [e, d, f], [e] -> [r, f]`."""
    blocks = rows.reshape(len(weights), -1, rows.shape[1])
    return _products(blocks, weights).reshape(len(rows), -1)


def all_to_alls(
    x: Array, router: Array, gate: Array, up: Array, down: Array, *, axis_name: str, top_k: int
) -> Array:
    """The layer with built-in all-to-alls of blocks, before and after the experts."""
    exchange = partial(lax.all_to_all, axis_name=axis_name, tiled=True)
    routing = route(x, router, axis_name, top_k, normalize=True)
    order, back = orders(routing.ids)
    rows = spread(x, order, back, jnp.ones(routing.ids.shape, bool))
    rows = rows.reshape(router.shape[1], -1, x.shape[1])
    rows = exchange(rows, split_axis=0, concat_axis=1)  # [experts here, rows of all ranks, d]
    hidden = jax.nn.silu(_products(rows, gate)) * _products(rows, up)
    rows = exchange(_products(hidden, down), split_axis=1, concat_axis=0)
    rows = permute(rows.reshape(-1, x.shape[1]), back, order)
    return weighted_sum(rows.reshape(*routing.ids.shape, -1), routing.weights)


_products = partial(jnp.einsum, "ecd,edf->ecf")
