"""A ring written out against a ring as a loop: what `ringcoll.runtime.engine.UNROLL_UP_TO` decides.

It runs an all-reduce by a ring on n virtual CPU devices, in a separate process for every n:
seconds to compile it, the size of the program, and the time of a call. Written out, the first two
grow with n; as a loop they do not.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

from benchmarks.collectives.cases import CASES
from benchmarks.measuring import files, options, report
from benchmarks.measuring.measure import Point, interleave
from benchmarks.measuring.row import Quartiles
from ringcoll.commands.arguments import size
from ringcoll.runtime import engine

#: How `UNROLL_UP_TO` is set for either way.
WAYS = {"unrolled": 10**9, "looped": 0}
#: Calls are timed up to this many devices: beyond, the threads only wait for each other.
TIMED_UP_TO = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many ranks, how many bytes each."""
    add = parser.add_argument
    ranks = "8,16,24,32,48,64,128"
    add("--ranks", type=options.numbers, default=ranks, metavar="LIST", help=f"default {ranks}")
    add("--bytes", type=size, default="4K", metavar="SIZE", help="the size of a chunk (4K)")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """A process for every number of ranks, and a table."""
    found: list[dict[str, Any]] = []
    bar = report.progress(args.ranks, len(args.ranks), "compiling", lambda n: f"{n} ranks")
    with report.until_interrupted(args, found):
        for n in bar:
            found.append({"ranks": n, **_in_a_process(n, args.bytes)})
    columns = ["compile s", "instructions", "call us"]
    heads = [f"{column}\n{way}" for column in columns for way in WAYS]
    made = report.table("ranks\n", *heads)
    for one in found:
        cells = [one[way] for way in WAYS]
        calls = ["" if c["call"] is None else f"{c['call'] * 1e6:.1f}" for c in cells]
        made.add_row(
            str(one["ranks"]),
            *(f"{c['compile']:.2f}" for c in cells),
            *(str(c["instructions"]) for c in cells),
            *calls,
        )
    report.show(f"psum by a ring, {args.bytes} bytes a chunk, cpu, jax {jax.__version__}", made)
    report.console().print(
        f"UNROLL_UP_TO = {engine.UNROLL_UP_TO}: rings of up to {engine.UNROLL_UP_TO + 1} ranks are "
        "written out, longer ones are loops"
    )
    files.write_json(args, found)
    return 0


def _in_a_process(ranks: int, chunk: int) -> dict[str, Any]:
    root = Path(__file__).parents[2]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        "JAX_NUM_CPU_DEVICES": str(ranks),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "benchmarks.collectives.loop", str(chunk)]
    ran = subprocess.run(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        start_new_session=True,  # Ctrl-C is for this process, which then ends that one
    )
    return json.loads(ran.stdout)


def measured(chunk: int) -> dict[str, Any]:
    """Both ways on all the devices of this process, of whose number chunks are summed."""
    psum = next(case for case in CASES if case.name == "psum")
    mesh = options.mesh(argparse.Namespace(devices=None))
    point = Point(psum, np.float32, mesh.size * chunk, mesh)
    found: dict[str, Any] = {}
    programs = {}
    for way, loop_from in WAYS.items():
        with patch.object(engine, "UNROLL_UP_TO", loop_from):
            seconds, (compiled, *_) = zip(*(_compiled(point) for _ in range(3)), strict=True)
        found[way] = {
            "compile": float(np.median(seconds)),
            "instructions": compiled.as_text().count(" = "),
            "call": None,
        }
        programs[way] = lambda run=compiled: jax.block_until_ready(run(point.operand))
    if mesh.size <= TIMED_UP_TO:
        for program in programs.values():
            program()
        for way, times in interleave(programs, 30, time.perf_counter() + 5).items():
            found[way]["call"] = Quartiles.of(times).median
    return found


def _compiled(point: Point) -> tuple[float, Any]:
    """The seconds of tracing, lowering and compiling, and what came of it."""
    jax.clear_caches()
    start = time.perf_counter()
    compiled = point.jitted("ring").lower(point.operand).compile()
    return time.perf_counter() - start, compiled


if __name__ == "__main__":
    print(json.dumps(measured(int(sys.argv[1]))))
