"""Print the modelled time of one collective on a machine, by an algorithm or by the built-in.

    python -m ringcoll predict all_gather --bytes 64M --ranks 8 --device h100
    python -m ringcoll predict all_reduce --bytes 1K,1M --ranks 4x8 --device h200 --algorithm ring
    python -m ringcoll predict all_gather --ranks 4 --device v5e --topology 8x4 --json

Bytes are counted as nccl-tests does: the operand or the result of a rank, whichever is larger. The
price of the built-in comes from published measurements if there are any; `python -m benchmarks
measured` says how far prices are off.
"""

import argparse
import json

from ringcoll.commands import arguments
from ringcoll.costs.machines import MACHINES
from ringcoll.costs.prediction import PERMUTE, predict
from ringcoll.costs.wire import CODES
from ringcoll.io.text import aligned, bytes_in_words, seconds_in_words
from ringcoll.schedules.registry import ALIASES, COLLECTIVES, TOUR


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    names = [*COLLECTIVES, TOUR, PERMUTE, *ALIASES]
    add("collective", type=arguments.collective, metavar="COLLECTIVE", help=", ".join(names))
    add(
        "--bytes",
        type=arguments.sizes,
        default="64M",
        metavar="LIST",
        help=f"the sizes (64M); {arguments.SIZES}",
    )
    help_ranks = "the number of ranks; for several axes 4x4, major first (8)"
    add("-n", "--ranks", type=arguments.ranks, default="8", metavar="SHAPE", help=help_ranks)
    known = ", ".join(MACHINES)
    add("--device", default="v5e", metavar="NAME", help=f"{known}; or the file of a machine (v5e)")
    add("--algorithm", default="lax", metavar="NAME", help="lax is the built-in (lax)")
    add("--dtype", default="float32", metavar="NAME", help="the dtype of the elements (float32)")
    add("--topology", metavar="WORDS", help="8x4 (a slice), line, ring, switch, '4 hosts', ...")
    add(
        "--wire",
        choices=CODES,
        metavar="DTYPE",
        help=f"what messages hold in place of floats: {', '.join(CODES)}",
    )
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print, and return the exit status."""
    ranks = args.ranks[0] if len(args.ranks) == 1 else args.ranks
    what = (args.algorithm, args.dtype, args.topology, args.wire)
    try:
        taken = [predict(args.collective, b, ranks, args.device, *what) for b in args.bytes]
    except ValueError as error:
        args.error(str(error))
    if args.json:
        found = [
            {
                "collective": args.collective,
                "bytes": size,
                "ranks": ranks,
                "device": args.device,
                "algorithm": args.algorithm,
                "dtype": args.dtype,
                "topology": args.topology,
                "wire": args.wire,
                "seconds": seconds,
            }
            for size, seconds in zip(args.bytes, taken, strict=True)
        ]
        print(json.dumps(found, indent=1))
        return 0
    rows = zip(map(bytes_in_words, args.bytes), map(seconds_in_words, taken), strict=True)
    print(f"modelled: {args.collective} by {args.algorithm} on {args.device}")
    print(*aligned([("bytes", "time"), *rows]), sep="\n")
    return 0
