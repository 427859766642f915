"""Write a page in which you choose collectives, algorithms, ranks, bytes and machines.

    python -m ringcoll explore
    python -m ringcoll explore --html small.html --ranks 2..8,4x2

Without --html, the page is explore.html; it takes half a minute. It works without a network. It
shows the rounds, the price on each machine, the curves of all algorithms with their crossovers, the
formula and the code.
"""

import argparse

from ringcoll.commands import arguments
from ringcoll.draw.explore import SHAPES, as_explorer
from ringcoll.io import files
from ringcoll.io.text import bytes_in_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "--html",
        type=arguments.File,
        default="explore.html",
        metavar="FILE",
        help="the page to write (%(default)s)",
    )
    parser.add_argument(
        "-n",
        "--ranks",
        type=arguments.shapes,
        default=SHAPES,
        metavar="LIST",
        help="the ranks to choose from, 2 to 16: 2,3,5; 2..8 (powers of two); 4x2 (two axes) "
        f"(default: {','.join('x'.join(map(str, shape)) for shape in SHAPES)})",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, and return the exit status."""
    try:
        page = as_explorer(args.ranks)
    except ValueError as error:
        args.error(str(error))
    files.write(args.html, page)
    print(f"wrote {args.html}, {bytes_in_words(len(page))} bytes: open it in a browser")
    return 0
