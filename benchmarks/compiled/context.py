"""Compare causal attention over a sharded sequence: ringcoll against an all-gather first.

Without --topology, the results of all programs are compared, and then the programs run in turn on
the devices of this machine, in float32. With --topology they are compiled in bfloat16 for chips
that you need not have, and `ringcoll.overlap` computes their times. `python -m benchmarks cluster`
can run it between hosts whose links have a given rate.

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
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.compiled import compiling
from benchmarks.compiled.programs import DIRECTIONS, PLAIN, with_gradient
from benchmarks.measuring import options, processes, side_by_side
from benchmarks.measuring.measure import Ready
from ringcoll import overlap
from ringcoll.collectives.table import LAX
from ringcoll.layers import context_parallel
from ringcoll.layers.context_parallel.layouts import LAYOUTS
from ringcoll.overlap import topology as topologies

#: The heads of Llama 3 8B.
COMPILED = "1x32768x32x8x128,1x131072x32x8x128"
MEASURED = "2x4096x8x2x64"
ALGORITHMS = (PLAIN, "auto", "ring", "bidirectional_ring", context_parallel.ULYSSES)
#: A larger error is a fault: sums of float32 in another order differ by about 1e-6.
TOLERANCE = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which programs, on which devices, and where to write the results."""
    layouts = options.listed(*LAYOUTS)
    what = f"which positions a rank has: {', '.join(LAYOUTS)} (zigzag)"
    parser.add_argument("--layout", type=layouts, default=["zigzag"], metavar="LIST", help=what)
    directions = options.listed(*DIRECTIONS)
    parser.add_argument(
        "--direction",
        type=directions,
        default=list(DIRECTIONS),
        metavar="LIST",
        help="names with commas between (all)",
    )
    side_by_side.add_arguments(parser, ALGORITHMS, measured=MEASURED, compiled_as=COMPILED)
    processes.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compile, or compare and time; return 1 if anything was refused or wrong."""
    if not args.topology:
        return _measure(args)
    todo = [
        {
            "topology": topology,
            "layout": layout,
            "direction": direction,
            "shape": shape,
            "algorithm": algorithm,
        }
        for topology in compiling.devices_of(args)
        for layout in args.layout
        for direction in args.direction
        for shape in (args.shape or COMPILED).split(",")
        for algorithm in args.algorithm
    ]
    return compiling.compile_all(args, todo, program_of)


def program_of(
    topology: str, layout: str, direction: str, shape: str, algorithm: str
) -> tuple[Callable, tuple]:
    """The program that the flags of the command name, and its operands."""
    mesh = overlap.mesh(topology, x=len(topologies.devices(topology)))
    return _program(mesh, layout, direction, shape, algorithm, jnp.bfloat16)


def _program(
    mesh: Mesh, layout: str, direction: str, shape: str, algorithm: str, dtype: Any
) -> tuple[Callable, tuple]:
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


def _measure(args: argparse.Namespace) -> int:
    """Compare, time, report; return 1 if anything was wrong."""
    processes.start(args)
    flat = options.mesh(args)
    todo = [
        side_by_side.Task(
            {"layout": layout, "direction": direction, "shape": shape},
            side_by_side.measured_here(args.algorithm),
            TOLERANCE,
            weight=DIRECTIONS.index(direction) + 1,
        )
        for shape in (args.shape or MEASURED).split(",")
        for layout in args.layout
        for direction in args.direction
    ]
    title = "Causal attention over ranks against gathering first"
    return side_by_side.measure_all(args, flat, title, todo, partial(_ready, flat.devices))


def _ready(devices: np.ndarray, layout: str, direction: str, shape: str, algorithm: str) -> Ready:
    mesh = Mesh(devices.reshape(-1), ("x",))
    function, operands = _program(mesh, layout, direction, shape, algorithm, jnp.float32)
    return side_by_side.ready(function, operands, lambda of: 1.0)
