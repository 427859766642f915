"""Write a schedule as an MSCCL file: XML, with a program of steps for every rank.

    python -m ringcoll export all_reduce --algorithm ring -n 8 -o ring.xml
    python -m ringcoll export all_gather --function my.module:schedule -n 5 -o mine.xml

Without -o, the file is printed. It is proved, step by step on every rank, before it is written.
"""

import argparse

from ringcoll.commands import arguments
from ringcoll.formats import program, prove, to_msccl


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    arguments.add_collective(parser)
    arguments.add_algorithm(parser.add_mutually_exclusive_group(required=True))
    parser.add_argument(
        "-n",
        "--ranks",
        type=arguments.shape,
        required=True,
        metavar="N",
        help="the number of ranks; for several axes 4x2, major first",
    )
    parser.add_argument("-o", "--output", type=arguments.File, metavar="FILE", help="the file")


def run(args: argparse.Namespace) -> int:
    """Write the file, and return the exit status."""
    algorithm = args.function if args.algorithm is None else args.algorithm
    try:
        written = program(args.collective, algorithm, args.ranks)
        prove(written)
    except ValueError as error:
        args.error(str(error))
    if args.output is None:
        print(to_msccl(written), end="")
        return 0
    arguments.write(args.output, to_msccl(written))
    return 0
