"""Compare the order of devices in `ringcoll.mesh` with that of `jax.make_mesh`.

With --hops it prints the longest hops of both, for all slices of up to 128 chips and all meshes of
one to three axes. Otherwise `ringcoll.all_gather_matmul` over model, of 8192 rows for each group of
ranks that shares a model, 8192 x 28672, is compiled for chips that you need not have, and
`ringcoll.overlap` computes its time.

  rings       devices as `ringcoll.mesh` orders them
  usual       as `jax.make_mesh` does or, where it has no answer, as they are listed
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from benchmarks.compiled import compiling
from benchmarks.measuring import options
from ringcoll.commands.overlap import axes, mesh_on
from ringcoll.placement.topology import devices

#: Slices, and a mesh of each whose last axis is tensor-parallel.
MESHES = {
    "v5e:4x8": "data=4,model=8",
    "v5p:4x4x4": "data=8,model=8",
    "v6e:8x16": "data=16,model=8",
}
ORDERS = ("usual", "rings")
_SQUARES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8")
#: All slices of up to 128 chips.
SLICES = {"v4": _CUBES, "v5e": _SQUARES, "v5p": _CUBES, "v6e": _SQUARES, "tpu7x": _CUBES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which programs, on which devices, and where to write the results."""
    parser.add_argument("--hops", action="store_true", help="print the longest hops, and no times")
    known = ",".join(MESHES)
    what = f"topologies with commas between ({known})"
    parser.add_argument("--topology", default=known, metavar="LIST", help=what)
    for name, values in (("order", ORDERS), ("algorithm", ("auto",))):
        listed, what = options.listed(*values), f"{', '.join(values)} (all)"
        parser.add_argument(f"--{name}", type=listed, default="all", metavar="LIST", help=what)
    compiling.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table of hops; or compile, and return 1 if the compiler refused a program."""
    if args.hops:
        print(*table_of_hops(), sep="\n")
        return 0
    todo = compiling.every(
        topology=compiling.devices_of(args),
        order=args.order,
        algorithm=args.algorithm,
    )
    return compiling.compile_all(args, todo, program_of)


def program_of(topology: str, order: str, algorithm: str) -> tuple[Callable, tuple]:
    """The program that the flags of the command name, and its operands."""
    sizes = axes(MESHES[topology])
    mesh = mesh_on(topology, sizes) if order == "rings" else usual(topology, sizes)

    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        return ringcoll.all_gather_matmul(x, w, "model", algorithm=algorithm)

    specs = P(("data", "model")), P(None, "model")
    shapes = (8192 * sizes["data"], 8192), (8192, 28672)
    operands = tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )
    mapped = jax.shard_map(matmul, mesh=mesh, in_specs=specs, out_specs=P("data", "model"))
    return mapped, operands


def usual(topology: str, sizes: dict[str, int]) -> Mesh:
    """The mesh of `jax.make_mesh`; if it has no answer, devices as they are listed."""
    found, types = devices(topology), (AxisType.Auto,) * len(sizes)
    shape, names = tuple(sizes.values()), tuple(sizes)
    try:
        return jax.make_mesh(shape, names, types, devices=found)
    except NotImplementedError:
        return Mesh(np.array(found).reshape(shape), names, axis_types=types)


def table_of_hops() -> Iterator[str]:
    """The table in Markdown: for each kind of chip, how many meshes have which longest hops."""
    heads = "", "meshes", "last axis in single hops", "all axes", "`make_mesh` has one"
    yield f"| {' | '.join(heads)} | longest hop shorter | equal | longer |"
    yield "| --- |" + " --- |" * 7
    for kind, slices in SLICES.items():
        counted = Counter[str]()
        for size in slices:
            found = devices(f"{kind}:{size}")
            for shape in shapes(len(found)):
                counted.update(_compared(found, shape))
        cells = ("meshes", "last", "all", "usual", "shorter", "equal", "longer")
        yield f"| {kind} | {' | '.join(str(counted[cell]) for cell in cells)} |"


def _compared(found: list, shape: tuple[int, ...]) -> Iterator[str]:
    """What holds of a mesh of this shape. Of two orders, the longest hop of any axis counts."""
    sizes: dict[str, Any] = dict(zip("abc", shape, strict=False))
    described = ringcoll.describe(ringcoll.mesh(devices=found, **sizes))
    ours = [axis.hops for axis in described.axes.values()]
    theirs = [axis.hops for axis in described.usual.values()]
    yield "meshes"
    if ours[-1] == 1:
        yield "last"
    if max(ours) == 1:
        yield "all"
    if theirs:
        yield "usual"
        more = max(ours) - max(theirs)
        yield "equal" if more == 0 else "longer" if more > 0 else "shorter"


def shapes(n: int) -> Iterator[tuple[int, ...]]:
    """The shapes of n devices with one to three axes, each of two or more."""
    sizes = [size for size in range(2, n + 1) if n % size == 0]
    for count in (1, 2, 3):
        yield from (shape for shape in product(sizes, repeat=count) if prod(shape) == n)
