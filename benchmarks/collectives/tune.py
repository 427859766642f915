"""Measure this machine's table for algorithm="auto", and write it as JSON.

Every algorithm of every collective is tried at every size. The fastest few are checked, and timed
in turn with lax. If one of them is clearly faster than lax (by more than 5 % in three of four
rounds), the table gets a row. Without a row, "auto" is lax. Between two sizes the row changes at
their geometric mean. Sizes are counted as in the other tables. A row applies only to the ranks,
hosts and minor version of JAX that were measured.

Use the table with RINGCOLL_TABLE=PATH, or algorithm=ringcoll.Table.load(PATH).
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from itertools import groupby, pairwise
from math import isqrt
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.collectives.cases import CASES
from benchmarks.measuring import options, processes, report
from benchmarks.measuring.measure import Point, measure, platform_of, sharing
from benchmarks.measuring.row import Measurement
from ringcoll.algorithms import COLLECTIVES
from ringcoll.choose import table
from ringcoll.commands.arguments import File
from ringcoll.costs import price
from ringcoll.runtime.hosts import on_hosts
from ringcoll.schedules.registry import LAX

#: How many algorithms are timed in many rounds, after one call of each algorithm.
FEW = 3
#: From this many bytes, an algorithm is not tried if it sends more than twice as much as the best.
LARGE = 2**20
#: The choice at the previous size is kept if it takes at most this many times as long as the
#: fastest.
ALIKE = 1.05

#: pmax and pmin use the rows of psum.
_TUNED = [case for case in CASES if case.name in COLLECTIVES and case.redop in ("", "sum")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what to measure, for how long, and where to write it."""
    options.add_sizes(parser)
    options.add_datatypes(parser)
    options.add_machine(parser, budget=900)
    processes.add_arguments(parser)
    names = options.collectives(*(case.name for case in _TUNED))
    add = parser.add_argument
    add("--collective", type=names, default="all", metavar="LIST")
    add("--table", type=File, default="table.json", metavar="PATH", help="default: table.json")


def run(args: argparse.Namespace) -> int:
    """Measure, choose, write, and return the exit status: 1 if any result was wrong."""
    processes.start(args)
    mesh = options.mesh(args)
    header = options.describe(mesh)
    report.print_header(header)
    sizes = options.sizes(args)
    points = [
        (case, np.dtype(dtype), size)
        for size in sizes[1::2] + sizes[::2]  # a run that ends early has covered the whole range
        for case in _TUNED
        if case.name in args.collective
        for dtype in args.datatype
    ]
    rows_of: dict[report.Combination, list[Measurement]] = {}
    skipped = []
    shares = sharing(points, args.budget, report.weight)
    with report.until_interrupted(args, rows_of):
        for place, seconds in report.progress(shares, len(points), "tuning", report.point):
            if seconds:
                case, dtype, size = place
                point = Point(case, dtype, size, mesh)
                rows_of[place] = _measured(point, seconds, args.iters)
            else:
                skipped.append(place)
    chosen = _choices(rows_of)
    written = table.Table(
        tuple(table_rows(chosen, platform_of(mesh), **measured_bounds(mesh))),
        f"{header['devices']} x {header['device_kind']}, {header['cores']} cores at load "
        f"{header['load']}, jax {header['jax']}, {header['date']}"
        + (f", {header['processes']} processes" if header["processes"] > 1 else "")
        + (f", {len(rows_of)} of {len(points)} points" if args.interrupted else ""),
    )
    if processes.is_first():
        written.save(args.table)
        if table.Table.load(args.table) != written:
            raise AssertionError(f"{args.table} does not read back as it was written")
    report.print_bands("The choice", chosen)
    report.console().print(f"{len(written.rows)} rows in {args.table}")
    report.print_skipped(args.budget, points, skipped)
    return report.print_verdict(row for rows in rows_of.values() for row in rows)


