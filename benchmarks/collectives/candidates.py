"""Model how much faster than the built-in ringcoll would be on a TPU or GPU. Nothing runs.

A gain is only a candidate for a row of the table behind `algorithm="auto"`:
`benchmarks/pages/measured.md` says why. The ranks are the axes of a slice, or GPUs on one host.
"""

import argparse
from collections.abc import Sequence

from benchmarks.measuring import report
from ringcoll import costs
from ringcoll.algorithms import names
from ringcoll.collectives.table import LAX
from ringcoll.commands import arguments
from ringcoll.commands.arguments import size, sizes
from ringcoll.io.text import bytes_in_words, seconds_in_words
from ringcoll.schedules.schedule import SizeError

COLLECTIVES = ("psum", "psum_scatter", "all_gather", "all_to_all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the machine and the calls."""
    add = parser.add_argument
    what = "a machine that python -m ringcoll machine lists (v5e)"
    add("--device", default="v5e", metavar="NAME", help=what)
    add("--ranks", default="4x4", metavar="SHAPE", help="the axes of the ranks (4x4)")
    add(
        "--collective",
        choices=COLLECTIVES,
        default="psum_scatter",
        help="the collective (psum_scatter)",
    )
    what = "bytes of the full vector"
    add("--bytes", type=sizes, default="1K,64K,1M,64M", metavar="LIST", help=what)
    what = "names with commas between (default: all)"
    add("--algorithm", default="all", metavar="LIST", help=what)


def run(args: argparse.Namespace) -> int:
    """Print the table, and return the exit status."""
    table = report.table("bytes", "built-in", "ours", "gain", "algorithm")
    for nbytes in args.bytes:
        try:
            call = args.collective, nbytes, arguments.ranks(args.ranks), args.device
            built_in, (ours, name) = costs.predict(*call), _best(*call, args.algorithm)
        except (ValueError, argparse.ArgumentTypeError) as error:
            args.error(str(error))
        seconds = map(seconds_in_words, (built_in, ours))
        table.add_row(bytes_in_words(nbytes), *seconds, f"{built_in / ours:.2f}", name)
    report.show(f"{args.collective} on {args.device}, modelled", table)
    return 0


def _best(
    collective: str, nbytes: int, ranks: Sequence[int], device: str, algorithms: str
) -> tuple[float, str]:
    """The least seconds of these algorithms, and the name of the fastest.

    Raises:
        ValueError: as `costs.predict`; or none of them has a schedule for these ranks.
    """
    found = []
    for name in names(collective) if algorithms == "all" else algorithms.split(","):
        try:
            found.append((costs.predict(collective, nbytes, ranks, device, name), name))
        except SizeError as error:  # the algorithm has no schedule for these ranks
            refused = error
    if not found:
        raise refused
    return min(found)


def seconds_of(bytes: str, ranks: str, device: str, collective: str, algorithm: str) -> float:
    """The seconds of one call, from the flags of the command; the algorithm may be "lax" too."""
    call = collective, size(bytes), arguments.ranks(ranks), device
    return costs.predict(*call) if algorithm == LAX else _best(*call, algorithm)[0]
