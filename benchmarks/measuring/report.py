"""Show a run: a progress bar and tables."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.collectives.cases import TREE, Case
from benchmarks.measuring import processes
from benchmarks.measuring.model import Fitted
from benchmarks.measuring.row import Measurement, Quartiles
from ringcoll.collectives.table import BUILT_INS, LAX
from ringcoll.io.text import bytes_in_words

T = TypeVar("T")
Combination = tuple[Case, np.dtype, int]  # the collective, the dtype and the size

#: Below the first value of vs_lax an algorithm counts as faster, above the second as slower.
FASTER, SLOWER = 0.95, 1.05


def console() -> Console:
    """Standard output, wide enough for all tables; only the first process prints."""
    return Console(width=250, highlight=False, quiet=not processes.leads())


def progress(items: Iterable[T], total: int, title: str, say: Callable[[T], str]) -> Iterator[T]:
    """The items, with a live bar that shows the current one, if the output is a terminal."""
    columns = (
        TextColumn(f"[bold]{title}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    shown = Console()
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar:
        task = bar.add_task("", total=total)
        for item in items:
            bar.update(task, description=say(item))
            yield item
            bar.advance(task)


@contextmanager
def until_interrupted(args: argparse.Namespace, *found: Sized) -> Iterator[None]:
    """On Ctrl-C, continue with the results so far; if there are none, end the program.

    Args:
        args: `args.interrupted` is set, so that the exit status is that of Ctrl-C.
        found: lists that the block fills with results.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not any(found):
            raise
        args.interrupted = True


def point(shared: tuple[Combination, float]) -> str:
    """A point in words, without its share of the time."""
    (case, dtype, size), _ = shared
    return f"{case.name} {dtype.name} {bytes_in_words(size)}"


