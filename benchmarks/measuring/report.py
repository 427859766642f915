"""Show a run: a progress bar and tables."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import groupby
from math import ceil
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
from ringcoll.io.text import bytes_in_words
from ringcoll.schedules.registry import LAX

T = TypeVar("T")
Combination = tuple[Case, np.dtype, int]  # the collective, the dtype and the size

#: Below the first value of vs_lax an algorithm counts as faster, above the second as slower.
FASTER, SLOWER = 0.95, 1.05


def console(width: int = 250) -> Console:
    """Standard output, wide enough for all tables; only the first process prints."""
    return Console(width=width, highlight=False, quiet=not processes.is_first())


def print_text(text: str) -> None:
    """Print text, in lines of at most 100 columns."""
    console(100).print(text)


def progress(items: Iterable[T], total: int, title: str, name: Callable[[T], str]) -> Iterator[T]:
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
            bar.update(task, description=name(item))
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
    empty = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        empty.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    return empty


def show(title: str, rows: Table) -> None:
    """Print a table under a title."""
    console().print(f"[bold]{title}[/bold]")
    console().print(rows)


def print_header(header: Mapping[str, Any]) -> None:
    """Print the machine and the versions."""
    print_text(
        f"[bold]Measured[/bold] on {header['devices']} x {header['device_kind']} "
        f"({header['platform']}), {header['cores']} cores at load {header['load']}, "
        f"jax {header['jax']}, Python {header['python']}, {header['date']}"
        + (f", {header['processes']} processes" if header["processes"] > 1 else "")
    )


def print_checks(rows: Sequence[Measurement], programs: int) -> None:
    """Print how many of the programs were checked, and how many were wrong."""
    if rows:
        types = ", ".join(dict.fromkeys(row.type for row in rows))
        print_text(
            f"Checked {len(rows)} of {programs} programs on every rank (count {rows[0].count}, "
            f"{types}): {sum(bool(row.wrong) for row in rows)} wrong"
        )


def print_rows(rows: Sequence[Measurement]) -> None:
    """Print a table for every collective and type. Above it is what is the same in all its rows."""
    for (name, of_type), some in groupby(rows, lambda row: (row.collective, row.type)):
        group = list(some)
        same = [f"{group[0].ranks} ranks", f"busbw = {group[0].factor:.3g} x size / time"]
        columns = {
            "size": [bytes_in_words(row.size) for row in group],
            "#wrong": [wrong_cell(row.wrong, "not checked") for row in group],
        }
        once = [head for head, cells in columns.items() if len({*cells}) == 1]
        same += [f"{head} {columns.pop(head)[0]}" for head in once]
        heads = "time\nus", "±\n", "busbw\nGB/s", "over lax\n<1 faster", "±\n", "predicted\nus"
        results = table("algorithm\n", *(f"{head}\n" for head in columns), *heads)
        for i, row in enumerate(group):
            if i and row.size != group[i - 1].size:
                results.add_section()
            results.add_row(row.label, *(cells[i] for cells in columns.values()), *_times(row))
        op = f" ({group[0].redop})" if group[0].redop else ""
        print_text(f"[bold]{name}{op} of {of_type}[/bold]: {', '.join(same)}")
        console().print(results)


def _times(row: Measurement) -> list[str]:
    """The cells of what was timed."""
    if row.seconds is None or row.vs_lax is None:
        raise ValueError(f"only checked, not timed: {row}")
    cells = [microseconds(row.seconds.median), f"{row.seconds.spread:.0%}"]
    cells.append(f"{row.busbw(row.seconds.median) / 1e9:.3g}")
    compared = row.algorithm != LAX
    cells += [ratio(row.vs_lax), f"{row.vs_lax.spread:.0%}"] if compared else ["", ""]
    if row.predicted is None:
        return [*cells, "-"]
    off = row.predicted / row.seconds.median - 1
    return [*cells, f"{microseconds(row.predicted)} ({off:+4.0%})"]


def print_fastest(rows: Sequence[Measurement]) -> None:
    """Print the fastest hand-written algorithm at every size."""
    best = []
    for _, some in groupby(rows, lambda row: (row.collective, row.type, row.asked)):
        by_hand = [
            row
            for row in some
            if row.algorithm == row.resolved and row.resolved != LAX and not row.option
        ]
        best += sorted(by_hand, key=lambda row: row.vs_lax.median if row.vs_lax else 0)[:1]
    print_bands("The fastest hand-written algorithm", best)


def print_models(fitted: Mapping[str, Fitted]) -> None:
    """Print alpha, 1/beta and 1/gamma of every dtype, and the error of predictions."""
    for name, (model, error, count) in fitted.items():
        print_text(
            f"model of {name}: {microseconds(model.alpha)} us a message, {_rate(model.beta)} sent, "
            f"{_rate(model.gamma)} added; median error {error:.0%} of {count} rows"
        )


def print_skipped(
    budget: float,
    points: Sequence[Combination],
    skipped: Sequence[Combination],
    checked: int = 0,
    programs: int = 0,
) -> None:
    """Print in one line for what no time was left, and what helps.

    Args:
        budget: the seconds of --budget.
        points, skipped: all points, and those without time.
        checked, programs: how many programs were checked, of how many.
    """
    missing, times = [], 1.0  # what is missing, and how many times the budget suffices
    if checked < programs:
        missing.append(f"to check {programs - checked} of {programs} programs")
        times = programs / max(checked, 1)
    if skipped:
        sizes = [size for _, _, size in skipped]
        ends = dict.fromkeys(map(bytes_in_words, (min(sizes), max(sizes))))
        missing.append(f"to time {len(skipped)} of {len(points)} points ({' to '.join(ends)})")
        weights = sum(map(weight, points))
        times = max(times, weights / max(weights - sum(map(weight, skipped)), 1))
    if missing:
        names = dict.fromkeys(case.name for case, _, _ in points)
        fewer = f", or --collective {next(iter(names))}" if len(names) > 1 else ""
        longer = ceil(times * budget / 10) * 10
        print_text(f"No time left {' and '.join(missing)}: --budget {longer}{fewer}")


def weight(point: Combination) -> float:
    """About how long a point takes: at small sizes, compiling takes most of the time."""
    return 1 + point[2] / 2**22


def print_bands(title: str, rows: Sequence[Measurement]) -> None:
    """Print the algorithms by size: a line for neighbouring sizes with the same algorithm."""
    bands = table("collective\n", "type\n", "algorithm\n", "sizes\n", "over lax\n<1 faster", left=4)
    for place, some in groupby(rows, lambda row: (row.collective, row.type, row.algorithm)):
        ordered = list(some)
        sizes = dict.fromkeys(bytes_in_words(row.asked) for row in (ordered[0], ordered[-1]))
        ratios = sorted((row.vs_lax for row in ordered if row.vs_lax), key=lambda of: of.median)
        ends = dict.fromkeys(map(ratio, (ratios[0], ratios[-1])))
        bands.add_row(*place, " to ".join(sizes), " to ".join(ends))
    if rows:
        show(title, bands)


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
    """A ratio of two times: green if it is clearly faster, yellow if it is slower."""
    if of is None:
        return ""
    text = f"{of.median:.2f}"
    if of.high < FASTER:
        return f"[bold green]{text}[/bold green]"
    return f"[yellow]{text}[/yellow]" if of.low > SLOWER else text


def microseconds(seconds: float) -> str:
    """Seconds as microseconds."""
    return f"{seconds * 1e6:.1f}"


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte else "(no cost)"
