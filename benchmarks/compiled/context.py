"""Compare causal attention over a sharded sequence: ringcoll against an all-gather first.

Programs are compiled in bfloat16 for chips that you need not have, and `ringcoll.overlap` computes
their times.

  plain      the built-in all-gather of keys and values, then attention, tile by tile
  ulysses    all-to-alls that exchange positions for heads, before and after
  others     ringcoll.layers.context_parallel.attention with that algorithm; "ring" on a contiguous
             layout is ring attention as it was published

A shape is sequences x tokens x heads x heads of keys x width of a head.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.compiled import compiling
from benchmarks.compiled.programs import PLAIN, with_gradient
from benchmarks.measuring import options
from ringcoll.commands.overlap import mesh_on
from ringcoll.layers import context_parallel
from ringcoll.layers.context_parallel.layouts import LAYOUTS
from ringcoll.schedules.registry import LAX

#: The heads of Llama 3 8B.
SHAPES = "1x32768x32x8x128,1x131072x32x8x128"
TOPOLOGIES = "v5e:4x2,v5p:2x2x4,v6e:4x2"
ALGORITHMS = (PLAIN, "auto", "ring", "bidirectional_ring", context_parallel.ULYSSES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which programs, on which devices, and where to write the results."""
    layouts = options.listed(*LAYOUTS)
    what = f"which positions a rank has: {', '.join(LAYOUTS)} (zigzag)"
    parser.add_argument("--layout", type=layouts, default=["zigzag"], metavar="LIST", help=what)
    compiling.add_programs(
        parser, topology=TOPOLOGIES, shape=SHAPES, algorithms=ALGORITHMS, direction="all"
    )


def run(args: argparse.Namespace) -> int:
    """Compile, and return the exit status: 1 if the compiler refused a program."""
    todo = compiling.every(
        topology=compiling.devices_of(args),
        layout=args.layout,
        direction=args.direction,
        shape=args.shape,
        algorithm=args.algorithm,
    )
    return compiling.compile_all(args, todo, program_of)


def program_of(
    topology: str, layout: str, direction: str, shape: str, algorithm: str
) -> tuple[Callable, tuple]:
    """The program that the flags of the command name, and its operands."""
    return program(mesh_on(topology), layout, direction, shape, algorithm, jnp.bfloat16)


def program(
    mesh: Mesh, layout: str, direction: str, shape: str, algorithm: str, dtype: Any
) -> tuple[Callable, tuple]:
    """Attention over a mesh of one axis, and the operands query, key and value."""
    batch, tokens, heads, groups, width = map(int, shape.split("x"))
    spec = P(None, "x")
    attend = partial(
        context_parallel.attention,
        axis_name="x",
        causal=True,
        layout=layout,
        algorithm=LAX if algorithm == PLAIN else algorithm,
    )
    function = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    operands = tuple(
        jax.ShapeDtypeStruct(
            (batch, tokens, count, width), dtype, sharding=NamedSharding(mesh, spec)
        )
        for count in (heads, groups, groups)
    )
    return (with_gradient(function, lambda y: y) if direction == "both" else function), operands
