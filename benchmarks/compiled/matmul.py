"""Time collective matmuls on this machine: ringcoll against the built-in collective and `@`.

First all results are compared with NumPy's; sums of small integers are exact. Then all programs
run in turn. A ratio to plain compares times of the same round. Temporaries are the memory of one
rank besides operands and results, as the compiler counts it. A chunk is one rank's part of the
array that is sent (its shard of x or w, or its block of the result). The forms and their shapes, m
x k x f, are those of `python -m benchmarks overlap`, in float32.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.compiled.programs import (
    DIRECTIONS,
    FORMS,
    OURS,
    PLAIN,
    algorithms_of,
    program,
    with_gradient,
)
from benchmarks.measuring import files, options, report
from benchmarks.measuring.data import count_wrong, exact
from benchmarks.measuring.measure import Ready, interleave, sharing
from benchmarks.measuring.row import Quartiles
from ringcoll.commands.arguments import in_a_line

SHAPES = "256x512x512,1024x1024x1024"


@dataclass(frozen=True)
class Overlapped:
    """The measurements of one program.

    Attributes:
        over_plain: seconds over those of plain in the same round.
        temporaries: bytes; None if the compiler does not say.
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
    """Declare which programs, for how long, and where to write the results."""
    add, listed = parser.add_argument, options.listed
    add("--form", type=listed(*FORMS), default="all", metavar="LIST", help=", ".join(FORMS))
    known = ", ".join(OURS)
    add("--algorithm", type=listed(*OURS), default="all", metavar="LIST", help=known)
    add("--shape", type=options.shapes(3), default=SHAPES, metavar="LIST", help="m x k x f")
    add("--direction", type=listed(*DIRECTIONS), default="all", metavar="LIST")
    options.add_machine(parser, budget=120, rounds=30)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compare, time, report; return 1 if anything was wrong."""
    mesh = options.mesh(args)
    header = options.describe(mesh)
    report.print_header(header)
    todo = [
        (form, direction, shape)
        for shape in args.shape
        for form in args.form
        for direction in args.direction
    ]
    found: list[Overlapped] = []
    shares = sharing(todo, args.budget, lambda one: 1 + (one[1] == "both"))
    bar = report.progress(shares, len(todo), "matmuls", lambda shared: " ".join(shared[0]))
    with report.until_interrupted(args, found):
        for (form, direction, shape), seconds in bar:
            if not seconds:
                report.console().print(f"no time within --budget for {form} {direction} {shape}")
                continue
            try:
                found += _measured(args, mesh, form, direction, shape, seconds)
            except ValueError as error:  # the ranks do not divide the sizes
                args.error(f"--shape {shape}: {in_a_line(error)}")
    _print(found)
    files.write_json(args, {"measured_on": header, "rows": [asdict(one) for one in found]})
    return 1 if any(one.wrong for one in found) else 0


def _measured(
    args: argparse.Namespace, mesh: Mesh, form: str, direction: str, shape: str, seconds: float
) -> list[Overlapped]:
    """Measure plain and the algorithms, side by side."""
    end = time.perf_counter() + seconds
    names = [PLAIN, *algorithms_of(form, args.algorithm)]
    operands = _operands(form, shape)
    ready = {name: _ready(mesh, form, direction, shape, name, operands) for name in names}
    programs = {name: one.program for name, one in ready.items()}
    results = {name: jax.tree.leaves(program()) for name, program in programs.items()}
    travels = (*ready[PLAIN].operands, results[PLAIN][0])[FORMS[form].travels]
    x, w = operands
    y = x @ w
    truths = [y] if direction == "forward" else [y, np.sign(y) @ w.T, x.T @ np.sign(y)]
    times = interleave(programs, args.iters, end)
    return [
        Overlapped(
            form,
            direction,
            shape,
            name,
            sum(map(_wrong, results[name], truths)),
            Quartiles.of(times[name]),
            Quartiles.of(times[name] / times[PLAIN]),
            one.temporaries,
            travels.nbytes // mesh.size,
        )
        for name, one in ready.items()
    ]


def _ready(
    mesh: Mesh,
    form: str,
    direction: str,
    shape: str,
    algorithm: str,
    operands: Sequence[np.ndarray],
) -> Ready:
    function, shapes = program(form, shape, algorithm, mesh, jnp.float32)
    if direction == "both":  # the cotangent consists of small integers too
        function = with_gradient(function, jnp.sign)
    pairs = zip(operands, shapes, strict=True)
    return Ready.of(function, tuple(jax.device_put(whole, of.sharding) for whole, of in pairs))


def _operands(form: str, shape: str) -> list[np.ndarray]:
    """Integers from -1 to 1, whose sums are exact. (For 63 ranks, `exact` makes 0 to 2.)"""
    sizes = FORMS[form].shapes(*(int(size) for size in shape.split("x")))
    return [exact(size, np.int8, 127 // 2).astype(np.float32) - 1 for size in sizes]


def _wrong(result: jax.Array, truth: np.ndarray) -> int:
    """The number of wrong elements on all ranks. (+ 0: a zero may have either sign.)"""
    pairs = [(np.asarray(part.data), truth[part.index]) for part in result.addressable_shards]
    return sum(count_wrong(mine + 0, true + 0) for mine, true in pairs)


def _print(found: list[Overlapped]) -> None:
    heads = ("form\n", "direction\n", "shape\n", "algorithm\n")
    figures = ("time\nus", "±\n", "over\nplain", "±\n", "temp\nMiB", "temp\nchunks", "#wrong\n")
    table = report.table(*heads, *figures, left=4)
    for one in found:
        is_plain = one.algorithm == PLAIN
        table.add_row(
            *(one.form, one.direction, one.shape, one.algorithm),
            report.microseconds(one.seconds.median),
            f"{one.seconds.spread:.0%}",
            "" if is_plain else report.ratio(one.over_plain),
            "" if is_plain else f"{one.over_plain.spread:.0%}",
            "-" if one.temporaries is None else f"{one.temporaries / 2**20:.2f}",
            "-" if one.temporaries is None else f"{one.temporaries / one.chunk:.2f}",
            report.wrong_cell(one.wrong, "-"),
        )
    report.show("Collective matmuls against gather-then-multiply, multiply-then-scatter", table)
