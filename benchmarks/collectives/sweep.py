"""Check every collective by every algorithm, and then time it.

First all algorithms run on an odd number of elements. Then the best of them run at each size (-b to
-e). Each result is compared with NumPy's and lax's. Each algorithm is timed in turn with lax:

  size      bytes of a rank's operand or result, whichever is larger, as in nccl-tests
  count     elements of a block if the collective has blocks, otherwise of the vector
  time      microseconds of one jitted call, median; +- half the width of the middle half
  algbw     size over time; busbw: algbw, made comparable over n (nccl-tests' factors)
  #wrong    elements on all ranks that differ in any bit from NumPy's or lax's result; for an
            algorithm with a wire, such as ring:int8, those whose error is above the bound
  vs_lax    time over lax's, median of the rounds: below 1 is faster than lax
  predicted microseconds by a model fitted to this run (alpha per message + beta per byte sent +
            gamma per byte added), and how far that is from the time

With --order tree, forms that add by one tree for any number of ranks run too: lax:tree.
At small sizes, most of the time is the start of a program on all devices; lax has that time too.
"""

import argparse
import time
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from benchmarks.collectives.cases import CASES, Case
from benchmarks.measuring import files, options, processes, report
from benchmarks.measuring.measure import Point, check, measure, sharing
from benchmarks.measuring.model import fit_rows
from benchmarks.measuring.row import Measurement
from ringcoll.collectives.table import LAX

#: Elements of a block in the first comparison: odd, so that shares of lanes and ranks differ.
CHECK_COUNT = 1003

_NAMES = [case.name for case in CASES]
_OPS = sorted({case.redop for case in CASES if case.redop})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what to measure, for how long, and where to write it."""
    options.add_sizes(parser)
    options.add_datatypes(parser)
    options.add_wire_and_order(parser)
    options.add_machine(parser, budget=130)
    processes.add_arguments(parser)
    add = parser.add_argument
    add(
        "-w",
        "--warmup_iters",
        type=int,
        default=1,
        metavar="N",
        help="rounds that are not timed (1)",
    )
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="compare results (1)")
    names = options.listed
    add("-o", "--op", type=names(*_OPS), metavar="LIST", help=f"of {', '.join(_OPS)}, or all")
    of = options.collectives(*_NAMES)
    add("--collective", type=of, metavar="LIST", help=f"of {', '.join(_NAMES)}")
    algorithms = options.algorithms({case.name: case.choices(8) for case in CASES})
    add("--algorithm", type=algorithms, metavar="LIST", help="names, auto, or all")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check, time, report, and return the exit status: 1 if anything was wrong."""
    processes.start(args)
    end = time.perf_counter() + args.budget
    mesh = options.mesh(args)
    options.sizes(args)  # ends the program if there are no sizes
    header = options.described(mesh)
    report.print_header(header)
    dtypes = [np.dtype(name) for name in args.datatype]
    checks: list[Measurement] = []
    measured: list[Measurement] = []
    skipped: list[report.Combination] = []
    with report.until_interrupted(args, checks):
        if args.check:
            _check_all(args, mesh, dtypes, checks)
    report.print_checks(checks)
    if not args.interrupted:
        with report.until_interrupted(args, checks, measured):
            _time_all(args, mesh, dtypes, end - time.perf_counter(), measured, skipped)
    places = [(case.name, dtype.name) for case in CASES for dtype in dtypes]
    measured.sort(key=lambda row: (places.index((row.collective, row.type)), row.asked))
    fitted, rows = fit_rows(measured)
    report.print_rows(rows)
    report.print_summary(rows, fitted, skipped)
    if not processes.leads():
        return report.print_verdict([*checks, *rows])
    files.write_json(args, files.everything(header, checks, rows, fitted))
    return report.print_verdict([*checks, *rows])


def _cases(args: argparse.Namespace, ops: Sequence[str]) -> list[Case]:
    names = args.collective or _NAMES
    return [case for case in CASES if case.name in names and case.redop in ("", *ops)]


def _check_all(
    args: argparse.Namespace, mesh: Mesh, dtypes: Sequence[np.dtype], rows: list[Measurement]
) -> None:
    """Check every algorithm of every collective, on `CHECK_COUNT` elements."""
    points = [
        (case, dtype, case.size(CHECK_COUNT, dtype.itemsize, mesh.size))
        for case in _cases(args, args.op or _OPS)
        for dtype in dtypes
    ]
    shares = sharing(points, args.budget, lambda point: 1)
    for (case, dtype, size), _ in report.progress(shares, len(points), "checking", report.point):
        wanted = args.algorithm[case.name] if args.algorithm else case.choices(mesh.size)
        names = [name for name in case.choices(mesh.size) if name in wanted]
        names = case.with_options(names, dtype, mesh.size, args.wire, args.order)
        rows += check(Point(case, dtype, size, mesh), [LAX, *names])


def _time_all(
    args: argparse.Namespace,
    mesh: Mesh,
    dtypes: Sequence[np.dtype],
    seconds: float,
    rows: list[Measurement],
    skipped: list[report.Combination],
) -> None:
    """Time the chosen algorithms at all sizes; add points without time to `skipped`."""
    ops = args.op or (_OPS if args.collective else ("sum",))
    points = [
        (case, dtype, size)
        for size in options.sizes(args)
        for case in _cases(args, ops)
        for dtype in dtypes
    ]
    # At small sizes, compiling takes most of the time.
    shares = sharing(points, seconds, lambda point: 2 + point[2] / 2**23)
    for (case, dtype, size), share in report.progress(shares, len(points), "timing", report.point):
        if not share:
            skipped.append((case, dtype, size))
            continue
        point = Point(case, dtype, size, mesh)
        wanted = args.algorithm[case.name] if args.algorithm else case.timed(size)
        names = [name for name in case.choices(mesh.size) if name in wanted]
        names = case.with_options(names, dtype, mesh.size, args.wire, args.order)
        rows += measure(point, names, share, args.iters, args.warmup_iters, bool(args.check))
