"""The model against every published measurement: its error by machine, collective, size and ranks.

    python -m benchmarks measured
    python -m benchmarks measured --device h100,gb300
    python -m benchmarks measured --points
    python -m benchmarks measured --plot measured.svg

The model is `ringcoll.cost.predict`. Three judgements: of the model as it is; of models that were
fitted without what they are judged on (a source, or a number of ranks); and whether the model
knows which of two ways is the faster, where both were measured.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.machines import fit, points, wheel
from benchmarks.machines.points import Point
from benchmarks.measuring import report
from ringcoll import cost
from ringcoll.commands.arguments import PictureFile, writing
from ringcoll.commands.plot import PlotLine, plot
from ringcoll.costs.machines import MACHINES, Device
from ringcoll.io.text import bytes_in_words, seconds_in_words

MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    add("--device", metavar="LIST", help="only these machines")
    add("--points", action="store_true", help="a row for each measurement")
    where = "measured points, and the line of the model (svg, png)"
    add("--plot", type=PictureFile, metavar="FILE", help=where)


def run(args: argparse.Namespace) -> int:
    """Print; returns the exit status."""
    measured, notes = everything()
    if args.device:
        wanted = args.device.split(",")
        measured = [one for one in measured if one.device in wanted]
        if not measured:
            args.error(f"--device {args.device}: no measurement is of it")
    for note in notes:
        print(note)
    if args.points:
        table = report.table("device", "collective", "ranks", "hosts", "bytes", "us", "off by")
        for one in measured:
            table.add_row(*row(one))
        report.show("modelled against measured", table)
    for title, key in BY.items():
        table = report.table(
            title, "points", "median off", "from 1 MiB", "below", "modelled / measured"
        )
        for name, some in grouped(measured, key).items():
            table.add_row(str(name), str(len(some)), *errors(some))
        report.show(f"error by {title}", table)
    _show_held_out(measured)
    right, pairs = winners(measured)
    if pairs:
        print(f"the faster of a ring and the built-in: right in {right} of {pairs} pairs")
    if args.plot:
        with writing(args, "plot"):
            _plot(args.plot, measured)
    return 0


def _show_held_out(measured: Sequence[Point]) -> None:
    table = report.table("machine", "fitted without", "points", "median off", "from 1 MiB", "below")
    for (device, without), some in held_out(measured).items():
        pairs = [(one.bytes, off(one, fitted)) for one, fitted in some]
        large, small = ([o for b, o in pairs if (b >= MIB) == big] for big in (True, False))
        shown = (_median([o for _, o in pairs]), _median(large), _median(small))
        table.add_row(device, without, str(len(some)), *shown)
    report.show("judged on what was not fitted", table)


def held_out(measured: Sequence[Point]) -> dict[tuple[str, str], list[tuple[Point, Device]]]:
    """Points, each with its machine fitted without their source, or without their ranks.

    A source is left out of a machine that another source measured too, and a number of ranks
    where others of the same collective are left.
    """
    found: dict[tuple[str, str], list[tuple[Point, Device]]] = {}
    kinds: list[tuple[str, Callable[[Point], Any]]] = [
        ("source", lambda one: one.source),
        ("ranks", lambda one: one.ranks),
    ]
    for name, of_device in grouped(measured, lambda one: one.device).items():
        if MACHINES[name].ranks_a_host < 2:
            continue
        for kind, key in kinds:
            for value, judged in grouped(of_device, key).items():
                rest = [one for one in of_device if key(one) != value]
                fitted = fit.device(name, rest)
                known = [one for one in judged if _is_known(one, fitted)]
                if known:
                    found[name, f"{kind} {value}"] = [(one, fitted) for one in known]
    return found


def _is_known(one: Point, fitted: Device) -> bool:
    return bool(fitted.curves.get((one.collective, one.hosts > 1)))


def winners(measured: Sequence[Point]) -> tuple[int, int]:
    """Of the pairs of a ring of permutes and the built-in, measured on one machine: right, all.

    A ring of n ranks takes n-1 permutes of 1/n of the bytes; an all-reduce twice as many.
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
        by_ring = cost.predict(one.collective, one.bytes, one.ranks, one.device, "ring")
        pairs += 1
        right += (by_ring < modelled(one)) == (ring < one.seconds)
    return right, pairs


