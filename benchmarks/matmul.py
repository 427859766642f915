"""Collective matmuls on the devices there are: ours against the built-in collective and `@`.

All results are compared first, bit by bit: of small integers every sum is exact. Then all
programs take turns, and a ratio to plain is taken within a round. Temporaries are what the
compiler says one rank holds beside its operands and results; a chunk is what one rank has of
what travels (its shard of x or w, its block of the result). The forms and their shapes,
m x k x f, are those of `python -m benchmarks overlap`; float32.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import options, report
from benchmarks.data import count_wrong, exact
from benchmarks.measure import Ready, interleave, sharing
from benchmarks.programs import (
    DIRECTIONS,
    FORMS,
    OURS,
    PLAIN,
    algorithms_of,
    program,
    with_gradient,
)
from benchmarks.row import Quartiles

SHAPES = ("256x512x512", "1024x1024x1024")


@dataclass(frozen=True)
class Found:
    """What one program took.

    Attributes:
        over_plain: seconds over those of plain, within a round.
        temporaries: bytes; None where the compiler does not say.
        chunk: bytes.
    """

    form: str
    direction: str
    shape: str
    algorithm: str
    wrong: int
    seconds: Quartiles
    over_plain: Quartiles
    temporaries: int | None
    chunk: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which programs, how long, and where to write what is found."""
    add, listed = parser.add_argument, options.listed
    add("--form", type=listed(*FORMS), default="all", metavar="LIST", help=", ".join(FORMS))
    known = ", ".join(OURS)
    add("--algorithm", type=listed(*OURS), default="all", metavar="LIST", help=known)
    add("--shape", default=",".join(SHAPES), metavar="LIST", help="m x k x f")
    add("--direction", type=listed(*DIRECTIONS), default="all", metavar="LIST")
    options.add_machine(parser, budget=120, rounds=30)
    add("-J", "--json", metavar="PATH", help="write what was found")


def run(args: argparse.Namespace) -> int:
    """Compare, time, report; 1 if anything was wrong."""
    mesh = options.mesh(args)
    header = options.described(mesh)
    report.print_header(header)
    todo = [
        (form, direction, shape)
        for shape in args.shape.split(",")
        for form in args.form
        for direction in args.direction
    ]
    found: list[Found] = []
    shares = sharing(todo, args.budget, lambda one: 1 + (one[1] == "both"))
    bar = report.progress(shares, len(todo), "matmuls", lambda shared: " ".join(shared[0]))
    for (form, direction, shape), seconds in bar:
        if not seconds:
            report.console().print(f"no time within --budget for {form} {direction} {shape}")
            continue
        found += _measured(mesh, form, direction, shape, args.algorithm, args.iters, seconds)
    _print(found)
    if args.json:
        everything = {"measured_on": header, "rows": [asdict(one) for one in found]}
        Path(args.json).write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    return 1 if any(one.wrong for one in found) else 0


def _measured(
    mesh: Mesh,
    form: str,
    direction: str,
    shape: str,
    algorithms: tuple[str, ...],
    rounds: int,
    seconds: float,
) -> list[Found]:
    """Plain and the algorithms, side by side."""
    end = time.perf_counter() + seconds
    names = [PLAIN, *algorithms_of(form, algorithms)]
    ready = {name: _ready(mesh, form, direction, shape, name) for name in names}
    programs = {name: one.program for name, one in ready.items()}
    results = {name: jax.tree.leaves(program()) for name, program in programs.items()}
    y = results[PLAIN][0]
    travels = (*ready[PLAIN].operands, y)[FORMS[form].travels]
    truths = [np.asarray(true) for true in results[PLAIN]]
    times = interleave(programs, rounds, end)
    return [
        Found(
            form,
            direction,
            shape,
            name,
            sum(
                count_wrong(np.asarray(mine), true)
                for mine, true in zip(results[name], truths, strict=True)
            ),
            Quartiles.of(times[name]),
            Quartiles.of(times[name] / times[PLAIN]),
            one.temporaries,
            travels.nbytes // mesh.size,
        )
        for name, one in ready.items()
    ]


def _ready(mesh: Mesh, form: str, direction: str, shape: str, algorithm: str) -> Ready:
    function, shapes = program(form, shape, algorithm, mesh, jnp.float32)
    if direction == "both":  # by a cotangent of small integers too
        function = with_gradient(function, jnp.sign)
    # Integers from -1 to 1, of which every sum is exact: for 63 ranks, `exact` goes from 0 to 2.
    operands = tuple(
        jax.device_put(exact(of.shape, np.int8, 127 // 2).astype(np.float32) - 1, of.sharding)
        for of in shapes
    )
    return Ready.of(function, operands)


def _print(found: list[Found]) -> None:
    heads = ("form\n", "direction\n", "shape\n", "algorithm\n")
    made = report.table(*heads, *report.BESIDE_PLAIN, "temp\nchunks", "#wrong\n", left=4)
    for one in found:
        of_plain = one.algorithm == PLAIN
        made.add_row(
            *(one.form, one.direction, one.shape, one.algorithm),
            *report.beside_plain(one.seconds, one.over_plain, one.temporaries, of_plain),
            "-" if one.temporaries is None else f"{one.temporaries / one.chunk:.2f}",
            report.wrong_cell(one.wrong, "-"),
        )
    report.show("Collective matmuls against gather-then-multiply, multiply-then-scatter", made)
