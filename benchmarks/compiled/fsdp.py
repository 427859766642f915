"""Compare scans over fully sharded layers: ringcoll against the built-in, with gradients.

The layers are gated MLPs. Their float32 parameters are sharded over all devices, and gathered for
each layer. Without --topology, the results of all programs are compared, and then the programs run
in turn on the devices of this machine, in float32. With --topology they are compiled in bfloat16
for chips that you need not have, and `ringcoll.overlap` computes their times.

  plain      lax.scan in shard_map over jax.checkpoint of a layer that gathers its parameters by
             jax.lax.all_gather; gradients are reduce-scattered by its transpose
  compiler   jit with shardings; the parameters of a layer are constrained to be whole
  .../tuned  with compiler options that change the program (compiled only)
  linear     ringcoll.layers.fsdp.linear with kernels sharded by columns, in plain's scan: it
             multiplies while the kernel arrives, and reduce-scatters gradients under the products
             that make them; /regather gathers again for the gradient; /two_ended: by that algorithm
  above      how far the total is above the longer of compute (plain's) and communication
  built in   the fastest of plain and compiler, tuned or not
  error      the largest difference from plain, over the largest element of plain's result

A shape is layers x tokens on each device x features between layers x features inside one. For the
gradient, a layer keeps its input; with --kept products it keeps its products too. Ratios are
between programs that keep the same.
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
#: About a second on CPU devices.
MEASURED = "4x256x256x512"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which programs, on which devices, and where to write the results."""
    kept = options.listed(*POLICIES)
    parser.add_argument(
        "--kept", type=kept, default="all", metavar="LIST", help=", ".join(POLICIES)
    )
    known = (*BUILT_IN, *OURS)
    side_by_side.add_arguments(parser, known, measured=MEASURED, compiled_as=COMPILED)


def run(args: argparse.Namespace) -> int:
    """Compile, or compare and time; return 1 if anything was refused or wrong."""
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
    """The program that the flags of the command name, and its operands."""
    function, operands = stack(shape, kept, algorithm, overlap.mesh(topology))
    return with_gradient(function), operands


def _measure(args: argparse.Namespace) -> int:
    """Compare, time, report; return 1 if anything was wrong."""
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

    In float32, a sum of k products of random signs has an error of about sqrt(k) roundings. A layer
    has two such sums in a row forward, and four backward; the last is over all tokens.
    """
    of = StackShape.of(shape)
    longest = max(of.width, of.hidden, of.tokens * ranks)
    return 6 * of.layers * longest**0.5 * float(np.finfo(np.float32).eps)


def _ready(mesh: Mesh, shape: str, kept: str, algorithm: str) -> Ready:
    function, (x, weights) = stack(shape, kept, algorithm, mesh, jnp.float32)

    def deviation(of: jax.ShapeDtypeStruct) -> float:  # after every product of order one
        return 1 if of is x else of.shape[-2] ** -0.5

    return side_by_side.ready(with_gradient(function), (x, weights), deviation)
