"""A grid of collective matmuls: each cell compares "auto", the plain form and the compiler's own.

Every program is compiled and priced as by `python -m benchmarks overlap`. The results go into a
file next to the page, and replace older results of the same programs. The page is written from the
whole file, so several runs can fill a grid.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from benchmarks.compiled import block_halves, compiling, program_cache, programs
from benchmarks.compiled.program_figures import Figures
from benchmarks.compiled.programs import COMPILER, DIRECTIONS, PLAIN, TUNED
from ringcoll.commands.overlap import mesh_on
from ringcoll.io.files import write

TOPOLOGIES = ("v5e:4x2", "v5p:2x2x2", "v6e:4x2", "tpu7x:2x2x1")
FORMS = {
    "all_gather_matmul": "All-gather of rows, matmul",
    "contraction_gather": "All-gather of the contraction, matmul",
    "weight_gather": "All-gather of w by rows (FSDP), matmul",
    "matmul_reduce_scatter": "Matmul, reduce-scatter",
    block_halves.MLP: "Gated MLP",
    block_halves.ATTENTION: "Projections of grouped-query attention",
}
ROWS = (512, 8192)
K = 8192
WIDTH = 28672
QUERIES = 8192  # features of all queries of attention
AUTO = "auto"
OTHERS = (PLAIN, COMPILER, COMPILER + TUNED)
#: Programs that are left out, because libtpu 0.0.52 aborts at them, and with it this process
#: ("split of a padded window dim is not supported"); as the arguments of `program`.
ABORTING = (("v5p:2x2x2", "attention", "both", "512x8192x8192", PLAIN),)
#: "auto" loses a cell if it is slower than the fastest other form by more than this share.
LOST = 0.03
PAGE = Path(__file__).parents[1] / "pages" / "grid.md"


class Cell(NamedTuple):
    """One matmul on one machine."""

    form: str
    direction: str
    topology: str
    rows: int

    def programs(self) -> list[dict[str, str]]:
        """Its programs, as the arguments of `program`."""
        width = QUERIES if self.form == block_halves.ATTENTION else WIDTH
        return compiling.every(
            topology=[self.topology],
            form=[self.form],
            direction=[self.direction],
            shape=[f"{self.rows}x{K}x{width}"],
            algorithm=(AUTO, *OTHERS),
        )


class Times(NamedTuple):
    """Microseconds in a cell; None if it was not compiled, or was refused."""

    auto: float | None
    plain: float | None
    compiler: float | None

    @property
    def above(self) -> float | None:
        """The share by which "auto" is slower than the fastest other form."""
        others = [time for time in (self.plain, self.compiler) if time is not None]
        return None if self.auto is None or not others else self.auto / min(others) - 1

    def __str__(self) -> str:
        if self.above is None:
            return ""
        cells = ("-" if time is None else f"{time:.0f}" for time in self)
        return " / ".join(cells) + (" **!**" if self.above > LOST else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --grid and --page; the other options choose the cells."""
    what = "compile a grid of shapes, and write its page instead of printing tables"
    parser.add_argument("--grid", action="store_true", help=what)
    what = f"the page of the grid; its figures are kept next to it, as JSON ({PAGE.name})"
    parser.add_argument("--page", type=Path, default=PAGE, metavar="PATH", help=what)


def cells(
    topologies: Sequence[str],
    forms: Sequence[str],
    directions: Sequence[str],
    shapes: Sequence[str],
) -> list[Cell]:
    """The cells of the grid; if shapes are given, only the cells of these."""
    every = [
        Cell(form, direction, topology, rows)
        for direction, form, topology in product(directions, forms, topologies)
        for rows in ROWS
    ]
    return [cell for cell in every if not shapes or cell.programs()[0]["shape"] in shapes]


def program(
    topology: str, form: str, direction: str, shape: str, algorithm: str
) -> tuple[Callable, tuple]:
    """A program of a cell, and its operands."""
    make = block_halves.half if form in block_halves.FORMS else programs.program
    function, operands = make(form, shape, algorithm, mesh_on(topology))
    return programs.with_gradient(function) if direction == "both" else function, operands


