"""A psum of many leaves, joined or leaf by leaf: what `joining.JOIN_UP_TO` decides.

Joined leaves travel as one vector: fewer messages, and two more copies. Sizes are the bytes of
one leaf on one rank. All leaves are float32, the algorithm is the ring, and each leaf has a
separate call, as `jax.tree.map` makes it. The last columns are seconds to trace and compile.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives.cases import AXIS
from benchmarks.measuring import files, options, report
from benchmarks.measuring.data import exact
from benchmarks.measuring.measure import interleave, sharing
from benchmarks.measuring.row import Quartiles
from ringcoll import lax
from ringcoll.collectives.table import LAX
from ringcoll.runtime import joining

#: How `JOIN_UP_TO` is set for either way.
WAYS = {"joined": 10**12, "leaf by leaf": -1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many leaves of how many bytes."""
    options.add_sizes(parser, "256", "1M")
    options.add_machine(parser, budget=120)
    add, numbers = parser.add_argument, options.numbers
    add("-k", "--leaves", type=numbers, default="4,16", metavar="LIST", help="default 4,16")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Time both ways and lax in turn, having seen that their results are the same."""
    mesh = options.mesh(args)
    header = options.described(mesh)
    report.print_header(header)
    points = [(k, size) for k in args.leaves for size in sorted(options.sizes(args))]
    shares = sharing(points, args.budget, lambda point: 1 + point[0] / 8)
    made = report.table(
        *("leaves\n", "size\nB", "joined\nus", "leaf by leaf\nus", "lax\nus"),
        *("joined over\nleaf by leaf", "±\n"),
        *(f"{way}\ncompiled s" for way in (*WAYS, LAX)),
    )
    found: list[dict[str, Any]] = []
    bar = report.progress(shares, len(points), "joining", lambda s: "{} x {}".format(*s[0]))
    with report.until_interrupted(args, found):
        for (k, size), seconds in bar:
            if not seconds:
                break
            times, compiling = _times(mesh, k, size, args.iters, seconds)
            ratio = Quartiles.of(times["joined"] / times["leaf by leaf"])
            medians = {name: Quartiles.of(some).median for name, some in times.items()}
            row = {"leaves": k, "size": size, **medians, "ratio": ratio._asdict()}
            found.append({**row, "compile_seconds": compiling})
            cells = [f"{median * 1e6:.1f}" for median in medians.values()]
            cells += [f"{ratio.median:.2f}", f"{ratio.spread:.0%}"]
            made.add_row(str(k), str(size), *cells, *(f"{s:.2f}" for s in compiling.values()))
    report.show("psum by a ring", made)
    report.console().print(f"JOIN_UP_TO = {joining.JOIN_UP_TO}: leaves of up to so many bytes join")
    files.write_json(args, {"measured_on": header, "rows": found})
    return 0


def _times(
    mesh: Mesh, k: int, size: int, rounds: int, seconds: float
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Seconds of every round of both ways and of lax, whose results must be the same; and those
    to compile each.
    """
    end = time.perf_counter() + seconds
    sharding = NamedSharding(mesh, P(AXIS))
    data = exact((k, mesh.size * max(size // 4, 1)), np.float32, mesh.size)
    leaves = [jax.device_put(leaf, sharding) for leaf in data]
    compiled, compiling = {}, {}
    _compiled(mesh, leaves[:1], None)  # the first one takes longer
    for way, below in {**WAYS, LAX: None}.items():
        start = time.perf_counter()
        compiled[way] = _compiled(mesh, leaves, below)
        compiling[way] = time.perf_counter() - start
    results = [jax.tree.map(np.asarray, run(leaves)) for run in compiled.values()]
    for result in results[:-1]:
        jax.tree.map(np.testing.assert_array_equal, result, results[-1])
    programs = {
        name: lambda run=run: jax.block_until_ready(run(leaves)) for name, run in compiled.items()
    }
    return interleave(programs, rounds, end), compiling


def _compiled(mesh: Mesh, leaves: list[jax.Array], below: int | None) -> Callable[[Any], Any]:
    """By a ring with `JOIN_UP_TO` so set, or by lax."""

    def one(leaf: jax.Array) -> jax.Array:
        if below is None:
            return jax.lax.psum(leaf, AXIS)
        return lax.psum(leaf, AXIS, algorithm="ring")

    spec, each = P(AXIS), partial(jax.tree.map, one)
    mapped = jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with patch.object(joining, "JOIN_UP_TO", below or 0):
        return jax.jit(mapped).lower(leaves).compile()
