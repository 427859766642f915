"""Fit the curves of GPUs to published measurements, and write them into the files of machines.

    python -m benchmarks machines

Measurements are those of `benchmarks/machines/points.csv`, and those of the table inside the
installed wheel of JAX's plugin for CUDA. A curve is fitted to each collective and number of ranks
that was measured at four sizes or more. Rates (alpha, links, memory) are kept as they are.
"""

import argparse
import json
from collections import defaultdict

from benchmarks.machines import points, wheel
from benchmarks.machines.points import Point
from ringcoll.costs.curves import fit_curve
from ringcoll.costs.machines import FOLDER, MACHINES, Device, device_of, text_of
from ringcoll.io.files import write

#: Fewer sizes do not tell a start from a rate.
ENOUGH = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""


def run(args: argparse.Namespace) -> int:
    """Fit, write, print; returns the exit status."""
    for name, curves in fitted(everything()).items():
        path = FOLDER / f"{name}.json"
        data = json.loads(path.read_text(encoding="utf-8")) | {"curves": curves}
        write(path, text_of(data))
        errors = sorted(curve["error"] for curve in curves)
        print(f"{name}: {len(curves)} curves, median errors {errors[0]:.1%} to {errors[-1]:.1%}")
    return 0


def everything() -> list[Point]:
    """All measurements: of the file, and of the wheel where it is installed; none twice.

    Raises:
        wheel.TableError: the wheel is not installed.
    """
    inside = wheel.points()
    published, _ = points.read()
    return [point for point in published if not point.source.startswith("XLA:GPU")] + inside


def device(name: str, measured: list[Point]) -> Device:
    """A machine with the curves of these measurements, in place of its own."""
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return device_of(data | {"curves": fitted(measured).get(name, [])})


def fitted(measured: list[Point]) -> dict[str, list[dict]]:
    """The curves of each machine, as its file holds them."""
    groups: dict[tuple[str, str, bool, int, int], list[Point]] = defaultdict(list)
    for one in measured:
        if MACHINES[one.device].ranks_a_host > 1 and not one.why_left_out:
            groups[one.device, one.collective, one.hosts > 1, one.ranks, one.hosts].append(one)
    found: dict[str, list[dict]] = defaultdict(list)
    for (device, collective, _, ranks, hosts), some in sorted(groups.items()):
        if len({one.bytes for one in some}) < ENOUGH:
            continue
        curve, error = fit_curve((one.bytes, one.seconds) for one in some)
        found[device].append(
            {
                "collective": collective,
                "ranks": ranks,
                "hosts": hosts,
                "points": len(some),
                "error": round(error, 4),
                "source": "; ".join(sorted({_source(one) for one in some})),
                "knots": [[round(size), float(f"{t:.4g}")] for size, t in curve.knots],
            }
        )
    return found


def _source(one: Point) -> str:
    return f"{one.source}, {one.notes.split(';')[0]}"
