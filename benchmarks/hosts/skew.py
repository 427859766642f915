"""Time an exchange of messages between two hosts if one of them starts later.

    python -m benchmarks cluster --hosts 2 --rate 500mbit skew

The clocks of both hosts must agree, as on one machine. A hop over gloo is a send, then a receive.
The first host announces that it is ready to receive, and waits. The later host finds the
announcement, and sends its whole message before its own announcement, on the same socket. So one
direction waits for the other, and the exchange takes twice as long. Both directions run at the same
time only if both hosts start within the time of an announcement.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.collectives.cases import CASES
from benchmarks.measuring import files, options, processes, report
from benchmarks.measuring.measure import Point
from benchmarks.measuring.row import Quartiles
from ringcoll.commands.arguments import size

#: Milliseconds by which the second host starts later.
DELAYS = (-5.0, -1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0, 5.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the size and the number of exchanges."""
    processes.add_arguments(parser)
    add = parser.add_argument
    add("--bytes", type=size, default="4M", metavar="SIZE", help="bytes in each direction (4M)")
    add("-n", "--iters", type=int, default=20, metavar="N", help="exchanges for each delay (20)")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Time exchanges, and print a row for each delay."""
    processes.start(args)
    if jax.process_count() != 2 or jax.device_count() != 2:
        raise SystemExit(
            f"{jax.process_count()} processes with {jax.device_count()} devices: a swap is "
            "between 2 with one device each"
        )
    mesh = options.mesh(argparse.Namespace(devices=None))
    header = options.described(mesh)
    report.print_header(header)
    hop = next(case for case in CASES if case.name == "ppermute")
    program = Point(hop, np.dtype(np.float32), args.bytes, mesh).program("hop")
    program()
    table = report.table("later by\nms", "time\nms", "±\n", "least\nms", "most\nms")
    found = {}
    for delay in DELAYS:
        times = np.array([_swapped(program, delay / 1e3) for _ in range(args.iters)])
        found[delay] = times.tolist()
        of = Quartiles.of(times)
        ends = (of.median, times.min(), times.max())
        median, least, most = (f"{t * 1e3:.1f}" for t in ends)
        table.add_row(f"{delay:g}", median, f"{of.spread:.0%}", least, most)
    report.show(
        f"a swap of {args.bytes} bytes, until both are done, from when both are there", table
    )
    if processes.leads():
        everything = {"measured_on": header, "bytes": args.bytes, "seconds": found}
        files.write_json(args, everything)
    return 0


def _swapped(program: Callable[[], Any], delay: float) -> float:
    """The seconds of an exchange, from the time when both have started until both are done."""
    processes.meet()
    both = processes.first_says(time.time() + 0.02) + abs(delay)
    late = (jax.process_index() == 1) == (delay > 0)
    while time.time() < both - (0 if late else abs(delay)):
        pass
    program()
    return processes.last_says(time.time() - both)
