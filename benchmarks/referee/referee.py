"""Run schedules message by message in SimGrid, and compare the seconds with their prices.

A network is one of these: a torus of v5p chips (16, 8x8, 4x4x4); grid:4x4, whose axes are lines;
tree:8x8, a fat tree of 8 switches with 8 ranks each; dragonfly:4x2x4x2, 4 groups of 2 chassis of 4
routers of 2 ranks, with as many links between two groups as a group has ranks (thin: instead of
dragonfly: has one link). Ranks on a tree or a dragonfly are priced on a switch. The exit status is
1 if a price is off by more than 1 % (for messages to neighbours on a torus) or 5 % (for others).
"""

import argparse
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from benchmarks.measuring import report
from benchmarks.referee import judge
from ringcoll.algorithms import COLLECTIVES, in_lax, names
from ringcoll.commands.arguments import collective, shape, sizes
from ringcoll.costs.counts import Price
from ringcoll.costs.machines import MACHINES
from ringcoll.costs.places import Place
from ringcoll.io.text import bytes_in_words, seconds_in_words
from ringcoll.schedules.schedule import SizeError

CHIP, PORT = "v5p", "gloo_infiniband"
NEAR, FAR = 0.01, 0.05
NETWORKS = "16,8x8,4x4x4,tree:8x8,dragonfly:4x2x4x2"


class NamedPlace(NamedTuple):
    """A place by its name in the command.

    `network` is a network of switches, as the simulator takes it; None is the place's own.
    """

    name: str
    place: Place
    network: Mapping[str, Any] | None = None


def named_place(text: str) -> NamedPlace:
    """Read a network: "8x8", "grid:4x4", "tree:8x8", "dragonfly:4x2x4x2", "thin:...".

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    kind, _, of = text.rpartition(":")
    sizes = shape(of)
    if not kind:
        return NamedPlace(text, Place(MACHINES[CHIP], sizes, network=sizes))
    if kind == "grid":
        lines = (False,) * len(sizes)
        return NamedPlace(text, Place(MACHINES[CHIP], sizes, network=sizes, closed=lines))
    flat = Place(MACHINES[PORT], (prod(sizes),))
    if kind == "tree" and len(sizes) == 2:
        return NamedPlace(text, flat, {"kind": "fat_tree", "sizes": sizes})
    if kind in ("dragonfly", "thin") and len(sizes) == 4:
        if sizes[2] < sizes[0]:  # SimGrid would read beyond its routers
            raise argparse.ArgumentTypeError(
                f"{text!r}: {sizes[0]} groups, of chassis of {sizes[2]} routers; each router of a "
                "chassis leads to one group, so give as many routers, or more"
            )
        links = prod(sizes[1:]) if kind == "dragonfly" else 1
        return NamedPlace(text, flat, {"kind": "dragonfly", "sizes": sizes, "links": links})
    raise argparse.ArgumentTypeError(
        f"{text!r} is no network; write 4x4, grid:4x4, tree:8x8 or dragonfly:4x2x4x2"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what runs, and where."""
    add = parser.add_argument
    known = ", ".join(COLLECTIVES)
    add("--collective", default="all_gather", type=_collective, metavar="NAME", help=known)
    what = "names with commas between (default: all)"
    add("--algorithm", default="all", metavar="LIST", help=what)
    add(
        "--network",
        default=NETWORKS,
        metavar="LIST",
        help=f"networks with commas between ({NETWORKS})",
    )
    what = "bytes of the full vector (1K,64M)"
    add("--bytes", type=sizes, default="1K,64M", metavar="LIST", help=what)


def _collective(text: str) -> str:
    """The name of a collective in lax.

    Raises:
        argparse.ArgumentTypeError: there is no collective of this name.
    """
    name = in_lax(collective(text))
    if name not in COLLECTIVES:
        raise argparse.ArgumentTypeError(f"no {text!r}; choose from {', '.join(COLLECTIVES)}")
    return name


def run(args: argparse.Namespace) -> int:
    """Print a table, and return the exit status."""
    known = names(args.collective)
    chosen = known if args.algorithm == "all" else args.algorithm.split(",")
    if wrong := [name for name in chosen if name not in known]:
        args.error(f"--algorithm {wrong[0]!r}: choose from {', '.join(known)} or all")
    try:
        places = [named_place(text) for text in args.network.split(",")]
        judge.python()
    except (argparse.ArgumentTypeError, judge.NoSimGrid) as error:
        args.error(str(error))
    table = report.table("network", "algorithm", "bytes", "price", "simgrid", "ratio", "", left=2)
    todo = [(one, name, n) for one in places for name in chosen for n in args.bytes]
    status = 0
    for one, name, nbytes in report.progress(todo, len(todo), "simulating", lambda of: str(of[1])):
        try:
            paid = one.place.price(args.collective, name)
            modelled = one.place.seconds(paid)(nbytes)
            run = judge.seconds(args.collective, name, one.place, nbytes, one.network)
        except SizeError:  # the algorithm has no schedule for these ranks
            continue
        except ValueError as error:
            args.error(f"{one.name}, {name}: {error}")
        ratio = run / modelled
        is_off = abs(ratio - 1) > (NEAR if _to_neighbours(paid) else FAR)
        status = max(status, is_off)
        cells = one.name, name, bytes_in_words(nbytes), *map(seconds_in_words, (modelled, run))
        table.add_row(*cells, f"{ratio:.3f}", "off" if is_off else "")
    report.show(f"{args.collective}, modelled", table)
    return status


def _to_neighbours(paid: Any) -> bool:
    """Whether every message on a torus passes one link."""
    return isinstance(paid, Price) and 0 < paid.hops == paid.rounds
