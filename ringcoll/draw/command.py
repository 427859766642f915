"""Draw who holds what after each round of a collective.

    python -m ringcoll draw all_reduce --algorithm bidirectional_ring -n 4
    python -m ringcoll draw all_reduce --algorithm ring -n 4 --svg ring.svg
    python -m ringcoll draw all_gather --algorithm torus -n 4x2 --html page.html
    python -m ringcoll draw all_gather --function my.module:schedule -n 5

`my.module:schedule` is called with the sizes of the axes, and returns a `Schedule`.
"""

import argparse
import shutil
from pathlib import Path

from ringcoll import arguments
from ringcoll.draw.page import as_page
from ringcoll.draw.plan import plan
from ringcoll.draw.svg import as_svg
from ringcoll.draw.text import as_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    arguments.add_collective(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--algorithm", metavar="NAME", help="one that `explain` lists")
    which.add_argument(
        "--function",
        type=arguments.algorithm,
        metavar="MODULE:FUNCTION",
        help="a schedule of one's own",
    )
    parser.add_argument(
        "-n",
        "--ranks",
        type=arguments.shape,
        required=True,
        metavar="N",
        help="how many; over several axes 4x2, major first",
    )
    parser.add_argument("--svg", metavar="FILE", help="all rounds as one picture")
    parser.add_argument("--round", type=int, metavar="K", help="of the picture: this one alone")
    parser.add_argument("--html", metavar="FILE", help="a page that plays the rounds")


def run(args: argparse.Namespace) -> int:
    """Draw; returns the exit status."""
    try:
        made = plan(args.collective, args.algorithm or args.function, args.ranks)
        if args.round is not None and not args.svg:
            raise ValueError("--round: is of a picture: give --svg too")
        if args.svg:
            Path(args.svg).write_text(as_svg(made, args.round), encoding="utf-8")
        if args.html:
            Path(args.html).write_text(as_page(made), encoding="utf-8")
    except (ValueError, OSError) as error:
        args.error(str(error))
    if not args.svg and not args.html:
        print(as_text(made, shutil.get_terminal_size().columns))
    return 0
