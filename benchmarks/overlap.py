"""Collective matmuls as real compilers schedule them: ours against the built-in forms.

No TPU is needed: every program is compiled for the topology (libtpu, the extra tpu), and its
schedule is priced by `ringcoll.overlap`, whose model and assumptions are in its docstring. Of
GPUs (--topology h200:8, the extra gpu) the collectives with a matmul under them are counted.

  plain      the built-in collective, then the multiplication (or the other way about)
  compiler   jit with shardings and no shard_map: XLA's own collective matmul where it finds one
  .../tuned  with the options of the compiler that were found to matter
  1lane...   the ring written in another way: see `benchmarks.formulations`
  others     algorithms of ringcoll.all_gather_matmul and ringcoll.matmul_reduce_scatter;
             /regather gathers once more for the gradient, in place of keeping
  above      how far the total is above the longer of computing (plain's) and communicating
  built in   the quickest of plain and compiler, tuned or not
"""

import argparse
import json
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax

from benchmarks import formulations, options, report
from benchmarks.found import Found, hidden_of, print_counted, print_timed
from benchmarks.programs import (
    BUILT_IN,
    DIRECTIONS,
    FORMS,
    OURS,
    algorithms_of,
    program,
    tuning,
    with_gradient,
)
from ringcoll import overlap
from ringcoll.overlap.command import add_option

TOPOLOGIES = ("v5e:4x2", "v5p:2x2x2", "v6e:4x2", "tpu7x:2x2x1")
SHAPES = ("8192x8192x28672", "4096x4096x14336", "2048x4096x4096")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which programs, and where to write what is found."""
    add, listed = parser.add_argument, options.listed
    add("--topology", default=",".join(TOPOLOGIES), metavar="LIST", help="such as v5e:4x2, h200:8")
    add("--form", type=listed(*FORMS), default="all", metavar="LIST", help=", ".join(FORMS))
    known = (*BUILT_IN, *OURS)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--algorithm", type=listed(*known), default="all", metavar="LIST", help=", ".join(known)
    )
    which.add_argument(
        "--formulations",
        action="store_true",
        help="in place of ours, the same ring written in many ways, forward",
    )
    add("--shape", default=",".join(SHAPES), metavar="LIST", help="m x k x f")
    add("--direction", type=listed(*DIRECTIONS), default="all", metavar="LIST")
    add("--profile", action="store_true", help="costs from the static profile (slow)")
    add_option(parser)
    add("-J", "--json", metavar="PATH", help="write what was found")
    add("--draw", metavar="DIR", help="write a timeline of every program, a PNG each")


def run(args: argparse.Namespace) -> int:
    """Compile every program, and print a table."""
    jax.config.update("jax_platforms", "cpu")  # nothing is run: ask for no accelerator
    if args.formulations:
        args.algorithm, args.direction = [*BUILT_IN, *formulations.NAMES], ["forward"]
        args.form = [form for form in args.form if form in formulations.FORMS]
    todo = [
        (topology, form, direction, shape, algorithm)
        for topology in args.topology.split(",")
        for form in args.form
        for direction in args.direction
        for shape in args.shape.split(",")
        for algorithm in algorithms_of(form, args.algorithm)
    ]
    found, failed = [], []
    for one in report.progress(todo, len(todo), "compiling", lambda one: " ".join(map(str, one))):
        try:
            found.append(_found(*one, dict(args.option), args.profile, args.draw))
        except Exception as error:  # a compiler may refuse a program; the others still count
            failed.append(f"{one}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    if timed := [one for one in found if one.timed]:
        print_timed(timed)
    if counted := [one for one in found if not one.timed]:
        print_counted(counted)
    for line in failed:
        report.console().print(f"[red]failed[/red] {line}")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(one) for one in found], indent=1))
    return 1 if failed else 0


def _found(
    topology: str,
    form: str,
    direction: str,
    shape: str,
    algorithm: str,
    compiler_options: dict[str, Any],
    profile: bool,
    draw: str | None,
) -> Found:
    mesh = overlap.mesh(topology)
    function, operands = program(form, shape, algorithm, mesh)
    function = with_gradient(function) if direction == "both" else function
    compiling = partial(
        overlap.compile_for,
        topology,
        function,
        *operands,
        compiler_options={**tuning(topology, algorithm), **compiler_options},
    )
    start = time.perf_counter()
    compiled = compiling()
    seconds = time.perf_counter() - start
    if profile:
        compiled = compiling(profile=True)
    seen = overlap.report(compiled)
    if draw and seen.timed:
        name = f"{form}-{direction}-{topology}-{shape}-{algorithm}"
        Path(draw).mkdir(parents=True, exist_ok=True)
        seen.draw(Path(draw) / f"{name.replace(':', '-').replace('/', '-')}.png")
    micro = 1e6
    return Found(
        topology,
        form,
        direction,
        shape,
        algorithm,
        seen.total * micro,
        seen.exposed * micro,
        seen.communication * micro,
        seen.temporaries,
        seen.program_bytes,
        seconds,
        bool(compiled.profile),
        seen.timed,
        hidden_of(seen),
    )
