"""Write a schedule, or a table, to a file that another tool reads.

    python -m ringcoll export all_reduce --algorithm ring -n 8 --format msccl -o ring.xml
    python -m ringcoll export all_gather --algorithm bruck -n 8 --format mscclpp -o bruck.json
    python -m ringcoll export all_reduce --algorithm torus -n 4x4 --format chakra -o torus
    python -m ringcoll export --program ring.xml --format mscclpp -o ring.json
    python -m ringcoll export --table table.json --format nccl-tuner -o nccl_tuner.conf

msccl is XML, and mscclpp is the JSON of an execution plan. chakra is a trace for each rank, such as
torus.0.et. nccl-tuner is the CSV of NCCL's example tuner. Without -o, the file is printed; traces
need -o. A program is proved, step by step on every rank, before it is written.
"""

import argparse
import sys

from ringcoll.collectives.table import Table
from ringcoll.commands import arguments
from ringcoll.formats import (
    Program,
    program,
    prove,
    to_chakra,
    to_msccl,
    to_mscclpp,
    to_nccl_tuner,
)
from ringcoll.formats.msccl import read
from ringcoll.formats.program import COLLECTIVES
from ringcoll.io import files
from ringcoll.schedules.registry import ALIASES

FORMATS = ("msccl", "mscclpp", "chakra", "nccl-tuner")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    known = [*COLLECTIVES, *ALIASES]
    add(
        "collective",
        nargs="?",
        type=arguments.collective,
        choices=known,
        metavar="COLLECTIVE",
        help=", ".join(known),
    )
    add("--format", choices=FORMATS, required=True, help=", ".join(FORMATS))
    which = parser.add_mutually_exclusive_group(required=True)
    arguments.add_algorithm(which)
    which.add_argument("--program", metavar="FILE", help="an MSCCL file to write in another format")
    which.add_argument("--table", metavar="FILE", help="a table, for nccl-tuner")
    add(
        "-n",
        "--ranks",
        type=arguments.ranks,
        metavar="N",
        help="the number of ranks; for several axes 4x2, major first",
    )
    add(
        "--bytes",
        type=arguments.size,
        default="64M",
        metavar="B",
        help=f"bytes of the full vector, in traces (64M); {arguments.SIZES}",
    )
    add(
        "-o",
        "--output",
        type=arguments.File,
        metavar="FILE",
        help="write to this file; for chakra, the prefix of the files",
    )


def run(args: argparse.Namespace) -> int:
    """Write the files, and return the exit status."""
    try:
        _check(args)
        if args.table:
            tuned = to_nccl_tuner(Table.load(args.table))
            print(*tuned.left_out, sep="\n", end="\n" * bool(tuned.left_out), file=sys.stderr)
            written: dict[str, str | bytes] = {"": tuned.text}
        else:
            written = _written(args, _program(args))
    except (ValueError, OSError) as error:
        args.error(str(error))
    if args.output is None:
        print(*written.values(), end="")
        return 0
    with arguments.writing(args, "output"):
        for ending, content in written.items():
            files.write(args.output + ending, content)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse arguments that do not go together."""
    if (args.format == "nccl-tuner") != bool(args.table):
        raise ValueError("--format nccl-tuner needs --table, and --table needs this format")
    of_schedule = bool(args.algorithm is not None or args.function)
    if of_schedule != bool(args.collective) or of_schedule != bool(args.ranks):
        raise ValueError(
            "give COLLECTIVE and -n with --algorithm or --function, and only with these"
        )
    if args.format == "chakra" and args.output is None:
        raise ValueError("--format chakra writes a file for each rank: give -o PREFIX")


def _program(args: argparse.Namespace) -> Program:
    """The program of the arguments, proved."""
    if args.program:
        found = read(args.program)
    else:
        algorithm = args.function if args.algorithm is None else args.algorithm
        found = program(args.collective, algorithm, args.ranks)
    prove(found)
    return found


def _written(args: argparse.Namespace, proved: Program) -> dict[str, str | bytes]:
    """The content of each file, by what to append to the name in --output."""
    if args.format == "msccl":
        return {"": to_msccl(proved)}
    if args.format == "mscclpp":
        return {"": to_mscclpp(proved)}
    traces = to_chakra(proved, args.bytes)
    return {f".{rank}.et": trace for rank, trace in enumerate(traces)}