def run(args: argparse.Namespace) -> int:
    """Compile the cells that are asked for, write the page; return 1 if a program was refused."""
    topologies = args.topology.split(",") if args.topology else TOPOLOGIES
    asked = cells(topologies, args.form or tuple(FORMS), args.direction, args.shape or ())
    every = [one for cell in asked for one in cell.programs()]
    todo = [one for one in every if tuple(one.values()) not in ABORTING]
    found, failed = compiling.find_all(args, todo, program)
    data = args.page.with_suffix(".json")
    kept = json.loads(data.read_text(encoding="utf-8")) if data.exists() else []
    rows = merge(kept, found)
    write(data, "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    write(args.page, page(rows))
    print(summary(rows))
    return compiling.print_failed(failed)


def merge(kept: Sequence[Mapping], found: Sequence[Figures]) -> list[Mapping]:
    """The kept rows, with new figures in place of those of the same programs."""
    rows = {tuple(row["which"].items()): row for row in kept}
    for one in found:
        row = {"which": one.which, "total": round(one.total, 1), "exposed": round(one.exposed, 1)}
        rows[tuple(one.which.items())] = {**row, **program_cache.versions()}
    return [rows[key] for key in sorted(rows)]


def _times(rows: Sequence[Mapping]) -> dict[Cell, Times]:
    """The times of every cell of the grid."""
    totals = {tuple(row["which"].items()): row["total"] for row in rows}
    found = {}
    for cell in cells(TOPOLOGIES, tuple(FORMS), DIRECTIONS, shapes=()):
        auto, plain, *by_compiler = (totals.get(tuple(one.items())) for one in cell.programs())
        known = [time for time in by_compiler if time is not None]
        found[cell] = Times(auto, plain, min(known, default=None))
    return found


def page(rows: Sequence[Mapping]) -> str:
    """The page, in Markdown."""
    times = _times(rows)
    by = sorted({f"jax {row['jax']}, libtpu {row['libtpu']}" for row in rows})
    lines = [_HEAD.format(lost=f"{LOST:.0%}", summary=summary(rows), by="; ".join(by))]
    lines += gains(rows)
    for form, direction in product(FORMS, DIRECTIONS):
        some = {c: t for c, t in times.items() if (c.form, c.direction) == (form, direction)}
        if any(t.above is not None for t in some.values()):
            lines += _table(form, direction, some)
    return "\n".join(lines) + "\n"


def _table(form: str, direction: str, some: Mapping[Cell, Times]) -> list[str]:
    what = "forward" if direction == "forward" else "with both gradients"
    heads = " | ".join(map(str, ROWS))
    lines = [f"\n## {FORMS[form]}, {what}\n", f"| | {heads} |", "|---" * 3 + "|"]
    for topology in TOPOLOGIES:
        row = [some[Cell(form, direction, topology, rows)] for rows in ROWS]
        if any(t.above is not None for t in row):
            lines.append(f"| {topology} | " + " | ".join(map(str, row)) + " |")
    return lines


def summary(rows: Sequence[Mapping]) -> str:
    """How many cells there are, how many have been compiled, and in how many "auto" loses."""
    times = _times(rows)
    above = [each.above for each in times.values() if each.above is not None]
    lost = sum(share > LOST for share in above)
    return f"{len(above)} of {len(times)} cells have been compiled; auto loses {lost} of them."


def gains(rows: Sequence[Mapping]) -> list[str]:
    """A table: how many times as fast "auto" is, in all cells, by form and by machine."""
    times = _times(rows)
    lines = [
        '\nHow many times as fast `"auto"` is as plain, and as the quicker of plain and compiler:',
        f"geometric means. Cells within {LOST:.0%} are equal.\n",
        "| cells | as plain | as the quicker | faster, equal, slower |",
        "|---" * 4 + "|",
    ]
    groups = {"all": list(times)}
    groups |= {
        title: [cell for cell in times if cell.form == form] for form, title in FORMS.items()
    }
    groups |= {name: [cell for cell in times if cell.topology == name] for name in TOPOLOGIES}
    for title, group in groups.items():
        above = [share for cell in group if (share := times[cell].above) is not None]
        if not above:
            continue
        plain = [
            each.plain / each.auto for cell in group if (each := times[cell]).plain and each.auto
        ]
        slower = sum(share > LOST for share in above)
        faster = sum(1 / (1 + share) > 1 + LOST for share in above)
        means = [geometric_mean(plain or [1]), geometric_mean(1 / (1 + share) for share in above)]
        shown = " | ".join(f"{mean:.2f}" for mean in means)
        lines.append(f"| {title} | {shown} | {faster}, {len(above) - faster - slower}, {slower} |")
    return lines


_HEAD = """# "auto" in a grid of shapes

*Compiled*, not run: microseconds by `ringcoll.overlap`, with the compiler's estimates. Written
by `python -m benchmarks overlap --grid --cache results/compiled`. `--topology`, `--form`,
`--shape` and `--direction` choose fewer cells; programs in the `--cache` folder are not compiled
again. All is bf16 with k = 8192, on a mesh of one axis x of all devices; w has 28672 columns. A
cell is `"auto"` / plain / compiler. Plain is the built-in collective and the multiplication.
Compiler is `jit` + shardings, with or without XLA's options for collective matmuls, whichever is
quicker. **!** marks a cell in which `"auto"` takes more than {lost} longer than the quicker of the
other two; the compiler aborts at programs that are marked with "-".
Columns are rows of x (for FSDP, rows of x on eight devices). For attention, all queries have 8192
features in heads of 128, with 16 groups of keys and values; an addition replaces the attention.

{summary} By {by}."""
