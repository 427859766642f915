"""Compare tensor-parallel transformer blocks: ringcoll against the built-in forms.

The block is RMSNorm, attention with grouped heads, RMSNorm, gated MLP; between them activations are
sharded by sequence. Without --topology, the results of all programs are compared, and then the
programs run in turn on the devices of this machine, in float32. With --topology they are compiled
in bfloat16 for chips that you need not have, and `ringcoll.overlap` computes their times.

  plain      jax.lax in shard_map: one all_gather for query, key and value, one for gate and up,
             a psum_scatter after each half (Megatron's sequence parallelism)
  compiler   jit with shardings and no shard_map
  .../tuned  with compiler options that change the program (compiled only)
  others     ringcoll.layers.tensor_parallel with an algorithm of ringcoll.all_gather_matmul and
             ringcoll.matmul_reduce_scatter; /regather gathers again for the gradient
  auto+...   gradients are summed over data by an algorithm of ringcoll.psum, for each half of the
             block (others: by XLA's); /beside sums gradients of later weights under the attention
  above      how far the total is above the longer of compute (plain's) and communication
  built in   the fastest of plain and compiler, tuned or not
  error      the largest difference from plain, over the largest element of plain's result

A shape is sequences for each group of ranks that shares a model x tokens x d x heads x heads of
keys and values x features in the MLP. A mesh is written as data=2,model=8: the batch is sharded
over an axis data, and gradients are summed over it; the model is sharded over all others.
"""

import argparse
from collections.abc import Callable
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.compiled import compiling
from benchmarks.compiled.block import SUMMED, algorithms_of, block
from benchmarks.compiled.programs import BUILT_IN, DIRECTIONS, OURS, with_gradient
from benchmarks.measuring import options, side_by_side
from benchmarks.measuring.measure import Ready
from ringcoll import overlap
from ringcoll.commands.overlap import axes

#: Llama 3 8B.
COMPILED = "2x4096x4096x32x8x14336"
#: About a second on CPU devices.
MEASURED = "2x128x256x16x8x512"
#: The meshes; those with as many ranks as there are devices are measured.
MESHES = ("model=8", "data=2,model=8", "data=4,model=4", "data=8,model=8")
#: A larger error is a fault: sums of float32 in another order differ by about 1e-6.
TOLERANCE = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which programs, on which devices, and where to write the results."""
    parser.add_argument(
        "--mesh",
        type=_mesh,
        action="append",
        metavar="data=2,model=8",
        help=f"the mesh; may be repeated (default: those of {' '.join(MESHES)} that fit)",
    )
    directions = options.listed(*DIRECTIONS)
    parser.add_argument(
        "--direction",
        type=directions,
        default="both",
        metavar="LIST",
        help="names with commas between (both)",
    )
    known = (*BUILT_IN, *OURS, *SUMMED)
    side_by_side.add_arguments(parser, known, measured=MEASURED, compiled_as=COMPILED)


def _mesh(text: str) -> str:
    """Check the text of a mesh, and return it.

    Raises:
        argparse.ArgumentTypeError: it is not a mesh.
    """
    axes(text)
    return text


def run(args: argparse.Namespace) -> int:
    """Compile, or compare and time; return 1 if anything was refused or wrong."""
    if not args.topology:
        return _measure(args)
    todo = [
        {
            "topology": topology,
            "mesh": mesh,
            "direction": direction,
            "shape": shape,
            "algorithm": algorithm,
        }
        for topology, count in compiling.devices_of(args).items()
        for mesh in _meshes(args, count, topology)
        for direction in args.direction
        for shape in (args.shape or COMPILED).split(",")
        for algorithm in algorithms_of(axes(mesh), args.algorithm)
    ]
    return compiling.compile_all(args, todo, program_of)


def program_of(
    topology: str, mesh: str, direction: str, shape: str, algorithm: str
) -> tuple[Callable, tuple]:
    """The program that the flags of the command name, and its operands."""
    function, operands = block(shape, algorithm, overlap.mesh(topology, **axes(mesh)))
    return with_gradient(function) if direction == "both" else function, operands


def _meshes(args: argparse.Namespace, devices: int, of: str) -> list[str]:
    """The meshes that were asked for (or `MESHES`) that have this many ranks."""
    asked = args.mesh or MESHES
    fitting = [mesh for mesh in asked if prod(axes(mesh).values()) == devices]
    if not fitting:
        raise SystemExit(f"--mesh: none of {' '.join(asked)} is of the {devices} devices of {of}")
    return fitting


def _measure(args: argparse.Namespace) -> int:
    """Compare, time, report; return 1 if anything was wrong."""
    flat = options.mesh(args)
    algorithms = side_by_side.measured_here(args.algorithm)
    todo = [
        side_by_side.Task(
            {"mesh": mesh, "direction": direction, "shape": shape},
            algorithms_of(axes(mesh), algorithms),
            TOLERANCE,
            weight=DIRECTIONS.index(direction) + 1,
        )
        for shape in (args.shape or MEASURED).split(",")
        for mesh in _meshes(args, flat.size, "this machine; choose with -g")
        for direction in args.direction
    ]
    title = "A tensor-parallel block against the built-in collectives"
    return side_by_side.measure_all(args, flat, title, todo, partial(_ready, flat.devices))


def _ready(devices: np.ndarray, mesh: str, direction: str, shape: str, algorithm: str) -> Ready:
    sizes = axes(mesh)
    over = Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))
    function, (x, weights) = block(shape, algorithm, over, jnp.float32)
    function = with_gradient(function) if direction == "both" else function

    def deviation(of: jax.ShapeDtypeStruct) -> float:  # after every layer of order one, roughly
        return 1 if of is x else (x.shape[-1] / prod(of.shape)) ** 0.5

    return side_by_side.ready(function, (x, weights), deviation)
