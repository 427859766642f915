"""Fit GPUs to published measurements, and write the fits into the files of machines.

    python -m benchmarks machines

The measurements are in `benchmarks/machines/points.csv`, and in two tables inside the installed
wheel of JAX's plugin for CUDA. A curve is fitted to each collective and number of ranks that was
measured at four sizes or more. A start and FLOP/s are fitted to the matmuls of each dtype. Other
rates (alpha, links, memory) are not changed.
"""

import argparse
from collections import defaultdict

from benchmarks.machines import wheel
from benchmarks.machines.points import PublishedPoint, merge, read
from ringcoll.costs import machines
from ringcoll.costs.fitting import ENOUGH, curve_of
from ringcoll.costs.model import Sample, fit
from ringcoll.io.files import write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""


def run(args: argparse.Namespace) -> int:
    """Fit, write, print, and return the exit status."""
    products = fit_matmuls(wheel.matmuls())
    for name, curves in fit_curves(everything()).items():
        path, of = machines.path_of(name), products.get(name, [])
        changed = {"matmuls": of} if of else {}
        write(path, machines.text_of(machines.contents(path) | changed | {"curves": curves}))
        errors = sorted(curve["error"] for curve in curves)
        print(f"{name}: {len(curves)} curves, median errors {errors[0]:.1%} to {errors[-1]:.1%}")
        for one in of:
            print(f"{name}: {one['points']} matmuls of {one['dtype']}, median {one['error']:.1%}")
    return 0


def everything() -> list[PublishedPoint]:
    """All measurements.

    Raises:
        wheel.TableError: the wheel is not installed.
    """
    return merge(read()[0], wheel.points())


def fit_curves(measured: list[PublishedPoint]) -> dict[str, list[dict]]:
    """The curves of each machine, in the form of its file."""
    groups: dict[tuple[str, str, bool, int, int], list[PublishedPoint]] = defaultdict(list)
    for one in measured:
        if machines.MACHINES[one.device].ranks_a_host > 1 and not one.why_left_out:
            groups[one.device, one.collective, one.hosts > 1, one.ranks, one.hosts].append(one)
    found: dict[str, list[dict]] = defaultdict(list)
    for (device, collective, _, ranks, hosts), some in sorted(groups.items()):
        if len({one.bytes for one in some}) < ENOUGH:
            continue
        sources = {f"{one.source}, {one.notes.split(';')[0]}" for one in some}
        points = [(one.bytes, one.seconds) for one in some]
        curve = curve_of(collective, ranks, hosts, points, "; ".join(sorted(sources)))
        found[device].append(curve)
    return found


def fit_matmuls(measured: list[wheel.Matmul]) -> dict[str, list[dict]]:
    """A start and FLOP/s for the matmuls of each machine and dtype, in the form of its file."""
    groups: dict[tuple[str, str], list[wheel.Matmul]] = defaultdict(list)
    for one in measured:
        groups[one.device, one.dtype].append(one)
    found: dict[str, list[dict]] = defaultdict(list)
    for (device, dtype), some in sorted(groups.items()):
        rate, error = fit(Sample(1, one.flops, 0, one.seconds) for one in some)
        found[device].append(
            {
                "dtype": dtype,
                "start_seconds": float(f"{rate.alpha:.4g}"),
                "flops_per_second": float(f"{1 / rate.beta:.4g}"),
                "points": len(some),
                "error": round(error, 4),
                "source": f"XLA's table of matmuls, {wheel.WHEEL} {wheel.version_of()}",
            }
        )
    return found
