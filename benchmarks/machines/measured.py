"""Compare the model with every published measurement: errors by machine, collective, size, ranks.

    python -m benchmarks measured
    python -m benchmarks measured --device h100,gb300
    python -m benchmarks measured --write

The model is `ringcoll.costs.predict`. There are two comparisons: of the model with every
measurement, and of which of two measured ways is faster.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.machines import fit, points, wheel
from benchmarks.machines.points import PublishedPoint
from benchmarks.measuring import report
from ringcoll import costs
from ringcoll.costs.fitting import ENOUGH
from ringcoll.costs.prediction import seconds_of
from ringcoll.io.files import write
from ringcoll.io.text import bytes_in_words
from ringcoll.schedules.registry import LAX

MIB = 2**20
PAGE = Path(__file__).parents[1] / "pages" / "measured.md"
_BEGIN, _END = "<!-- measured -->", "<!-- end -->"
#: A matmul counts as large from this many FLOPs: those of 2048^3.
_LARGE = 2 * 2048**3
#: The ranges of sizes in a table: from each number to below the next.
_SIZES = (0, 2**14, 2**20, 2**24, 2**28)


class PageTable(NamedTuple):
    """A title, the names of columns, and rows of cells."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    add("--device", metavar="LIST", help="only these machines")
    add("--write", action="store_true", help=f"write the tables of {PAGE.name}")


def run(args: argparse.Namespace) -> int:
    """Print, and return the exit status."""
    measured, notes = everything()
    if args.device:
        wanted = args.device.split(",")
        measured = [one for one in measured if one.device in wanted]
        if not measured:
            args.error(f"--device {args.device}: no measurement is of it")
    for note in notes:
        print(note)
    for table in tables(measured):
        show(table)
    if args.write:
        write(PAGE, page_text(PAGE.read_text(encoding="utf-8"), tables(measured), notes))
    return 0


def show(table: PageTable) -> None:
    """Print a table."""
    shown = report.table(*table.columns)
    for cells in table.rows:
        shown.add_row(*cells)
    report.show(table.title, shown)


def tables(measured: Sequence[PublishedPoint]) -> list[PageTable]:
    """The tables of all comparisons."""
    names = ("points", "median off", "from 1 MiB", "below", "modelled / measured")
    found = [
        PageTable(
            f"error by {title}",
            (title, *names),
            [
                (str(name), str(len(some)), *errors(some))
                for name, some in group_by(measured, key).items()
            ],
        )
        for title, key in BY.items()
    ]
    right, pairs_of_two = winners(measured)
    if pairs_of_two:
        title = "the faster of a ring of permutes and the built-in, both measured"
        found.append(PageTable(title, ("pairs", "right"), [(str(pairs_of_two), str(right))]))
    rows = of_matmuls({one.device for one in measured})
    if rows:
        large = f"from {_LARGE / 1e9:.0f} GFLOP"
        columns = ("machine", "dtype", "points", "median off", large, f"{large}, fitted below")
        found.append(PageTable("matmuls: a start and FLOP/s", columns, rows))
    return found


def of_matmuls(devices: Iterable[str]) -> list[tuple[str, ...]]:
    """The errors of these machines' matmuls: all, large ones, and with a fit to small ones only."""
    try:
        measured = [one for one in wheel.matmuls() if one.device in devices]
    except wheel.TableError:
        return []
    found = []
    for device, dtype in sorted({(one.device, one.dtype) for one in measured}):
        every = [one for one in measured if (one.device, one.dtype) == (device, dtype)]
        large = [one for one in every if one.flops >= _LARGE]
        small = [one for one in every if one.flops < _LARGE]
        judged = ((every, every), (every, large), (small, large))
        errors = [f"{_matmul_error(fitted, some):.1%}" for fitted, some in judged]
        found.append((device, dtype, str(len(every)), *errors))
    return found


def _matmul_error(fitted: list[wheel.Matmul], judged: Sequence[wheel.Matmul]) -> float:
    """Fit to the matmuls `fitted`; return the median error on the matmuls `judged`."""
    ((rate,),) = fit.fit_matmuls(fitted).values()
    start, per_second = rate["start_seconds"], rate["flops_per_second"]
    return median(abs((start + one.flops / per_second) / one.seconds - 1) for one in judged)


