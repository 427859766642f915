"""Check every collective by every algorithm, and then time it.

First all algorithms run on an odd number of elements. Then the best of them run at each size (-b to
-e). Each result is compared with NumPy's and lax's. Each algorithm is timed in turn with lax:

  size      bytes of a rank's operand or result, whichever is larger, as in nccl-tests
  time      microseconds of one jitted call, median; +- half the width of the middle half
  busbw     size over time, made comparable over n (nccl-tests' factors)
  over lax  time over lax's, median of the rounds: below 1 is faster than lax
  predicted microseconds by a model fitted to this run (alpha per message + beta per byte sent +
            gamma per byte added), and how far that is from the time
  #wrong    elements on all ranks that differ in any bit from NumPy's or lax's result; for an
            algorithm with a wire, such as ring:int8, those whose error is above the bound

With --order tree, forms that add by one tree for any number of ranks run too: lax:tree.
At small sizes, most of the time is the start of a program on all devices; lax has that time too.

--budget is the time for all of this; checks take at most half of it. What is running is not
stopped: the check of a program, or a collective at one size. At least one size of one collective is
timed. All numbers are in the file of --json. A picture is beside it: time over lax by size, with a
line for each algorithm, and predicted time by measured time.
"""

import argparse
import os
import time
from collections.abc import Sequence
from itertools import chain, zip_longest

import numpy as np
from jax.sharding import Mesh

from benchmarks.collectives.cases import CASES, Case
from benchmarks.measuring import files, options, picture, processes, report
from benchmarks.measuring.measure import Point, check, measure, sharing
from benchmarks.measuring.model import fit_rows
from benchmarks.measuring.row import Measurement
from benchmarks.measuring.verdict import verdict
from ringcoll.commands.arguments import File, check_files
from ringcoll.io.files import is_stream
from ringcoll.schedules.registry import LAX

#: Elements of a block in the first comparison: odd, so that shares of lanes and ranks differ.
CHECK_COUNT = 1003

#: Where numbers and picture go without --json; git ignores this folder.
RESULTS = File("results/benchmarks.json")

_NAMES = [case.name for case in CASES]
#: The collectives that are timed by default; all are checked.
_TIMED = ("all_gather", "psum_scatter", "psum", "all_to_all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what to measure, for how long, and where to write it."""
    options.add_sizes(parser, "4K", "16M", factor=8)
    options.add_datatypes(parser)
    options.add_wire_and_order(parser)
    options.add_machine(parser, budget=180)
    processes.add_arguments(parser)
    add = parser.add_argument
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="compare results (1)")
    collectives = options.collectives(*_NAMES)
    what = f"of {', '.join(_NAMES)}, or all (default: check all, time {', '.join(_TIMED)})"
    add("--collective", type=collectives, metavar="LIST", help=what)
    algorithms = options.algorithms({case.name: case.choices(8) for case in CASES})
    add("--algorithm", type=algorithms, metavar="LIST", help="names, auto, or all")
    options.add_json(parser, f"everything measured ({RESULTS})")


