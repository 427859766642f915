"""Measure collectives between hosts: bytes on the links, and time over the least possible time.

Start it in a process on every host, or let `python -m benchmarks cluster` make the hosts.

  vs_lax    time over lax's, median of the rounds
  sent      bytes that the busiest link carries in one direction, as the interfaces count them
  of price  sent, over the bytes of the schedule
  of bound  time over the least time that the rate of the links allows
  of TCP    the same with the rate that plain sockets reached just before
  predicted time by a model (alpha and beta) that is fitted to this run

`ring@4x2` is the ring on 4 hosts of 2 ranks. It gathers between hosts first (and sums between
them last), so the fewest bytes cross the links. Each result is compared with NumPy's on every
rank. With --wire int8, forms whose messages hold codes (ring:int8) run in turn with the others.
With --order tree, so do forms that add by one tree for any number of ranks (lax:tree).

With --algorithm auto, the choice of "auto" runs in turn with lax and all other algorithms. The last
table has its time over that of lax, and over that of the best algorithm.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.collectives.cases import CASES, Case
from benchmarks.hosts import network
from benchmarks.hosts.links import LINKS, HostLinks, bits, in_bits
from benchmarks.measuring import files, options, processes, report
from benchmarks.measuring.measure import Point, measure, sharing
from benchmarks.measuring.model import fit_rows
from benchmarks.measuring.row import Measurement
from ringcoll.algorithms import COLLECTIVES
from ringcoll.io.text import bytes_in_words
from ringcoll.schedules.registry import LAX

_NAMES = ("all_gather", "psum_scatter", "psum", "all_to_all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what to measure, on which links, and where to write it."""
    options.add_sizes(parser, least="16M", most="16M")
    options.add_datatypes(parser)
    options.add_wire_and_order(parser)
    options.add_machine(parser, budget=300, rounds=10)
    processes.add_arguments(parser)
    add = parser.add_argument
    default = ",".join(_NAMES)
    names = options.collectives(*(case.name for case in CASES))
    what = f"names with commas between ({default})"
    add("--collective", type=names, default=default, metavar="LIST", help=what)
    what = "names, also as ring@4x2; auto; or all (default: the hand-written ones)"
    add("--algorithm", metavar="LIST", help=what)
    what = "the rate of a link in each direction, such as 1gbit (default: what TCP reaches)"
    add("--rate", type=bits, metavar="RATE", help=what)
    what = "star is a switch; ring is a cable to each neighbour (star)"
    add("--links", choices=LINKS, default="star", help=what)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, report, and return the exit status: 1 if anything was wrong."""
    processes.start(args)
    hosts = jax.process_count()
    if hosts == 1:
        raise SystemExit(
            "one process has no wire: give --coordinator, --num-processes and --process-id, or "
            "let `python -m benchmarks cluster` make hosts"
        )
    end = time.perf_counter() + args.budget
    mesh = options.mesh(args)
    local = mesh.size // hosts
    algorithms = choose_algorithms(args.collective, args.algorithm, hosts, local)
    header = options.describe(mesh)
    report.print_header(header)
    tcp, counts = network.tcp_rate()
    wire = HostLinks(hosts, local, args.links, args.rate or tcp, tcp, counts)
    report.console().print(
        f"{hosts} hosts of {wire.local} ranks, links: {wire.links}, {in_bits(wire.rate)} each way "
        f"({'as made' if args.rate else 'as measured'}); TCP from each host to the next, all at "
        f"once: {in_bits(tcp)}"
    )
    measured: list[Measurement] = []
    sent: list[np.ndarray] = []
    with report.until_interrupted(args, sent):
        _measure(args, mesh, algorithms, end, measured, sent)
    fitted, rows = fit_rows(measured, wire.paid)
    found = [wire.found(row, by_link) for row, by_link in zip(rows, sent, strict=True)]
    _print(rows, found)
    _print_auto(rows)
    report.print_models(fitted)
    if processes.is_first():
        everything = {
            "measured_on": header,
            "wire": asdict(wire),
            "rows": [
                {**asdict(row), **one, "by_link": by_link.tolist()}
                for row, one, by_link in zip(rows, found, sent, strict=True)
            ],
        }
        files.write_json(args, everything)
    return report.print_verdict(rows)


def _measure(
    args: argparse.Namespace,
    mesh: Mesh,
    algorithms: Mapping[str, Sequence[str]],
    end: float,
    rows: list[Measurement],
    sent: list[np.ndarray],
) -> None:
    """Measure; add to `rows`, and add to `sent` the bytes of a call on each host's interfaces."""
    points = [
        (case, np.dtype(name), size)
        for case in CASES
        if case.name in algorithms
        for name in args.datatype
        for size in options.sizes(args)
    ]
    shares = sharing(points, end - time.perf_counter(), lambda point: 2**20 + point[2])
    for (case, dtype, size), share in report.progress(shares, len(points), "wire", report.point):
        point = Point(case, dtype, size, mesh)
        names = case.with_options(algorithms[case.name], dtype, mesh.size, args.wire, args.order)
        some = measure(point, names, share, args.iters, checks=True)
        by_link = [network.sent_by(point.program(row.algorithm)) for row in some]
        rows += some
        sent += by_link