def _choices(rows_of: Mapping[report.Combination, Sequence[Measurement]]) -> list[Measurement]:
    """The choices of `choose`, from small sizes to large for each collective and type."""
    chosen = []
    places = sorted(rows_of, key=lambda place: (_TUNED.index(place[0]), place[1].name, place[2]))
    for _, sizes in groupby(places, lambda place: place[:2]):
        before = LAX
        for place in sizes:
            chosen.append(choose(rows_of[place], before))
            before = chosen[-1].algorithm
    return chosen


def _measured(point: Point, seconds: float, rounds: int) -> list[Measurement]:
    """Time lax and the fastest few algorithms in turn."""
    end = time.perf_counter() + seconds
    tried = {name: _one_call(point, name) for name in _worth_trying(point)}
    few = nsmallest(FEW, tried, key=lambda name: tried[name])
    return measure(point, few, end - time.perf_counter(), rounds, checks=True)


def _worth_trying(point: Point) -> list[str]:
    """All algorithms; at large sizes, only those that do not send far too much."""
    names = point.case.algorithms(point.ranks)
    sends = {name: price(point.case.name, name, (point.ranks,)).link for name in names}
    least = min(sends.values())
    return [name for name in names if point.size < LARGE or sends[name] <= 2 * least]


def _one_call(point: Point, name: str) -> float:
    program = point.program(name)
    program()
    processes.meet()
    start = time.perf_counter()
    program()
    return processes.first_value(time.perf_counter() - start)


def choose(rows: Sequence[Measurement], before: str = LAX) -> Measurement:
    """The fastest of the algorithms that are clearly faster than lax; lax if there are none.

    Args:
        rows: the measurements of lax and of its rivals.
        before: the choice at the previous size; it is kept if it is about as fast.
    """
    faster = {
        row.algorithm: row.vs_lax.median
        for row in rows
        if row.algorithm != LAX and row.vs_lax and row.vs_lax.high < report.FASTER and not row.wrong
    }
    best = min(faster, key=lambda name: faster[name], default=LAX)
    if before in faster and faster[before] <= ALIKE * faster[best]:
        best = before
    return next(row for row in rows if row.algorithm == best)


def measured_bounds(mesh: Mesh) -> dict[str, tuple[Any, Any]]:
    """The bounds for rows measured on a mesh: its ranks, their hosts, this minor version of JAX."""
    hosts, local = on_hosts(mesh, mesh.axis_names)
    assert local is not None  # the devices of a mesh are known
    major, minor = jax.__version_info__[:2]
    return {
        "ranks": (mesh.size, mesh.size + 1),
        "hosts": (hosts, hosts + 1),
        "ranks_a_host": (local, local + 1),
        "jax": (f"{major}.{minor}", f"{major}.{minor + 1}"),
    }


def table_rows(
    chosen: Sequence[Measurement], platform: str, **within: tuple[Any, Any]
) -> list[table.TableRow]:
    """The rows of a table; neighbouring sizes with the same choice share a row.

    Args:
        chosen: the results of `choose`, from small sizes to large for each collective and type.
        platform: one of `ringcoll.choose.table.PLATFORMS`.
        within: bounds for all rows.
    """
    found = []
    for (collective, name), group in groupby(chosen, lambda row: (row.collective, row.type)):
        of_type = list(group)
        between = [isqrt(a.operand_bytes * b.operand_bytes) for a, b in pairwise(of_type)]
        bands = zip(of_type, pairwise([None, *between, None]), strict=True)
        for algorithm, same in groupby(bands, lambda band: band[0].algorithm):
            rows, bounds = zip(*same, strict=True)
            if algorithm == LAX:
                continue
            ratios = sorted({f"{row.vs_lax.median:.2f}" for row in rows})
            found.append(
                table.TableRow(
                    collective,
                    platform,
                    algorithm,
                    bytes=(bounds[0][0], bounds[-1][1]),
                    dtypes=(name,),
                    why=f"{' to '.join(dict.fromkeys((ratios[0], ratios[-1])))} of the time of lax",
                    **within,
                )
            )
    return found
