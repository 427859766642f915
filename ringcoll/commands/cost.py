"""Print the modelled time of a collective by every algorithm, and which is fastest.

    python -m ringcoll cost all_gather
    python -m ringcoll cost all_gather --bytes 64M --ranks 8 --device v5e --formulas
    python -m ringcoll cost all_reduce --bytes 1M,64M --ranks 256x256,32x32x64 --device v5p
    python -m ringcoll cost all_reduce --device h200 --ranks 256,32x8 --local 8 --outer ethernet100
    python -m ringcoll cost tour --bytes 64M --ranks 8 --algorithm ring,bidirectional_ring
    python -m ringcoll cost all_gather --ranks 8 --function my.module:schedule

B is the size in bytes as nccl-tests counts it: the operand or the result of a rank, whichever is
larger. That is the full vector: an all_gather of 64M on 8 ranks has an operand of 8M. In formulas,
alpha is seconds per message, hop seconds per link that a message passes, beta seconds per byte on
the busiest link, and gamma seconds per byte added. Nothing is measured.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from ringcoll.commands import arguments, machine
from ringcoll.commands.machine import Machine, Seconds
from ringcoll.costs import encoding
from ringcoll.costs.closed_forms import at, closed_form, prices
from ringcoll.costs.counts import HostsPrice, Price
from ringcoll.costs.model import Range, fastest
from ringcoll.costs.wire import Wire
from ringcoll.io.text import WIDTH, aligned, bytes_in_words, seconds_in_words, wrapped
from ringcoll.schedules.registry import Algorithm, in_lax, listed_name, names, unknown

#: The range of bytes over which the fastest algorithm is printed.
LEAST, MOST = 2**10, 2**32
#: Bytes of an element of bfloat16, which --wire replaces by codes.
_ITEMSIZE = 2

Algorithms = Mapping[str, Algorithm]


class Priced(NamedTuple):
    """The algorithms that a machine can run, with their seconds, and their formulas if any."""

    machine: Machine
    seconds: dict[str, Seconds]
    formulas: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    arguments.add_collective(parser)
    add(
        "--bytes",
        type=arguments.sizes,
        default="64M",
        metavar="LIST",
        help=f"B, the sizes; one table for each (64M); {arguments.SIZES}",
    )
    add("--algorithm", metavar="LIST", help="compare only the algorithms of these names")
    add(
        "--function",
        type=arguments.algorithm,
        metavar="MODULE:FUNCTION",
        help="compare this one too: it maps the sizes of the axes to a Schedule",
    )
    arguments.add_wire(parser)
    machine.add_arguments(parser)
    add("--formulas", action="store_true", help="print the formula of each algorithm too")


def run(args: argparse.Namespace) -> int:
    """Print the tables, and return the exit status."""
    collective = in_lax(args.collective)
    refused: dict[str, None] = {}
    try:
        algorithms = _chosen(args, collective)
        wire = arguments.wire(args.wire, args.collective)
        rows = [_priced(m, collective, algorithms, refused, wire) for m in machine.machines(args)]
        if not any(row.seconds for row in rows):
            raise ValueError("; ".join(refused))
    except ValueError as error:
        args.error(str(error))
    machines = [row.machine for row in rows]
    lines = [*machine.described(args), *machine.lines(machines)]
    if wire:
        lines.append(
            f"messages hold {args.wire} and scales: {encoding.ratio(wire, _ITEMSIZE):.3f} of the "
            "bytes of bfloat16. Multiply B in a formula by this. Times include the work to encode, "
            "decode and add"
        )
    for nbytes in args.bytes:
        lines += ["", f"{args.collective} of B = {bytes_in_words(nbytes)}; * is the fastest"]
        lines += _table(rows, algorithms, nbytes)
    lines += ["", f"fastest from {bytes_in_words(LEAST)} to {bytes_in_words(MOST)}"]
    winners = [(row.machine.name, _in_words(_ranges(row)) if row.seconds else "-") for row in rows]
    lines += aligned(winners, left=2)
    lines += [f"- {why}" for why in refused]
    if args.formulas:
        lines += _formulas(rows, _forms(collective, algorithms, machines))
    print(*wrapped(lines), sep="\n")
    return 0


def _chosen(args: argparse.Namespace, collective: str) -> dict[str, Algorithm]:
    """The algorithms to compare, by name.

    Raises:
        ValueError: there is no algorithm of a name in --algorithm.
    """
    known = names(collective)
    chosen: dict[str, Algorithm] = {}
    for asked in args.algorithm.split(",") if args.algorithm else known:
        name = listed_name(collective, asked)
        if name not in known:
            raise ValueError(f"--algorithm {asked}: {args.collective}: {unknown(asked, known)}")
        chosen[name] = name
    if args.function:
        own = args.function.__name__
        chosen[own if own not in chosen else f"{own} (--function)"] = args.function
    return chosen


def _encoded(m: Machine, collective: str, paid: Price | HostsPrice, wire: Wire) -> Seconds:
    """Seconds with a wire: fewer bytes to send, and the work to encode, decode and add."""
    sent = replace(m, model=replace(m.model, gamma=0.0)).seconds(paid)
    ratio, name = encoding.ratio(wire, _ITEMSIZE), "psum" if collective == "pmean" else collective

    def seconds(size: float) -> float:
        work = encoding.seconds(name, m.ranks, size, _ITEMSIZE, wire, m.model)
        return sent(size * ratio) + work

    return seconds


def _priced(
    m: Machine,
    collective: str,
    algorithms: Algorithms,
    refused: dict[str, None],
    wire: Wire | None,
) -> Priced:
    """Price every algorithm on a machine; add to `refused` why it cannot run one."""
    row = Priced(m, {}, {})
    for name, algorithm in algorithms.items():
        try:
            paid = m.price(collective, algorithm)
        except ValueError as error:
            refused[f"{name}: {error}"] = None
            continue
        row.seconds[name] = _encoded(m, collective, paid, wire) if wire else m.seconds(paid)
        if isinstance(paid, Price):
            row.formulas[name] = at(m.ranks, paid, m.model.gamma > 0)
    return row


def _forms(collective: str, algorithms: Algorithms, machines: Sequence[Machine]) -> dict[str, str]:
    """The closed form of each algorithm, if all machines are rings or all are switches."""
    rings = {m.network and m.network == m.shape and m.is_torus for m in machines if m.ranks > 2}
    if rings not in ({None}, {True}) or any(m.outer or len(m.shape) > 1 for m in machines):
        return {}
    paid = {name: prices(collective, one, rings == {True}) for name, one in algorithms.items()}
    forms = {name: closed_form(p, machines[0].model.gamma > 0) for name, p in paid.items()}
    return {name: str(form) for name, form in forms.items() if form}


def _times(row: Priced, nbytes: int) -> dict[str, str]:
    """The time of each algorithm in words, with a star after the least."""
    taken = {name: seconds(nbytes) for name, seconds in row.seconds.items()}
    least = min(taken.values(), default=0) * (1 + 1e-9)
    return {name: seconds_in_words(t) + ("*" if t <= least else " ") for name, t in taken.items()}


def _table(rows: Sequence[Priced], names: Iterable[str], nbytes: int) -> Iterator[str]:
    """A row for each algorithm, a column for each machine; as many columns at once as fit."""
    first = ["ranks", *names]
    columns = []
    for row in rows:
        times = _times(row, nbytes)
        columns.append([f"{row.machine.name} ", *(times.get(name, "- ") for name in first[1:])])
    width, used = (max(map(len, some)) for some in ([*chain(*columns)], first))
    fit = max((WIDTH - used) // (width + 2), 1)
    for start in range(0, len(columns), fit):
        yield from aligned([*zip(first, *columns[start : start + fit], strict=True)])


def _formulas(rows: Sequence[Priced], forms: Mapping[str, str]) -> Iterator[str]:
    """The formulas of each machine; of several rings or switches, those for any n."""
    of = {f"n = {row.machine.name}": row.formulas for row in rows if len(rows) == 1 or not forms}
    for n, formulas in {**of, "any n > 2": forms}.items():
        if formulas:
            yield from ("", f"formulas, {n}")
            yield from aligned([*formulas.items()], left=2)


def _distinct(row: Priced) -> dict[str, Seconds]:
    """The seconds of the algorithms; those that tie at every size share one entry."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, seconds in row.seconds.items():
        alike.setdefault(tuple(f"{seconds(b):.9g}" for b in (LEAST, MOST)), []).append(name)
    return {" = ".join(some): row.seconds[some[0]] for some in alike.values()}


def _ranges(row: Priced) -> list[Range]:
    """Which algorithm is fastest in which range of bytes."""
    return fastest(_distinct(row), LEAST, MOST)


def _in_words(ranges: Sequence[Range]) -> str:
    first, *others = ranges
    return "  ".join([first.name, *(f"| {bytes_in_words(r.least)} | {r.name}" for r in others)])
