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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from benchmarks import formulations, options, report
from benchmarks.counts import counts, show
from benchmarks.programs import BUILT_IN, FORMS, OURS, PLAIN, program, tuning, with_gradient
from ringcoll import overlap
from ringcoll.overlap.command import option

TOPOLOGIES = ("v5e:4x2", "v5p:2x2x2", "v6e:4x2", "tpu7x:2x2x1")
OPTION = "of the compiler; again for more"
SHAPES = ("8192x8192x28672", "4096x4096x14336", "2048x4096x4096")


@dataclass(frozen=True)
class Found:
    """What one program costs; times in microseconds, 0 where its text holds none."""

    topology: str
    form: str
    backward: bool
    shape: str
    algorithm: str
    total: float
    exposed: float
    communication: float
    temporaries: int | None
    program_bytes: int | None
    compile_seconds: float
    profiled: bool
    timed: bool
    counts: dict[str, tuple[int, int]]  # see `benchmarks.counts`

    @property
    def names(self) -> tuple[str, ...]:
        """Of which program: the first columns."""
        direction = "both" if self.backward else "forward"
        return self.topology, self.form, direction, self.shape, self.algorithm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which programs, and where to write what is found."""
    add, listed = parser.add_argument, options.listed
    add("--topology", default=",".join(TOPOLOGIES), metavar="LIST", help="such as v5e:4x2, h200:8")
    add("--form", type=listed(*FORMS), default="all", metavar="LIST", help=", ".join(FORMS))
    known = (*BUILT_IN, *OURS)
    add("--algorithm", type=listed(*known), default="all", metavar="LIST", help=", ".join(known))
    add(
        "--formulations",
        action="store_true",
        help="in place of ours, the same ring written in many ways, forward",
    )
    add("--shape", default=",".join(SHAPES), metavar="LIST", help="m x k x f")
    add("--direction", type=listed("forward", "both"), default="all", metavar="LIST")
    add("--profile", action="store_true", help="costs from the static profile (slow)")
    add("--option", type=option, action="append", default=[], metavar="NAME=VALUE", help=OPTION)
    add("-J", "--json", metavar="PATH", help="write what was found")
    add("--draw", metavar="DIR", help="write a timeline of every program, a PNG each")


def run(args: argparse.Namespace) -> int:
    """Compile every program, and print a table."""
    jax.config.update("jax_platforms", "cpu")  # nothing is run: ask for no accelerator
    if args.formulations:
        args.algorithm, args.direction = [*BUILT_IN, *formulations.NAMES], ["forward"]
        args.form = [form for form in args.form if form in formulations.FORMS]
    todo = [
        (topology, form, direction == "both", shape, algorithm)
        for topology in args.topology.split(",")
        for form in args.form
        for direction in args.direction
        for shape in args.shape.split(",")
        for algorithm in args.algorithm
    ]
    found, failed = [], []
    for one in report.progress(todo, len(todo), "compiling", lambda one: " ".join(map(str, one))):
        try:
            found.append(_found(*one, dict(args.option), args.profile, args.draw))
        except Exception as error:  # a compiler may refuse a program; the others still count
            failed.append(f"{one}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    timed, untimed = ([one for one in found if one.timed is what] for what in (True, False))
    if timed:
        _print(timed)
    if untimed:
        show(untimed)
    for line in failed:
        report.console().print(f"[red]failed[/red] {line}")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(one) for one in found], indent=1))
    return 1 if failed else 0


def _found(
    topology: str,
    form: str,
    backward: bool,
    shape: str,
    algorithm: str,
    compiler_options: dict[str, Any],
    profile: bool,
    draw: str | None,
) -> Found:
    mesh = overlap.mesh(topology)
    function, operands = program(form, shape, algorithm, mesh)
    function = with_gradient(function) if backward else function
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
        name = f"{form}-{'both' if backward else 'forward'}-{topology}-{shape}-{algorithm}"
        Path(draw).mkdir(parents=True, exist_ok=True)
        seen.draw(Path(draw) / f"{name.replace(':', '-').replace('/', '-')}.png")
    micro = 1e6
    return Found(
        topology,
        form,
        backward,
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
        counts(seen),
    )


def _print(found: list[Found]) -> None:
    heads = ["topology", "form", "direction", "shape", "algorithm"]
    figures = (
        "total\nus", "exposed\n%", "above\n%", "plain\nover it", "built in\nover it",
        "temp\nMiB", "program\nKiB", "compile\ns",
    )  # fmt: skip
    made = report.table(*heads, *figures)
    for one in found:
        same = [
            other
            for other in found
            if (other.topology, other.form, other.backward, other.shape)
            == (one.topology, one.form, one.backward, one.shape)
        ]
        total = {other.algorithm: other.total for other in same}
        plain = next((other for other in same if other.algorithm == PLAIN), None)
        least = max(plain.total - plain.exposed, one.communication) if plain else None
        built_in = [total[name] for name in BUILT_IN if name in total]
        over = [
            f"{plain.total / one.total:.2f}" if plain else "",
            f"{min(built_in) / one.total:.2f}" if built_in else "",
        ]
        made.add_row(
            *one.names,
            f"{one.total:.0f}",
            f"{100 * one.exposed / one.total:.1f}",
            f"{100 * (one.total / least - 1):.0f}" if least else "",
            *over,
            "" if one.temporaries is None else f"{one.temporaries / 2**20:.0f}",
            "" if one.program_bytes is None else f"{one.program_bytes / 2**10:.0f}",
            f"{one.compile_seconds:.1f}",
        )
    report.console().print(made)
