"""Print the modelled time of a collective by every algorithm and the built-in, and what is fastest.

    python -m ringcoll cost all_gather
    python -m ringcoll cost all_gather --bytes 64M --ranks 2..256 --device v5e
    python -m ringcoll cost all_reduce --bytes 1M,64M --ranks 256x256,32x32x64 --device v5p
    python -m ringcoll cost all_reduce --device h100 --ranks 2..8
    python -m ringcoll cost all_gather --device mine.json --algorithm lax,ring --json
    python -m ringcoll cost all_gather --ranks 8 --function my.module:schedule
    python -m ringcoll cost all_gather_matmul --shape 8192x8192x28672 -n 8 --device v5e

B is the size in bytes as nccl-tests counts it: the operand or the result of a rank, whichever is
larger. That is the full vector: an all_gather of 64M on 8 ranks has an operand of 8M. alpha is
seconds per message, hop seconds per link that a message passes, beta seconds per byte on the
busiest link, and gamma seconds per byte added; `explain NAME` prints formulas. `lax` is the
built-in. On GPUs its price, and that of a message, lie between published measurements; what lies
outside is "not measured". Nothing is measured here; `python -m benchmarks measured` compares prices
with measurements. For a matmul with a collective, the table is the one whose cheapest line "auto"
runs on TPUs, without gradients.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf, isinf
from typing import Any, NamedTuple

from ringcoll.commands import arguments, cost_matmul
from ringcoll.costs import machines
from ringcoll.costs.machines import MACHINES
from ringcoll.costs.model import Model, fastest
from ringcoll.costs.places import SWITCH, Place, Seconds, place_of
from ringcoll.costs.prediction import PERMUTE, seconds_of
from ringcoll.costs.wire import Wire
from ringcoll.io.text import WIDTH, aligned, bytes_in_words, seconds_in_words, wrapped
from ringcoll.schedules.registry import LAX, TOUR, ScheduleLike, in_lax, listed_name, names, unknown

#: The range of bytes over which the fastest algorithm is printed.
LEAST, MOST = 2**10, 2**32
_POWERS = [2**k for k in range(10, 33)]
#: In place of a time that is infinite.
NOT_MEASURED = "not measured"
#: The sizes, if none are given.
_BYTES = [2**26]
#: The options that a matmul does not take.
_NOT_OF_MATMULS = "bytes", "algorithm", "function", "hosts", "network"
#: Bytes of an element of bfloat16, which --wire replaces by codes.
_ITEMSIZE = 2

Algorithms = Mapping[str, ScheduleLike]


class Priced(NamedTuple):
    """The algorithms that can run at a place, and their seconds."""

    place: Place
    seconds: dict[str, Seconds]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    arguments.add_collective(parser, PERMUTE, *cost_matmul.NAMES)
    add(
        "--bytes",
        type=arguments.sizes,
        metavar="LIST",
        help=f"B, the sizes; one table for each (64M); {arguments.SIZES}",
    )
    what = "only the algorithms of these names; lax is the built-in"
    add("--algorithm", metavar="LIST", help=what)
    add(
        "--function",
        type=arguments.algorithm,
        metavar="MODULE:FUNCTION",
        help="compare this one too: it maps the sizes of the axes to a Schedule",
    )
    arguments.add_wire(parser)
    add(
        "-n",
        "--ranks",
        type=arguments.shapes,
        default="8",
        metavar="LIST",
        help="the ranks, one column for each: 2,3,5; 2..256 (the powers of two from 2 to 256); "
        "16x16 (two axes, or hosts x ranks of a host); 2..64x8 (the first axis 2 to 64, the second "
        "8) (default: %(default)s)",
    )
    names_of = f"{', '.join(MACHINES)}; or a machine's file (v5e)"
    add("--device", default="v5e", metavar="NAME", help=names_of)
    where = "hosts of GPUs (default: the fewest, or the first size of --ranks)"
    add("--hosts", type=arguments.count, metavar="N", help=where)
    add(
        "--network",
        metavar="NETWORK",
        help="of TPUs: the chips of the slice, such as 4x4 (default: the shape of --ranks), or "
        f"{SWITCH}",
    )
    add("--json", action="store_true", help="print JSON")
    cost_matmul.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tables, and return the exit status."""
    collective = in_lax(args.collective)
    refused: dict[str, None] = {}
    try:
        _check_options(args)
        device = machines.find(args.device)
        if args.collective in cost_matmul.NAMES:
            return cost_matmul.run(args, device)
        algorithms = _algorithms(args, collective)
        wire = arguments.wire(args.wire, args.collective)
        where = {"hosts": args.hosts, "network": args.network}
        places = [place_of(shape, device, **where) for shape in args.ranks]
        rows = [_price_all(place, collective, algorithms, refused, wire) for place in places]
        if not any(row.seconds for row in rows):
            raise ValueError("; ".join(refused))
    except ValueError as error:
        args.error(str(error))
    if args.json:
        print(json.dumps([*_as_json(args, rows)], indent=1))
        return 0
    lines = [*_machine_lines(places)]
    if wire:
        lines.append(
            f"messages hold {args.wire} and scales: {wire.ratio(_ITEMSIZE):.3f} of the "
            "bytes of bfloat16. Times include the work to encode, decode and add"
        )
    for nbytes in args.bytes or _BYTES:
        lines += ["", f"{args.collective} of B = {bytes_in_words(nbytes)}; * is the fastest"]
        lines += _table(rows, algorithms, nbytes)
    lines += ["", f"fastest from {bytes_in_words(LEAST)} to {bytes_in_words(MOST)}"]
    winners = [(row.place.name, _winners(row)) for row in rows]
    lines += aligned(winners, left=2)
    lines += [f"- {why}" for why in refused]
    if any(NOT_MEASURED in line for line in lines):
        lines.append(
            f"- {NOT_MEASURED}, so not compared: python -m ringcoll machine --show {args.device} "
            "lists the ranks, hosts and sizes of its measurements (those of ppermute price every "
            "message on one host); machine --fit makes a machine of your own log"
        )
    print(*wrapped(lines), sep="\n")
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse what only matmuls take, or what they do not take.

    Raises:
        ValueError: the collective does not take an option.
    """
    is_matmul = args.collective in cost_matmul.NAMES
    for name in _NOT_OF_MATMULS if is_matmul else cost_matmul.OPTIONS:
        if getattr(args, name) not in (None, False):
            raise ValueError(f"--{name}: {args.collective} does not take it; leave it out")


def _algorithms(args: argparse.Namespace, collective: str) -> dict[str, ScheduleLike]:
    """The algorithms to compare, by name.

    Raises:
        ValueError: there is no algorithm of a name in --algorithm.
    """
    known = [LAX] if collective != TOUR else []
    known += names(collective) if collective != PERMUTE else []
    algorithms: dict[str, ScheduleLike] = {}
    for given in args.algorithm.split(",") if args.algorithm else known:
        name = given if given in known else listed_name(collective, given)
        if name not in known:
            raise ValueError(f"--algorithm {given}: {args.collective}: {unknown(given, known)}")
        algorithms[name] = name
    if args.function:
        own = args.function.__name__
        algorithms[own if own not in algorithms else f"{own} (--function)"] = args.function
    return algorithms


def _machine_lines(places: Sequence[Place]) -> Iterator[str]:
    """The constants of the device; where the ranks are."""
    device = places[0].device
    yield f"modelled on {device.name}: {_constants(device.model)}"
    laid: dict[str, dict[str, None]] = {}
    for place in places:
        laid.setdefault(place.words, {})[place.name] = None
    yield from (f"{', '.join(names)} ranks: {words}" for words, names in laid.items())


def _constants(model: Model) -> str:
    if wire := model.wire:
        ends = (wire.knots[0], wire.knots[-1])
        least, most = (f"{seconds_in_words(t)} of {bytes_in_words(b)}" for b, t in ends)
        return f"a message, measured: {least} to {most}"
    if isinf(model.alpha):
        return "messages were not measured"
    words = f"alpha {seconds_in_words(model.alpha)}"
    if model.hop:
        words += f", hop {seconds_in_words(model.hop)}"
    for name, second in (("beta", model.beta), ("gamma", model.gamma)):
        words += f", {name} 1/({1e-9 / second:.4g} GB/s)" if second else f", {name} 0"
    return words


def _price_all(
    place: Place,
    collective: str,
    algorithms: Algorithms,
    refused: dict[str, None],
    wire: Wire | None,
) -> Priced:
    """Price every algorithm at a place; add to `refused` why it cannot run there."""
    row = Priced(place, {})
    for name, algorithm in algorithms.items():
        try:
            row.seconds[name] = seconds_of(collective, place, algorithm, wire, _ITEMSIZE)
        except ValueError as error:
            refused[f"{name}: {error}"] = None
    return row


def _as_json(args: argparse.Namespace, rows: Sequence[Priced]) -> Iterator[dict[str, Any]]:
    """The seconds of each algorithm, for each number of ranks and size."""
    for nbytes in args.bytes or _BYTES:
        for row in rows:
            for name, seconds in row.seconds.items():
                yield {
                    "collective": args.collective,
                    "bytes": nbytes,
                    "ranks": row.place.shape,
                    "device": row.place.device.name,
                    "algorithm": name,
                    "wire": args.wire,
                    "seconds": None if isinf(taken := seconds(nbytes)) else taken,
                }


def _table(rows: Sequence[Priced], names: Iterable[str], nbytes: int) -> Iterator[str]:
    """A row for each algorithm, a column for each machine; as many columns at once as fit.

    The least time of a column has a star. All times have the unit of the least one.
    """
    first, columns = ["ranks", *names], []
    taken = [{name: seconds(nbytes) for name, seconds in row.seconds.items()} for row in rows]
    least = min((t for times in taken for t in times.values() if t), default=inf)
    for row, times in zip(rows, taken, strict=True):
        starred = min(times.values(), default=0) * (1 + 1e-9)
        words = {
            name: f"{NOT_MEASURED} "
            if isinf(t)
            else seconds_in_words(t, least) + " *"[t <= starred]
            for name, t in times.items()
        }
        columns.append([f"{row.place.name} ", *(words.get(name, "- ") for name in first[1:])])
    width, used = (max(map(len, some)) for some in ([*chain(*columns)], first))
    fit = max((WIDTH - used) // (width + 2), 1)
    for start in range(0, len(columns), fit):
        yield from aligned([*zip(first, *columns[start : start + fit], strict=True)])


def _distinct(row: Priced) -> dict[str, Seconds]:
    """The seconds of the algorithms; those that tie at every size share one entry."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, seconds in row.seconds.items():
        alike.setdefault(tuple(f"{seconds(b):.9g}" for b in _POWERS), []).append(name)
    return {" = ".join(some): row.seconds[some[0]] for some in alike.values()}


def _winners(row: Priced) -> str:
    """The fastest algorithm in each range of bytes, with the sizes between the ranges."""
    if not row.seconds:
        return "-"
    first, *others = fastest({NOT_MEASURED: lambda _: inf, **_distinct(row)}, LEAST, MOST)
    return "  ".join([first.name, *(f"| {bytes_in_words(r.least)} | {r.name}" for r in others)])
