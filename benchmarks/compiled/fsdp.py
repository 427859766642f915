"""Compare scans over fully sharded layers: ringcoll against the built-in, with gradients.

The layers are gated MLPs. Their float32 parameters are sharded over all devices, and gathered for
each layer. Programs are compiled in bfloat16 for chips that you need not have, and
`ringcoll.overlap` computes their times.

  plain      lax.scan in shard_map over jax.checkpoint of a layer that gathers its parameters by
             jax.lax.all_gather; gradients are reduce-scattered by its transpose
  compiler   jit with shardings; the parameters of a layer are constrained to be whole
  .../tuned  with the options "collective matmuls"
  .../sparse with the options "sparse cores"
  linear     ringcoll.layers.fsdp.linear with kernels sharded by columns, in plain's scan. On chips
             with sparse cores it is the built-in gather, then the product. On others it multiplies
             while the kernel arrives, and reduce-scatters gradients under the products that make
             them; so does /bidirectional_ring on all
  above      how far the total is above the longer of compute (plain's) and communication
  built in   the fastest of plain and compiler, with or without options

A shape is layers x tokens on each device x features between layers x features inside one. For the
gradient, a layer keeps its input; with --kept products it keeps its products too. Ratios are
between programs that keep the same.
"""

import argparse
from collections.abc import Callable

from benchmarks.compiled import compiling
from benchmarks.compiled.programs import BUILT_IN, COMPILER, PLAIN, SPARSE, with_gradient
from benchmarks.compiled.stack import OURS, POLICIES, stack
from benchmarks.measuring import options
from ringcoll.commands.overlap import mesh_on

#: Layers of Llama 3 8B.
SHAPE = "4x4096x4096x14336"
TOPOLOGIES = "v5e:4x2,v5e:4x4,v5p:2x2x2,v6e:4x2,tpu7x:2x2x1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which programs, on which devices, and where to write the results."""
    kept = options.listed(*POLICIES)
    parser.add_argument(
        "--kept", type=kept, default="all", metavar="LIST", help=", ".join(POLICIES)
    )
    known = (*BUILT_IN, *OURS, PLAIN + SPARSE, COMPILER + SPARSE, "linear" + SPARSE)
    compiling.add_programs(parser, topology=TOPOLOGIES, shape=SHAPE, algorithms=known)


def run(args: argparse.Namespace) -> int:
    """Compile, and return the exit status: 1 if the compiler refused a program."""
    todo = compiling.every(
        topology=compiling.devices_of(args),
        shape=args.shape,
        kept=args.kept,
        algorithm=args.algorithm,
    )
    return compiling.compile_all(args, todo, program_of)


def program_of(topology: str, shape: str, kept: str, algorithm: str) -> tuple[Callable, tuple]:
    """The program that the flags of the command name, and its operands."""
    function, operands = stack(shape, kept, algorithm, mesh_on(topology))
    return with_gradient(function), operands
