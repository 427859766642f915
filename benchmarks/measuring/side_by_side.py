"""Compare programs on this machine's devices with the plain form, then time them in turn."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.compiled import compiling
from benchmarks.compiled.programs import PLAIN, TUNED
from benchmarks.measuring import files, options, report
from benchmarks.measuring.measure import Ready, interleave, sharing
from benchmarks.measuring.row import Quartiles
from ringcoll.commands.arguments import in_a_line

#: Makes a program with its operands from keywords that name it; one of them is `algorithm`.
Make = Callable[..., Ready]


@dataclass(frozen=True)
class Task:
    """Programs to compare: plain, and others that differ from it only in the algorithm.

    Attributes:
        which: the keywords without the algorithm; they are the first columns of a table.
        algorithms: the algorithms besides plain.
        tolerance: a larger error is wrong.
        weight: the task's share of the time.
    """

    which: Mapping[str, str]
    algorithms: Sequence[str]
    tolerance: float
    weight: float = 1


@dataclass(frozen=True)
class Timed:
    """The measurements of one program.

    Attributes:
        error: the largest difference from plain, over the largest element of plain's result.
        over_plain: seconds over those of plain in the same round.
        temporaries: bytes; None if the compiler does not say.
    """

    which: dict[str, str]
    error: float
    tolerance: float
    seconds: Quartiles
    over_plain: Quartiles
    temporaries: int | None

    @property
    def wrong(self) -> bool:
        return self.error > self.tolerance


def add_arguments(
    parser: argparse.ArgumentParser, known: Sequence[str], *, measured: str, compiled_as: str
) -> None:
    """Declare the programs: compiled for --topology or, without it, compared and timed here.

    Args:
        parser: the parser of the command.
        known: the algorithms.
        measured: the shape that is timed.
        compiled_as: the shape that is compiled.
    """
    add = parser.add_argument
    add("--topology", metavar="LIST", help="compile for these, such as v5e:4x4,v5p:2x2x4")
    shapes = options.shapes(measured.count("x") + 1)
    add(
        "--shape",
        type=shapes,
        metavar="LIST",
        help=f"shapes with commas between ({measured}; compiled: {compiled_as})",
    )
    listed, names = options.listed(*known), ", ".join(known)
    add("--algorithm", type=listed, default="all", metavar="LIST", help=names)
    options.add_machine(parser, budget=120, rounds=30)
    compiling.add_arguments(parser)


def measured_here(names: Sequence[str]) -> list[str]:
    """The algorithms to time besides plain. Tuned ones have options for other chips."""
    return [name for name in names if name != PLAIN and not name.endswith(TUNED)]


def measure_all(
    args: argparse.Namespace, mesh: Mesh, title: str, todo: Sequence[Task], make: Make
) -> int:
    """Compare, time, report; return 1 if anything was wrong.

    Args:
        args: the arguments, with those of `options.add_machine`, and --json.
        mesh: all devices in use.
        title: the title of the table.
        todo: the programs to compare.
        make: makes a program, ready to run.
    """
    header = options.described(mesh)
    report.print_header(header)
    found: list[Timed] = []
    bar = report.progress(
        sharing(todo, args.budget, lambda task: task.weight),
        *(len(todo), "programs", lambda shared: " ".join(shared[0].which.values())),
    )
    with report.until_interrupted(args, found):
        for task, seconds in bar:
            if seconds:
                end = time.perf_counter() + seconds
                try:
                    found += _beside_plain(task, make, args.iters, end)
                except ValueError as error:  # the ranks do not divide the sizes
                    args.error(f"--shape {task.which['shape']}: {in_a_line(error)}")
            else:
                words = " ".join(task.which.values())
                report.console().print(f"no time within --budget for {words}")
    _print(title, found)
    rows = [{**row.pop("which"), **row} for row in map(asdict, found)]
    files.write_json(args, {"measured_on": header, "rows": rows})
    return 1 if any(one.wrong for one in found) else 0


def ready(function: Callable, shapes: Any, deviation: Callable[[Any], float]) -> Ready:
    """Compile a program, and make random operands for it.

    Args:
        function: a function of the operands.
        shapes: a `jax.ShapeDtypeStruct` with a sharding for each array.
        deviation: gives the standard deviation of an array's elements.
    """
    rng = np.random.default_rng(0)

    def drawn(of: Any) -> jax.Array:
        values = rng.standard_normal(of.shape, np.float32) * deviation(of)
        return jax.device_put(values.astype(of.dtype), of.sharding)

    return Ready.of(function, jax.tree.map(drawn, shapes))


def _beside_plain(task: Task, make: Make, rounds: int, end: float) -> list[Timed]:
    """Measure plain and the algorithms, side by side."""
    names = (PLAIN, *task.algorithms)
    ready_of = {name: make(**task.which, algorithm=name) for name in names}
    programs = {name: one.program for name, one in ready_of.items()}
    results = {name: jax.tree.leaves(program()) for name, program in programs.items()}
    times = interleave(programs, rounds, end)
    return [
        Timed(
            {**task.which, "algorithm": name},
            max(map(_error, results[name], results[PLAIN])),
            task.tolerance,
            Quartiles.of(times[name]),
            Quartiles.of(times[name] / times[PLAIN]),
            one.temporaries,
        )
        for name, one in ready_of.items()
    ]


def _error(mine: jax.Array, true: jax.Array) -> float:
    """The largest difference, over the largest element; infinite if that is not a number."""
    error = float(jnp.abs(mine - true).max() / jnp.abs(true).max())
    return error if np.isfinite(error) else np.inf


def _print(title: str, found: Sequence[Timed]) -> None:
    if not found:
        return
    heads = [f"{head}\n" for head in found[0].which]
    table = report.table(*heads, *report.BESIDE_PLAIN, "error\n", left=len(heads))
    for one in found:
        error, of_plain = f"{one.error:.0e}", one.which["algorithm"] == PLAIN
        table.add_row(
            *one.which.values(),
            *report.beside_plain(one.seconds, one.over_plain, one.temporaries, of_plain),
            f"[red]{error}[/red]" if one.wrong else error,
        )
    report.show(title, table)