def choose_algorithms(
    collectives: Sequence[str], asked: str | None, hosts: int, local: int
) -> dict[str, list[str]]:
    """The algorithms of each collective that were asked for; by default the hand-written ones.

    Args:
        collectives: names of `CASES`.
        asked: names with commas between, or "all"; only "auto" is compared with all others.
        hosts, local: the number of hosts, and of ranks on each.

    Raises:
        SystemExit: no collective has one of the algorithms on this many ranks.
    """
    cases = [case for case in CASES if case.name in collectives]
    written = {case.name: _algorithms(case, hosts, local) for case in cases}
    if not asked:
        return written
    if asked == "auto":
        asked = "all"
    known = {case.name: [*written[case.name], *case.choices(hosts * local)] for case in cases}
    try:
        return options.algorithms(known)(asked)
    except argparse.ArgumentTypeError as error:
        raise SystemExit(f"--algorithm {asked}: {error}") from None


def _algorithms(case: Case, hosts: int, local: int) -> list[str]:
    """The hand-written algorithms, also in the form that gathers between hosts first."""
    names = list(case.algorithms(hosts * local))
    if local > 1 and case.name in COLLECTIVES:
        names += [f"{name}@{hosts}x{local}" for name in case.algorithms(hosts)]
    return names


def _print(rows: Sequence[Measurement], found: Sequence[Mapping[str, float | None]]) -> None:
    heads = ("time\nms", "±\n", "vs_lax\n", "±\n", "sent\nMB", "of\nprice", "of\nbound", "of\nTCP")
    pairs = zip(rows, found, strict=True)
    for collective, some in groupby(pairs, lambda pair: pair[0].collective):
        table = report.table(
            *("type\n", "size\n", "algorithm\n"), *heads, "predicted\nms", "#wrong\n", left=3
        )
        for _, point in groupby(some, lambda pair: (pair[0].type, pair[0].asked)):
            for row, one in point:
                table.add_row(*_cells(row, one))
            table.add_section()
        report.show(collective, table)


def _cells(row: Measurement, found: Mapping[str, float | None]) -> list[str]:
    if row.seconds is None or row.vs_lax is None:
        raise ValueError(f"not timed: {row}")
    compared = row.algorithm != LAX
    return [
        *(row.type, bytes_in_words(row.size), row.label),
        *(f"{row.seconds.median * 1e3:.4g}", f"{row.seconds.spread:.0%}"),
        *((report.ratio(row.vs_lax), f"{row.vs_lax.spread:.0%}") if compared else ("", "")),
        f"{sent / 1e6:.4g}" if (sent := found["sent"]) else "-",
        *("-" if of is None else f"{of:.2f}" for of in list(found.values())[1:]),
        "-" if row.predicted is None else f"{row.predicted * 1e3:.4g}",
        report.wrong_cell(row.wrong, "-"),
    ]


def _print_auto(rows: Sequence[Measurement]) -> None:
    """Print the choice of "auto" and the best algorithm, if others were measured."""
    heads = "type", "size", "auto", "over lax", "best", "over best"
    table, over_lax, over_best = report.table("collective", *heads, left=4), [1.0], [1.0]
    for _, some in groupby(rows, lambda row: (row.collective, row.type, row.asked)):
        times = {
            row.algorithm: (row.vs_lax.median, row) for row in some if row.vs_lax and not row.option
        }
        if "auto" not in times or len(times) < 3:
            continue
        ratio, auto = times["auto"]
        least, best = min(times.values(), key=lambda pair: pair[0])
        over_lax.append(ratio)
        over_best.append(ratio / least)
        table.add_row(
            *(auto.collective, auto.type, bytes_in_words(auto.size), auto.label),
            *(f"{ratio:.2f}", best.label, f"{ratio / least:.2f}"),
        )
    if table.rows:
        report.show("auto beside the best", table)
        report.console().print(
            f"auto over lax at most {max(over_lax):.2f}, over the best at most {max(over_best):.2f}"
        )
