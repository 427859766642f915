"""Draw which rank holds what after each round of a collective.

    python -m ringcoll draw all_reduce
    python -m ringcoll draw all_reduce --algorithm bidirectional_ring -n 5
    python -m ringcoll draw all_reduce --svg ring.svg
    python -m ringcoll draw all_reduce --animate ring.svg
    python -m ringcoll draw all_gather --algorithm torus -n 4x2 --svg torus.svg
    python -m ringcoll draw tour
    python -m ringcoll draw psum --algorithm halving_doubling -n 8 --order tree
    python -m ringcoll draw all_gather --function my.module:schedule -n 5

With --order tree it prints the order in which each rank adds, and proves that every rank adds by
the balanced tree. The bits of such a sum do not depend on the number of ranks.

In a tour, a partial result follows each shard and returns to the shard's owner, as in the gradient
of attention. `my.module:schedule` is called with the sizes of the axes, and returns a `Schedule`.
"""

import argparse
from math import prod

from ringcoll.commands import arguments
from ringcoll.costs.places import check_ranks
from ringcoll.draw.motion import as_motion
from ringcoll.draw.plan import Execution, plan
from ringcoll.draw.svg import as_svg
from ringcoll.draw.text import as_text
from ringcoll.io.text import columns
from ringcoll.schedules.registry import in_lax, names
from ringcoll.schedules.schedule import ScheduleError
from ringcoll.schedules.tree import balanced_algorithms, check_balanced, tree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    arguments.add_collective(parser)
    which = parser.add_mutually_exclusive_group()
    arguments.add_algorithm(which)
    parser.add_argument(
        "-n",
        "--ranks",
        type=arguments.shape,
        default="4",
        metavar="N",
        help="the number of ranks (4); for several axes 4x2, major first",
    )
    parser.add_argument(
        "--svg", type=arguments.File, metavar="FILE", help="all rounds as one picture"
    )
    parser.add_argument(
        "--animate",
        type=arguments.File,
        metavar="FILE",
        help="all rounds as an SVG that moves",
    )
    parser.add_argument("--order", choices=["tree"], help="print the additions of each rank")


def _as_tree(args: argparse.Namespace, drawn_plan: Execution) -> str:
    """The balanced tree by which each rank adds, as text.

    Raises:
        ValueError: the collective adds nothing; a file was asked for; or the algorithm adds by
            a different tree, and then the message names those that add by this one.
    """
    collective = in_lax(args.collective)
    if collective not in ("psum", "psum_scatter"):
        raise ValueError(f"--order tree: {args.collective} adds nothing; draw a psum")
    if args.svg or args.animate:
        raise ValueError("--order tree is printed; leave out --svg and --animate")
    try:
        check_balanced(drawn_plan.made)
    except ScheduleError as error:
        known = ", ".join(balanced_algorithms(collective, drawn_plan.shape)) or "none of this size"
        raise ValueError(f"--order tree: {error}; choose from {known}") from error
    ranks = range(prod(drawn_plan.shape))
    return "\n".join(f"rank {rank}: {tree(drawn_plan.made, rank)}" for rank in ranks)


def run(args: argparse.Namespace) -> int:
    """Draw, and return the exit status."""
    first, *_ = names(in_lax(args.collective))  # the ring, if there is one
    algorithm = args.function or (first if args.algorithm is None else args.algorithm)
    try:
        check_ranks(args.ranks)
        drawn_plan = plan(args.collective, algorithm, args.ranks)
        if args.order:
            print(_as_tree(args, drawn_plan))
            return 0
        drawings = {}
        if args.svg:
            drawings["svg"] = as_svg(drawn_plan)
        if args.animate:
            drawings["animate"] = as_motion(drawn_plan)
    except ValueError as error:
        args.error(str(error))
    for option, drawing in drawings.items():
        arguments.write(getattr(args, option), drawing)
    if not drawings:
        print(as_text(drawn_plan, columns()))
    return 0
