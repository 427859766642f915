"""Compare examples that put work of their own under messages with programs that wait for messages.

Programs are compiled for chips that you need not have, and `ringcoll.overlap` computes their times.

  mlp                8192 rows of 4096 bf16 features, a hidden layer of 16384: docs/gather.md
  nearest            `examples.nearest_neighbours`: the 16 nearest of 65536 points of 1024 bf16
                     features to each of 8192 queries
  muon               `examples.muon`: 32 matrices of 2048 x 8192, sent in bf16
  plain              waits for built-in collectives; nearest gathers all points first
  auto               the examples; /asynchronous with the option of the compiler that Muon asks for
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from benchmarks.compiled import compiling
from benchmarks.compiled.programs import ASYNCHRONOUS, PLAIN
from benchmarks.measuring import options
from examples.muon import muon
from examples.nearest_neighbours import nearest
from ringcoll.commands.overlap import mesh_on
from ringcoll.schedules.registry import LAX


def mlp(x: Array, w: Array, v: Array, axis: str) -> Array:
    """`x: [m/n, k], w: [k, f/n], v: [f/n, k] -> [m/n, k]`."""
    h = ringcoll.all_gather_map(lambda rows: jax.nn.relu(rows @ w), x, axis)
    return ringcoll.map_reduce_scatter(lambda rows: rows @ v, h, axis)


STACK = (32, 2048, 8192)
#: The function, the shardings of its operands and its result, the dtypes and the shapes.
RECIPES: dict[str, tuple[Callable[..., Any], tuple[Any, P], str, tuple[Any, ...]]] = {
    "mlp": (
        mlp,
        ((P("x"), P(None, "x"), P("x")), P("x")),
        "bfloat16 bfloat16 bfloat16",
        ((8192, 4096), (4096, 16384), (16384, 4096)),
    ),
    "nearest": (
        partial(nearest, k=16),
        ((P("x"),) * 2, P("x")),
        "bfloat16 bfloat16",
        ((8192, 1024), (65536, 1024)),
    ),
    "muon": (
        partial(muon, rate=0.02),
        ((P(None, "x"),) * 3, P(None, "x")),
        "float32 bfloat16 bfloat16",
        (STACK,) * 3,
    ),
}
ALGORITHMS = (PLAIN, "auto", "auto" + ASYNCHRONOUS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which programs, on which devices, and where to write the results."""
    add, topologies = parser.add_argument, "v5e:4x2,v6e:4x2"
    what = f"topologies with commas between ({topologies})"
    add("--topology", default=topologies, metavar="LIST", help=what)
    for name, known in (("recipe", tuple(RECIPES)), ("algorithm", ALGORITHMS)):
        listed, what = options.listed(*known), f"{', '.join(known)} (all)"
        add(f"--{name}", type=listed, default="all", metavar="LIST", help=what)
    compiling.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compile, and return the exit status: 1 if the compiler refused a program."""
    todo = compiling.every(
        topology=compiling.devices_of(args), recipe=args.recipe, algorithm=args.algorithm
    )
    return compiling.compile_all(args, todo, program_of)


def program_of(topology: str, recipe: str, algorithm: str) -> tuple[Callable, tuple]:
    """The program that the flags of the command name, and its operands."""
    function, (specs, out), dtypes, shapes = RECIPES[recipe]
    mesh = mesh_on(topology)

    def by_algorithm(*operands: Array) -> Any:
        with ringcoll.algorithm(LAX if algorithm == PLAIN else "auto"):
            return function(*operands, axis="x")

    mapped = jax.shard_map(by_algorithm, mesh=mesh, in_specs=specs, out_specs=out)
    kinds = zip(shapes, dtypes.split(), specs, strict=True)
    return mapped, tuple(
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in kinds
    )