def table(*columns: str, left: int = 1) -> Table:
    """A table without vertical lines; the first columns are aligned left, the others right."""
    empty = Table(box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        empty.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    return empty


def show(title: str, rows: Table) -> None:
    """Print a table under a title."""
    console().print(f"[bold]{title}[/bold]")
    console().print(rows)


def print_header(header: Mapping[str, Any]) -> None:
    """Print the machine and the versions."""
    say = console().print
    say(
        f"[bold]Measured[/bold] on {header['devices']} x {header['device_kind']} "
        f"({header['platform']}), {header['cores']} cores at load {header['load']}, "
        f"jax {header['jax']}, Python {header['python']}, {header['date']}"
        + (f", {header['processes']} processes" if header["processes"] > 1 else "")
    )


def print_checks(rows: Sequence[Measurement]) -> None:
    """Print #wrong of every algorithm and collective, summed over dtypes."""
    if not rows:
        return
    collectives = list(dict.fromkeys(row.collective for row in rows))
    types = ", ".join(dict.fromkeys(row.type for row in rows))
    wrong: dict[tuple[str, str], int] = {}
    for row in rows:
        place = row.algorithm, row.collective
        wrong[place] = wrong.get(place, 0) + (row.wrong or 0)
    checks = table("algorithm", *collectives)
    for algorithm in dict.fromkeys(row.algorithm for row in rows):
        checks.add_row(algorithm, *(wrong_cell(wrong.get((algorithm, c)), "") for c in collectives))
    show(f"#wrong, count {rows[0].count}, {types}", checks)


def print_rows(rows: Sequence[Measurement]) -> None:
    """Print a table for every collective, like those of nccl-tests."""
    columns = ["size", "count", "type", "redop", "algorithm", "time", "±", "algbw", "busbw"]
    units = ["B", "", "", "", "", "us", "", "GB/s", "GB/s"]
    heads = [f"{name}\n{unit}" for name, unit in zip(columns, units, strict=True)]
    for collective, some in groupby(rows, lambda row: row.collective):
        results = table(*heads, "#wrong\n", "vs_lax\n", "±\n", "predicted\nus", left=0)
        for _, point in groupby(some, lambda row: (row.type, row.size)):
            for row in point:
                results.add_row(*_cells(row))
            results.add_section()
        show(collective, results)


def _cells(row: Measurement) -> list[str]:
    algorithm = row.algorithm if row.algorithm == row.resolved else f"auto: {row.resolved}"
    if row.seconds is None or row.vs_lax is None:
        raise ValueError(f"only checked, not timed: {row}")
    rates = [rate(row.seconds.median) / 1e9 for rate in (row.algbw, row.busbw)]
    cells = [str(row.size), str(row.count), row.type, row.redop or "-", algorithm]
    cells += [microseconds(row.seconds.median), f"{row.seconds.spread:.0%}"]
    cells += [*(f"{rate:.3g}" for rate in rates), wrong_cell(row.wrong, "-")]
    compared = row.algorithm != LAX
    cells += [ratio(row.vs_lax), f"{row.vs_lax.spread:.0%}"] if compared else ["", ""]
    if row.predicted is None:
        return [*cells, "-"]
    off = row.predicted / row.seconds.median - 1
    return [*cells, f"{microseconds(row.predicted)} ({off:+4.0%})"]


def print_summary(
    rows: Sequence[Measurement], fitted: Mapping[str, Fitted], skipped: Sequence[Combination]
) -> None:
    """Print the fastest hand-written algorithm at every size, the models, and skipped points."""
    best = []
    for _, some in groupby(rows, lambda row: (row.collective, row.type, row.asked)):
        by_hand = [
            row
            for row in some
            if row.algorithm == row.resolved
            and not row.resolved.endswith(BUILT_INS)
            and not row.option
        ]
        best += sorted(by_hand, key=lambda row: row.vs_lax.median if row.vs_lax else 0)[:1]
    print_matrix("The fastest hand-written algorithm, its time over lax's", best)
    print_models(fitted)
    print_skipped(skipped)


def print_models(fitted: Mapping[str, Fitted]) -> None:
    """Print alpha, beta and gamma of every dtype, and their error."""
    for name, (model, error, count) in fitted.items():
        console().print(
            f"model of {name}: alpha {microseconds(model.alpha)} us a message, "
            f"1/beta {_rate(model.beta)} sent, 1/gamma {_rate(model.gamma)} added; "
            f"median error {error:.0%} over {count} rows"
        )


def print_skipped(skipped: Sequence[Combination]) -> None:
    """Print the points for which no time was left, a line for each size."""
    for size, some in groupby(skipped, lambda place: place[2]):
        names = ", ".join(f"{case.name} {dtype.name}" for case, dtype, _ in some)
        console().print(f"no time within --budget at {bytes_in_words(size)} for {names}")


def print_matrix(title: str, rows: Sequence[Measurement]) -> None:
    """Print vs_lax and algorithm by size, a row for every collective and type."""
    sizes = sorted({row.asked for row in rows})
    matrix = table("collective", "type", *map(bytes_in_words, sizes), left=2)
    for place, some in groupby(rows, lambda row: (row.collective, row.type)):
        cells = {row.asked: f"{ratio(row.vs_lax)} {row.algorithm}" for row in some}
        matrix.add_row(*place, *(cells.get(size, "") for size in sizes))
    if rows:
        show(title, matrix)


def print_verdict(rows: Iterable[Measurement]) -> int:
    """Print what was wrong, and return the exit status."""
    rows = list(rows)
    bad = [row for row in rows if row.wrong]
    for row in bad:
        console().print(
            f"[bold red]wrong:[/bold red] {row.collective} {row.algorithm} {row.type} "
            f"count {row.count}: {row.wrong} elements"
        )
    checked = sum(row.wrong is not None for row in rows)
    if checked and not bad:
        bounded = ", or with a wire within its bound" * any(
            row.option not in ("", TREE) for row in rows
        )
        console().print(
            f"#wrong 0: all {checked} results are lax's and NumPy's, bit by bit{bounded}"
        )
    return 1 if bad else 0


def wrong_cell(count: int | None, missing: str) -> str:
    """A count, red if above 0; `missing` for None."""
    if count is None:
        return missing
    return f"[bold red]{count}[/bold red]" if count else "0"


def ratio(of: Quartiles | None) -> str:
    """One time over another: green if it is clearly faster, yellow if it is slower."""
    if of is None:
        return ""
    text = f"{of.median:.2f}"
    if of.high < FASTER:
        return f"[bold green]{text}[/bold green]"
    return f"[yellow]{text}[/yellow]" if of.low > SLOWER else text


#: The columns of `beside_plain`.
BESIDE_PLAIN = ("time\nus", "±\n", "over\nplain", "±\n", "temp\nMiB")


def beside_plain(
    seconds: Quartiles, over_plain: Quartiles, temporaries: int | None, is_plain: bool
) -> tuple[str, ...]:
    """The cells of a program's time, its ratio to plain, and its temporaries."""
    return (
        microseconds(seconds.median),
        f"{seconds.spread:.0%}",
        "" if is_plain else ratio(over_plain),
        "" if is_plain else f"{over_plain.spread:.0%}",
        "-" if temporaries is None else f"{temporaries / 2**20:.2f}",
    )


def microseconds(seconds: float) -> str:
    """Seconds as microseconds."""
    return f"{seconds * 1e6:.1f}"


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte else "(no cost)"
