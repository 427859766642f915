"""Read an MSCCL file, and prove the program in it.

    python -m ringcoll import ring.xml

Every rank is executed on symbols. A wrong program is refused with the rank, the step and the chunk.
"""

import argparse
from pathlib import Path

from ringcoll.formats import from_msccl, prove


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("file", metavar="FILE", help="MSCCL XML")


def run(args: argparse.Namespace) -> int:
    """Read, print, and return the exit status."""
    try:
        program = from_msccl(Path(args.file).read_bytes())
        places = prove(program)
    except (ValueError, OSError) as error:
        args.error(f"{args.file}: {error}")
    print(
        f"{args.file}: MSCCL program {program.name!r}, {program.protocol}: {program.collective} of "
        f"{program.chunks} chunks on {program.size} ranks, {len([*program.steps()])} steps\n"
        f"proved {' and '.join(places)}: every rank gets every chunk,\n"
        "no two thread blocks race, and no step waits for ever"
    )
    return 0
