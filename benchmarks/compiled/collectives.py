"""Compile collectives for TPUs that you need not have: ringcoll's and the built-in.

Each program is one collective. The time of the built-in is what `ringcoll.overlap` expects; the
time of ringcoll's comes from its messages on the links. Ranks are in the order of `ringcoll.mesh`.
The messages of `ring:int8` hold codes.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from benchmarks.collectives.cases import name_and_options
from benchmarks.compiled import compiling
from benchmarks.measuring import options
from ringcoll.commands.arguments import shape, size
from ringcoll.commands.overlap import mesh_on

COLLECTIVES: Mapping[str, Callable] = {
    "psum_scatter": partial(ringcoll.psum_scatter, tiled=True),
    "psum": ringcoll.psum,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the calls and the machines."""
    add = parser.add_argument
    what = "topologies with commas between (v5e:4x4)"
    add("--topology", default="v5e:4x4", metavar="LIST", help=what)
    add("--axes", default="16,4x4", metavar="LIST", help="the axes of the mesh (16,4x4)")
    add(
        "--collective",
        choices=COLLECTIVES,
        default="psum_scatter",
        help="the collective (psum_scatter)",
    )
    add("--bytes", default="1M,64M", metavar="LIST", help="bytes of one rank's operand (1M,64M)")
    known = "lax,bidirectional_ring,two_ended,torus"
    add("--algorithm", default=known, metavar="LIST", help=f"names with commas between ({known})")
    dtypes = options.listed("float32", "bfloat16")
    what = "dtypes with commas between (float32)"
    add("--dtype", type=dtypes, default="float32", metavar="LIST", help=what)
    compiling.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compile, and return the exit status: 1 if the compiler refused a program."""
    todo = compiling.every(
        topology=compiling.devices_of(args),
        axes=args.axes.split(","),
        collective=[args.collective],
        bytes=args.bytes.split(","),
        algorithm=args.algorithm.split(","),
        dtype=args.dtype,
    )
    return compiling.compile_all(args, todo, program_of)


def program_of(
    topology: str, axes: str, collective: str, bytes: str, algorithm: str, dtype: str
) -> tuple[Callable, tuple]:
    """The program that the flags of the command name, and its operand."""
    sizes = shape(axes)
    names = tuple("xyz"[: len(sizes)])
    mesh = mesh_on(topology, dict(zip(names, sizes, strict=True)))
    whole = P() if collective == "psum" else P(names)

    name, options = name_and_options(algorithm)

    def function(x: jax.Array) -> jax.Array:
        return COLLECTIVES[collective](x, names, algorithm=name, **options)

    rows = size(bytes) // jnp.dtype(dtype).itemsize // 1024 * prod(sizes)
    sharding = NamedSharding(mesh, P(names))
    operand = jax.ShapeDtypeStruct((rows, 1024), dtype, sharding=sharding)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(names), out_specs=whole, check_vma=False)
    return mapped, (operand,)