def page_text(page: str, found: Sequence[PageTable], notes: Sequence[str]) -> str:
    """The text of a page, with these tables in place of those between its marks."""
    lines = [f"- {note}" for note in notes]
    for table in found:
        lines += ["", f"**{table.title[0].upper()}{table.title[1:]}**", ""]
        lines += [f"| {' | '.join(cells)} |" for cells in (table.columns, *table.rows)]
        lines.insert(len(lines) - len(table.rows), f"|{' --- |' * len(table.columns)}")
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    text = "\n".join(lines)
    return f"{before}{_BEGIN}\n{text}\n\n{_END}{after}"


def winners(measured: Sequence[PublishedPoint]) -> tuple[int, int]:
    """In how many cases the model predicts the faster of a ring of permutes and the built-in.

    It returns the number of right cases and of all cases: both were measured on one machine. A ring
    of n ranks takes n-1 permutes of 1/n of the bytes; an all-reduce twice as many.
    """
    permutes = {
        (one.device, one.ranks, one.bytes): one.seconds
        for one in measured
        if one.collective == "ppermute"
    }
    right = pairs = 0
    for one in measured:
        permute = permutes.get((one.device, one.ranks, one.bytes / one.ranks))
        if permute is None or one.collective not in ("all_gather", "psum_scatter", "psum"):
            continue
        ring = (one.ranks - 1) * permute * (1 + (one.collective == "psum"))
        by_ring = seconds_of(one.collective, costs.place_of(one.ranks, one.device), "ring")
        pairs += 1
        right += (by_ring(one.bytes) < model_seconds(one)) == (ring < one.seconds)
    return right, pairs


def everything() -> tuple[list[PublishedPoint], list[str]]:
    """The measurements to compare, and words about those that were left out."""
    published, untimed = points.read()
    notes = [f"left out: {untimed} without a time"] if untimed else []
    inside: list[PublishedPoint] = []
    try:
        inside = wheel.points()
    except wheel.TableError as error:
        notes.append(f"without the table of GB200 and GB300: {error}")
    found = points.merge(published, inside)
    left = Counter(why for one in found if (why := why_left_out(one)))
    notes += [f"left out: {number}, {why}" for why, number in left.items()]
    return [one for one in found if not why_left_out(one)], notes


def why_left_out(one: PublishedPoint) -> str:
    """Why there is no price to compare; "" if there is one."""
    if one.why_left_out:
        return one.why_left_out
    return "" if isfinite(model_seconds(one)) else f"with fewer than {ENOUGH} sizes, so no curve"


@cache
def model_seconds(one: PublishedPoint) -> float:
    """The seconds by the model, computed once for all tables; infinite if it has no curve."""
    is_tpu = one.device in costs.DEVICES
    hosts = one.hosts if one.hosts > 1 and not is_tpu else None
    place = costs.place_of(one.ranks, one.device, hosts=hosts)
    if is_tpu and "no wrap" in one.topology:
        place = replace(place, closed=(False,) * len(place.shape))
    return seconds_of(one.collective, place, LAX)(one.bytes)


def off(one: PublishedPoint) -> float:
    """How far the model is off, as a share of the measured time."""
    return abs(model_seconds(one) / one.seconds - 1)


def errors(some: Sequence[PublishedPoint]) -> tuple[str, ...]:
    """The median errors of all points, of those from 1 MiB, of those below; the median ratio."""
    ratio = median(model_seconds(one) / one.seconds for one in some)
    return (*_medians([(one.bytes, off(one)) for one in some]), f"{ratio:.3f}")


def _medians(errors: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    """The median errors of all, of those from 1 MiB, of those below; errors come with bytes."""
    large, small = ([e for size, e in errors if (size >= MIB) == big] for big in (True, False))
    every = [e for _, e in errors]
    return tuple(f"{median(some):.1%}" if some else "-" for some in (every, large, small))


def group_by(
    some: Iterable[PublishedPoint], key: Callable[[PublishedPoint], Any]
) -> dict[Any, list[PublishedPoint]]:
    groups: dict[Any, list[PublishedPoint]] = defaultdict(list)
    for one in some:
        groups[key(one)].append(one)
    return dict(sorted(groups.items()))


def _at_size(nbytes: float) -> str:
    """The range of sizes that contains `nbytes`, in words that sort by size."""
    least = max(i for i, size in enumerate(_SIZES) if size <= nbytes)
    return f"{least + 1}: from {bytes_in_words(_SIZES[least])}"


BY: dict[str, Callable[[PublishedPoint], Any]] = {
    "machine": lambda one: one.device,
    "collective": lambda one: one.collective,
    "ranks": lambda one: one.ranks,
    "size": lambda one: _at_size(one.bytes),
    "source": lambda one: one.source,
    "all": lambda one: "all",
}