def run(args: argparse.Namespace) -> int:
    """Check, time, report, and return the exit status: 1 if anything was wrong."""
    processes.start(args)
    start = args.start
    mesh = options.mesh(args)
    points = _to_time(args)
    if not args.json and processes.is_first():
        args.json = RESULTS
        os.makedirs(os.path.dirname(RESULTS), exist_ok=True)
        check_files(args)
    header = options.describe(mesh)
    report.print_header(header)
    programs = _to_check(args, mesh) if args.check else []
    checks: list[Measurement] = []
    measured: list[Measurement] = []
    skipped: list[report.Combination] = []
    with report.until_interrupted(args, checks):
        _check_all(programs, start + args.budget / 2, checks)
    report.print_checks(checks, len(programs))
    if not args.interrupted:
        with report.until_interrupted(args, checks, measured):
            # A twentieth is for the report.
            left = start + 0.95 * args.budget - time.perf_counter()
            _time_all(args, mesh, points, max(left, 0.01), measured, skipped)
    measured.sort(key=lambda row: (_NAMES.index(row.collective), args.datatype.index(row.type)))
    fitted, rows = fit_rows(measured)
    report.print_rows(rows)
    report.print_fastest(rows)
    report.print_models(fitted)
    if not args.interrupted:
        report.print_skipped(args.budget, points, skipped, len(checks), len(programs))
    report.print_text(verdict(rows, header))
    status = report.print_verdict([*checks, *rows])
    if processes.is_first():
        files.write_json(args, files.everything(header, checks, rows, fitted))
        paths = [f"numbers: {args.json}"]
        if rows and not is_stream(args.json):
            drawn = args.json.removesuffix(".json") + ".svg"
            picture.draw(drawn, header, rows)
            paths.append(f"picture: {drawn}")
        spent = f"{time.perf_counter() - start:.0f} s of --budget {args.budget:g}"
        report.console().print(spent, *paths, sep="\n")
    return status


def _cases(args: argparse.Namespace, names: Sequence[str]) -> list[Case]:
    """The cases that were asked for, by default these."""
    return [case for case in CASES if case.name in (args.collective or names)]


def _algorithms(
    args: argparse.Namespace, case: Case, dtype: np.dtype, ranks: int, default: Sequence[str]
) -> list[str]:
    """The algorithms that were asked for, by default these, and their forms with options."""
    wanted = args.algorithm[case.name] if args.algorithm else default
    names = [name for name in case.choices(ranks) if name in wanted]
    return case.with_options(names, dtype, ranks, args.wire, args.order)


def _to_check(args: argparse.Namespace, mesh: Mesh) -> list[tuple[Point, str]]:
    """Every algorithm of every collective, on `CHECK_COUNT` elements.

    An algorithm of each collective is followed by the next of each, so that all collectives are
    checked even if time is short; the types follow one after the other.
    """
    programs: list[tuple[Point, str]] = []
    for dtype in map(np.dtype, args.datatype):
        by_case = []
        for case in _cases(args, _NAMES):
            point = Point(case, dtype, case.size(CHECK_COUNT, dtype.itemsize, mesh.size), mesh)
            names = _algorithms(args, case, dtype, mesh.size, case.choices(mesh.size))
            by_case.append([(point, name) for name in (LAX, *names)])
        programs += filter(None, chain.from_iterable(zip_longest(*by_case)))
    return programs


def _check_all(programs: Sequence[tuple[Point, str]], end: float, rows: list[Measurement]) -> None:
    """Check programs until the time `end`; add the results to `rows`."""

    def named(program: tuple[Point, str]) -> str:
        point, algorithm = program
        return f"{point.case.name} {point.dtype.name} {algorithm}"

    for point, name in report.progress(programs, len(programs), "checking", named):
        if processes.first_value(time.perf_counter() > end):
            return
        rows.append(check(point, name))


def _to_time(args: argparse.Namespace) -> list[report.Combination]:
    """The points, from small sizes to large."""
    return [
        (case, np.dtype(name), size)
        for size in options.sizes(args)
        for case in _cases(args, _TIMED)
        for name in args.datatype
    ]


def _time_all(
    args: argparse.Namespace,
    mesh: Mesh,
    points: Sequence[report.Combination],
    seconds: float,
    rows: list[Measurement],
    skipped: list[report.Combination],
) -> None:
    """Time the chosen algorithms at all points; add points without time to `skipped`."""
    shares = sharing(points, seconds, report.weight)
    for place, share in report.progress(shares, len(points), "timing", report.point):
        if not share:
            skipped.append(place)
            continue
        case, dtype, size = place
        names = _algorithms(args, case, dtype, mesh.size, case.timed(size))
        point = Point(case, dtype, size, mesh)
        rows += measure(point, names, share, args.iters, checks=bool(args.check))
