"""Read another tool's file: say what it is, prove it, price it and draw it.

    python -m ringcoll import ring.xml
    python -m ringcoll import ring.xml --bytes 1M --device h100 --svg ring.svg
    python -m ringcoll import nccl_tuner.conf --json > table.json

An XML file is an MSCCL program. Every rank is executed on symbols. A wrong program is refused with
the line, the rank, the step and the chunk. If every rank does the same, the schedule is drawn; if
not, the messages of each rank. The price is for a switch with one port per rank; nothing is
measured. Any other file is read as the CSV of NCCL's example tuner, and becomes a table.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ringcoll.collectives.table import Table
from ringcoll.commands import arguments
from ringcoll.costs.machines import SWITCHES
from ringcoll.costs.model import seconds
from ringcoll.draw.plan import Plan
from ringcoll.draw.svg import as_svg
from ringcoll.draw.text import as_text
from ringcoll.formats import Proof, from_msccl, from_nccl_tuner, price_of, prove, svg_of
from ringcoll.formats.counting import in_rounds
from ringcoll.formats.recovery import plans_of
from ringcoll.io import files
from ringcoll.io.text import aligned, bytes_in_words, columns, seconds_in_words

_PLACES = {"in": "in place", "out": "out of place"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    add("file", metavar="FILE", help="MSCCL XML, or CSV of NCCL's tuner")
    add(
        "--place",
        choices=_PLACES,
        help="prove it only for calls in place (in) or out of place (out); the default is every "
        "kind of call that the file claims",
    )
    add(
        "--bytes",
        type=arguments.size,
        default="64M",
        metavar="B",
        help=f"bytes of the full vector, in the price (64M); {arguments.SIZES}",
    )
    known = ", ".join(SWITCHES)
    add("--device", choices=SWITCHES, default="h200", metavar="NAME", help=f"{known} (h200)")
    add("--svg", type=arguments.Svg, metavar="FILE", help="all rounds as one picture")
    add("--json", action="store_true", help="print JSON; for a tuner's file, the table")


def run(args: argparse.Namespace) -> int:
    """Read, print, and return the exit status."""
    try:
        content = Path(args.file).read_bytes()
        if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
            return _tuner(args, content)
        proof = prove(from_msccl(content, args.file), _PLACES.get(args.place))
        plans = plans_of(proof)
        drawn = _svg(proof, plans) if args.svg else ""
    except (ValueError, OSError) as error:
        args.error(str(error))
    if args.svg:
        with arguments.writing(args, "svg"):
            files.write(args.svg, drawn)
    if args.json:
        print(json.dumps(_as_json(args, proof, plans), indent=1))
    else:
        print(*_in_words(args, proof, plans), sep="\n")
    return 0


def _tuner(args: argparse.Namespace, content: bytes) -> int:
    """Read a tuner's file, print its table, and return the exit status.

    Raises:
        ValueError: a line is wrong, the file is not text, or a picture was asked for.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise ValueError(f"{args.file}, line {line}: {error}") from error
    if args.svg:
        raise ValueError(f"--svg: {args.file} is no MSCCL XML, and a table has no picture")
    table, left_out = from_nccl_tuner(text, args.file)
    print(*left_out, sep="\n", end="\n" * bool(left_out), file=sys.stderr)
    if args.json:
        print(table.to_json(), end="")
    else:
        print(f"{args.file}: a table of {len(table.rows)} rows for GPUs; --json prints it\n")
        print(*_rows(table), sep="\n")
    return 0


def _rows(table: Table) -> Iterator[str]:
    head = ("collective", "algorithm", "ranks", "hosts", "bytes of an operand", "why")
    cells: list[tuple[str, ...]] = [head]
    for row in table.rows:
        bounds = (
            f"{first or 0} to {'any' if end is None else end - 1}"
            for first, end in (row.ranks, row.hosts, row.bytes)
        )
        cells.append((row.collective, row.algorithm, *bounds, row.why))
    return aligned(cells, left=6)


def _svg(proof: Proof, plans: Sequence[Plan]) -> str:
    return as_svg(plans[0]) if len(plans) == 1 else svg_of(proof)


def _seconds(args: argparse.Namespace, proof: Proof) -> float:
    return seconds(price_of(proof), args.bytes / proof.program.size, SWITCHES[args.device])


def _as_json(args: argparse.Namespace, proof: Proof, plans: Sequence[Plan]) -> dict[str, Any]:
    program, paid = proof.program, price_of(proof)
    return {
        "file": args.file,
        "name": program.name,
        "collective": program.collective,
        "ranks": program.size,
        "chunks": program.chunks,
        "protocol": program.protocol,
        "proved": list(proof.places),
        "buffered": proof.buffered,
        "overwrites_input": proof.overwrites_input,
        "same_on_every_rank": bool(plans),
        "rounds": paid.rounds,
        "messages": paid.messages,
        "sent_shards": float(paid.sent),
        "added_shards": float(paid.additions),
        "bytes": args.bytes,
        "device": args.device,
        "seconds": _seconds(args, proof),
    }


def _in_words(args: argparse.Namespace, proof: Proof, plans: Sequence[Plan]) -> Iterator[str]:
    program, paid = proof.program, price_of(proof)
    steps = sum(1 for _ in program.steps())
    yield (
        f"{args.file}: MSCCL program {program.name!r}, {program.protocol}: {program.collective} of "
        f"{program.chunks} chunks on {program.size} ranks, {steps} steps"
    )
    holds = "1 message" if proof.buffered == 1 else f"{proof.buffered} messages"
    yield (
        f"proved {' and '.join(proof.places)}: every rank gets every chunk, no two thread blocks "
        f"race, and no step waits for ever if a connection holds {holds}"
    )
    if proof.overwrites_input:
        yield "a call out of place overwrites its input"
    if not plans:
        yield "the ranks do not all do the same: each rank was checked by itself"
    elif len(plans) == 1:
        yield "every rank does the same: the schedule is drawn below"
    else:
        yield "every rank does the same: it reduces by one schedule and gathers by another, below"
    size = float(paid.sent) / program.size
    yield (
        f"the busiest rank of each round, in all: {paid.rounds} rounds, {paid.messages} messages, "
        f"{size:.3g} of the full vector sent, {float(paid.additions) / program.size:.3g} added"
    )
    time = seconds_in_words(_seconds(args, proof))
    yield f"B = {bytes_in_words(args.bytes)} on {args.device}, modelled as a switch: {time}\n"
    if not plans:
        yield from in_rounds(proof)
        return
    yield "\n\n".join(as_text(plan, columns()) for plan in plans)
