"""Seconds of a collective by SimGrid, message by message, to compare with its price."""

import itertools
import json
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ringcoll.costs.model import Model
from ringcoll.costs.places import Place
from ringcoll.costs.slices import along
from ringcoll.schedules.phases import Carries, Phase, phases
from ringcoll.schedules.registry import ScheduleLike, build

SIMULATOR = Path(__file__).with_name("simulator.py")
#: The Pythons of a distribution, which has SimGrid's module as a package.
PYTHONS = ("/usr/bin/python3", "python3")
#: How to get SimGrid.
CURE = "install it, as root: apt-get install -y python3-simgrid (Debian, Ubuntu)"


class NoSimGrid(RuntimeError):
    """No Python on this machine has SimGrid."""


@cache
def python() -> str:
    """The Python that has SimGrid's module.

    Raises:
        NoSimGrid: no Python has it.
    """
    for name in PYTHONS:
        try:
            found = subprocess.run([name, "-c", "import simgrid"], capture_output=True, check=False)
        except OSError:
            continue
        if not found.returncode:
            return name
    raise NoSimGrid(f"{' and '.join(PYTHONS)} have no module simgrid; {CURE}")


def seconds(
    collective: str,
    algorithm: ScheduleLike,
    place: Place,
    nbytes: float,
    network: Mapping[str, Any] | None = None,
) -> float:
    """The seconds of a collective at a place, by SimGrid.

    Args:
        collective, algorithm: as for `costs.price`.
        place: a torus or a grid, unless there is a `network`.
        nbytes: bytes of the full vector.
        network: a network of switches in place of its own, as the simulator describes it: its
            "kind" ("fat_tree", "dragonfly") and sizes.

    Raises:
        NoSimGrid: SimGrid is not installed.
        ValueError: the place is a switch; or SimGrid fails.
    """
    data = description(collective, algorithm, place, nbytes, network)
    command = [python(), str(SIMULATOR)]
    done = subprocess.run(
        command, input=json.dumps(data), text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise ValueError(f"SimGrid failed: {done.stderr.strip()[-500:]}")
    return float(done.stdout)


def description(
    collective: str,
    algorithm: ScheduleLike,
    place: Place,
    nbytes: float,
    network: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The description that the simulator reads: the network, and phases of rounds of moves."""
    model, run = place.device.model, phases(collective, build(collective, algorithm, place.shape))
    shard = nbytes / place.ranks
    return {
        "ranks": place.ranks,
        "network": {**(network or _network(place)), "hop": model.hop, "rate": 1 / model.beta},
        "addition": model.gamma,
        "phases": [
            {
                "shape": phase.schedule.shape,
                "adds": phase.carries in (Carries.SUMS, Carries.VECTORS),
                "rounds": _rounds(phase, shard, model),
            }
            for phase in run
        ],
    }


def _network(place: Place) -> dict[str, Any]:
    if place.network is None:
        raise ValueError(f"{place.name} ranks on a switch: give its network")
    if place.is_torus:
        return {"kind": "torus", "sizes": place.network}
    # A line is half of a ring: the way between two of its places is never round the other half.
    rings = place.closed or ()
    axes = list(zip(place.network, rings, strict=True))
    sizes = [n if is_ring else 2 * n for n, is_ring in axes]
    laid = itertools.product(*(along(n, is_ring) for n, is_ring in axes))
    return {"kind": "torus", "sizes": sizes, "places": [_number(at, sizes) for at in laid]}


def _number(at: Iterable[int], sizes: Iterable[int]) -> int:
    """The number of a chip, row by row."""
    number = 0
    for each, size in zip(at, sizes, strict=True):
        number = number * size + each
    return number


def _rounds(phase: Phase, shard: float, model: Model) -> list[tuple[int, list[Any]]]:
    """The rounds; equal rounds in a row are given once, with their number."""
    each = shard * phase.shards / phase.schedule.lanes
    rounds = (
        [(m.axis, m.shift, len(m.offsets) * each, model.alpha) for m in moves]
        for moves in phase.rounds
    )
    return [(_count(same), moves) for moves, same in itertools.groupby(rounds)]


def _count(some: Iterable[Any]) -> int:
    return sum(1 for _ in some)
