"""A scan over fully sharded layers: ours against the built-in forms, forward and backward.

The layers are gated MLPs. Their float32 parameters are sharded over all devices, and gathered for
each layer. Without --topology the programs run in turn on the devices of this machine, in float32,
after their results were compared. With --topology they are compiled in bfloat16 for chips that you
need not have, and `ringcoll.overlap` computes their times.

  plain      lax.scan in shard_map over jax.checkpoint of a layer that gathers its parameters by
             jax.lax.all_gather; gradients are reduce-scattered by its transpose
  compiler   jit with shardings, the parameters of a layer constrained to be whole
  .../tuned  with the options of the compiler that were found to matter (compiled only)
  fused      ringcoll.layers.fsdp.scan_layers, its gathers by "auto", with fsdp.linear:
             gradients are reduce-scattered under the products that make them
  linear     fsdp.linear with kernels sharded by columns, in plain's scan: it multiplies while the
             kernel arrives; /regather gathers again for the gradient; /two_ended: by that algorithm
  others     scan_layers with an algorithm of ringcoll.all_gather and ringcoll.psum_scatter
  above      how far the total is above the longer of computing (plain's) and communicating
  built in   the fastest of plain and compiler, tuned or not
  error      the largest difference to plain, over the largest element of that result

A shape is layers x tokens on each device x features between layers x features inside one. For the
gradient a layer keeps its input, and nothing else or its products. Ratios are between programs that
keep the same.
"""

import argparse
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.compiled import compiling
from benchmarks.compiled.programs import BUILT_IN, with_gradient
from benchmarks.compiled.stack import OURS, POLICIES, StackShape, stack
from benchmarks.measuring import options, side_by_side
from benchmarks.measuring.measure import Ready
from ringcoll import overlap

#: Layers of Llama 3 8B.
COMPILED = "4x4096x4096x14336"
#: What CPU devices do in a second.
MEASURED = "4x256x256x512"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which programs, on what, and where to write what is found."""
    kept = options.listed(*POLICIES)
    parser.add_argument(
        "--kept", type=kept, default="all", metavar="LIST", help=", ".join(POLICIES)
    )
    known = (*BUILT_IN, *OURS)
    side_by_side.add_arguments(parser, known, measured=MEASURED, compiled_as=COMPILED)


def run(args: argparse.Namespace) -> int:
    """Compile, or compare and time; 1 if anything was refused or wrong."""
    if not args.topology:
        return _measure(args)
    todo = [
        {"topology": topology, "shape": shape, "kept": kept, "algorithm": algorithm}
        for topology in args.topology.split(",")
        for shape in (args.shape or COMPILED).split(",")
        for kept in args.kept
        for algorithm in args.algorithm
    ]
    return compiling.compile_all(args, todo, program_of)


def program_of(topology: str, shape: str, kept: str, algorithm: str) -> tuple[Callable, tuple]:
    """A program, as the flags of the command name it, and its operands."""
    function, operands = stack(shape, kept, algorithm, overlap.mesh(topology))
    return with_gradient(function), operands


def _measure(args: argparse.Namespace) -> int:
    """Compare, time, report; 1 if anything was wrong."""
    mesh = options.mesh(args)
    algorithms = side_by_side.measured_here(args.algorithm)
    todo = [
        side_by_side.Task({"shape": shape, "kept": kept}, algorithms, tolerance(shape, mesh.size))
        for shape in (args.shape or MEASURED).split(",")
        for kept in args.kept
    ]
    title = "A scan over fully sharded layers against the built-in collectives"
    return side_by_side.measure_all(args, mesh, title, todo, partial(_ready, mesh))


def tolerance(shape: str, ranks: int) -> float:
    """The allowed difference of results, over the largest element.

    In float32, a sum of k products of random signs has an error of some sqrt(k) roundings. A layer
    has two such sums in a row forward, and four backward, the last over all tokens.
    """
    of = StackShape.of(shape)
    longest = max(of.width, of.hidden, of.tokens * ranks)
    return 6 * of.layers * longest**0.5 * float(np.finfo(np.float32).eps)


def _ready(mesh: Mesh, shape: str, kept: str, algorithm: str) -> Ready:
    function, (x, weights) = stack(shape, kept, algorithm, mesh, jnp.float32)

    def deviation(of: jax.ShapeDtypeStruct) -> float:  # after every product of order one
        return 1 if of is x else of.shape[-2] ** -0.5

    return side_by_side.ready(with_gradient(function), (x, weights), deviation)