def _plot(path: str, measured: Sequence[Point]) -> None:
    """All-gathers and all-reduces of the most ranks of each machine on one host."""
    lines = []
    for name, some in grouped(measured, lambda one: (one.device, one.collective)).items():
        if name[1] not in ("all_gather", "psum"):
            continue
        most = max(one.ranks for one in some)
        chosen = sorted((one for one in some if one.ranks == most), key=lambda one: one.bytes)
        if len(chosen) < 4:
            continue
        sizes = [one.bytes for one in chosen]
        label = f"{name[0]} {name[1]}, {most} ranks"
        times = [one.seconds for one in chosen]
        lines.append(PlotLine(label, sizes, [modelled(one) for one in chosen], times))
    title = "measured (points) and modelled (lines)"
    plot(path, title, "bytes", lines, lambda size: bytes_in_words(round(size)))


def everything() -> tuple[list[Point], list[str]]:
    """The measurements that are compared, and what was left out, in words."""
    published, untimed = points.read()
    notes = [f"left out: {untimed} without a time"] if untimed else []
    try:
        inside = wheel.points()
        published = [one for one in published if not one.source.startswith("XLA:GPU")]
    except wheel.TableError as error:
        inside = []
        notes.append(f"without the table of GB200 and GB300: {error}")
    found = [*published, *inside]
    left = Counter(one.why_left_out for one in found if one.why_left_out)
    notes += [f"left out: {number}, {why}" for why, number in left.items()]
    return [one for one in found if not one.why_left_out], notes


def modelled(one: Point, device: Device | None = None) -> float:
    """The seconds by the model; by another device than the one that is known."""
    hosts = f"{one.hosts} hosts" if one.hosts > 1 else None
    if one.device in cost.DEVICES:
        hosts = "line" if "no wrap" in one.topology else None
    return cost.predict(one.collective, one.bytes, one.ranks, device or one.device, topology=hosts)


def off(one: Point, device: Device | None = None) -> float:
    """How far the model is off, as a part of what was measured."""
    return abs(modelled(one, device) / one.seconds - 1)


def row(one: Point) -> tuple[str, ...]:
    took = seconds_in_words(one.seconds)
    ratio = f"{modelled(one) / one.seconds:.2f}"
    size = bytes_in_words(round(one.bytes))
    return one.device, one.collective, str(one.ranks), str(one.hosts), size, took, ratio


def errors(some: Sequence[Point]) -> tuple[str, ...]:
    """Median errors: of all, from 1 MiB on, below; and the median ratio."""
    large = [one for one in some if one.bytes >= MIB]
    small = [one for one in some if one.bytes < MIB]
    ratio = median(modelled(one) / one.seconds for one in some)
    shown = (_median([off(one) for one in which]) for which in (some, large, small))
    return (*shown, f"{ratio:.3f}")


def _median(found: Sequence[float]) -> str:
    return f"{median(found):.1%}" if found else "-"


def grouped(some: Iterable[Point], key: Callable[[Point], Any]) -> dict[Any, list[Point]]:
    groups: dict[Any, list[Point]] = defaultdict(list)
    for one in some:
        groups[key(one)].append(one)
    return dict(sorted(groups.items()))


BY: dict[str, Callable[[Point], Any]] = {
    "machine": lambda one: one.device,
    "collective": lambda one: one.collective,
    "ranks": lambda one: one.ranks,
    "source": lambda one: one.source,
    "all": lambda one: "all",
}
