"""Compare tensor-parallel transformer blocks: ringcoll against the built-in forms.

The block is RMSNorm, attention with grouped heads, RMSNorm, gated MLP; between them activations are
sharded by sequence. Programs are compiled in bfloat16 for chips that you need not have, and
`ringcoll.overlap` computes their times.

  plain      jax.lax in shard_map: one all_gather for query, key and value, one for gate and up,
             a psum_scatter after each half (Megatron's sequence parallelism)
  compiler   jit with shardings and no shard_map
  .../tuned  with compiler options that change the program
  others     ringcoll.layers.tensor_parallel with an algorithm of ringcoll.all_gather_matmul and
             ringcoll.matmul_reduce_scatter; /regather gathers again for the gradient
  auto+...   gradients are summed over data by an algorithm of ringcoll.psum, for each half of the
             block (others: by XLA's); /beside sums gradients of later weights under the attention
  above      how far the total is above the longer of compute (plain's) and communication
  built in   the fastest of plain and compiler, tuned or not

A shape is sequences for each group of ranks that shares a model x tokens x d x heads x heads of
keys and values x features in the MLP. A mesh is written as data=2,model=8: the batch is sharded
over an axis data, and gradients are summed over it; the model is sharded over all others.
"""

import argparse
from collections.abc import Callable, Sequence
from math import prod

from benchmarks.compiled import compiling
from benchmarks.compiled.block import SUMMED, algorithms_of, block
from benchmarks.compiled.programs import BUILT_IN, OURS, with_gradient
from ringcoll.commands.overlap import axes, mesh_on

#: Llama 3 8B.
SHAPE = "2x4096x4096x32x8x14336"
TOPOLOGIES = "v5e:4x2,v5e:4x4,v5p:2x2x4,v5e:8x8"
MESHES = ("model=8", "data=2,model=8", "data=4,model=4", "data=8,model=8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which programs, on which devices, and where to write the results."""
    parser.add_argument(
        "--mesh",
        type=_mesh,
        action="append",
        metavar="data=2,model=8",
        help=f"the mesh; may be repeated (default: those of {' '.join(MESHES)} that fit)",
    )
    known = (*BUILT_IN, *OURS, *SUMMED)
    compiling.add_programs(
        parser, topology=TOPOLOGIES, shape=SHAPE, algorithms=known, direction="both"
    )


def _mesh(text: str) -> str:
    """Check the text of a mesh, and return it.

    Raises:
        argparse.ArgumentTypeError: it is not a mesh.
    """
    axes(text)
    return text


def run(args: argparse.Namespace) -> int:
    """Compile, and return the exit status: 1 if the compiler refused a program."""
    todo = [
        which
        for topology, devices in compiling.devices_of(args).items()
        for mesh in _meshes(args.mesh or MESHES, devices, topology)
        for which in compiling.every(
            topology=[topology],
            mesh=[mesh],
            direction=args.direction,
            shape=args.shape,
            algorithm=algorithms_of(axes(mesh), args.algorithm),
        )
    ]
    return compiling.compile_all(args, todo, program_of)


def program_of(
    topology: str, mesh: str, direction: str, shape: str, algorithm: str
) -> tuple[Callable, tuple]:
    """The program that the flags of the command name, and its operands."""
    function, operands = block(shape, algorithm, mesh_on(topology, axes(mesh)))
    return with_gradient(function) if direction == "both" else function, operands


def _meshes(meshes: Sequence[str], devices: int, topology: str) -> list[str]:
    """Those of the meshes that have this many ranks."""
    fitting = [mesh for mesh in meshes if prod(axes(mesh).values()) == devices]
    if not fitting:
        raise SystemExit(
            f"--mesh: none of {' '.join(meshes)} is of the {devices} devices of {topology}"
        )
    return fitting
