"""Write one of these after `python -m ringcoll`; -h after a command explains it:

draw all_reduce                                         who holds what after each round
explain ring                                            an algorithm: rounds, price, when to use it
cost all_reduce                                         the modelled time of every algorithm
machine --fit nccl.txt                                  a machine's constants, from measured times
overlap --example all_gather_matmul                     what a compiled program waits for
try --example all_gather_then_matmul                    which form of a step is the quickest
export all_reduce --algorithm ring -n 8 -o ring.xml     a schedule, as an MSCCL file
import ring.xml                                         an MSCCL file: read and prove it
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from platform import python_version
from typing import Any

import jax

from ringcoll import __version__
from ringcoll.commands import (
    arguments,
    cost,
    draw,
    explain,
    exporting,
    fit,
    importing,
    overlap,
    trying,
)

#: Each command is a module. It has `add_arguments(parser)` and `run(args) -> exit status`, and the
#: first line of its docstring is its help.
COMMANDS = {
    "draw": draw,
    "cost": cost,
    "machine": fit,
    "explain": explain,
    "overlap": overlap,
    "try": trying,
    "export": exporting,
    "import": importing,
}


def add_commands(commands: Any, modules: Mapping[str, Any]) -> None:
    """Add a command for every module to `commands`, which `add_subparsers` returned."""
    for name, module in modules.items():
        words = module.__doc__ or ""
        command = commands.add_parser(name, help=words.partition("\n")[0], description=words)
        module.add_arguments(command)
        command.set_defaults(run=module.run, error=command.error)


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Check the files that the command will write, run it, and return its exit status.

    After Ctrl-C the status is 130, as in a shell. A command that catches Ctrl-C to print what it
    has found so far sets `args.interrupted`; then the status is 130 too.
    """
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            args.error(f"unknown arguments: {' '.join(unknown)}; -h lists those that it takes")
        arguments.check_files(args)
        args.interrupted = False
        status = args.run(args)
        sys.stdout.flush()
        if args.interrupted:
            raise KeyboardInterrupt
    except BrokenPipeError:  # the reader has closed the pipe: `head`, or a pager that was left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no error at exit either
        return 1
    except OSError as error:  # a full disk, for example; `check_files` has checked the rest
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status


def listed(args: argparse.Namespace) -> int:
    """Print an example of each command, and return the exit status."""
    print((__doc__ or "").strip().replace("\n\n", "\n"))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; without one, list them."""
    parser = arguments.Parser(prog="python -m ringcoll")
    parser.set_defaults(run=listed, error=parser.error)
    versions = f"ringcoll {__version__}, jax {jax.__version__}, Python {python_version()}"
    parser.add_argument("--version", action="version", version=versions)
    add_commands(parser.add_subparsers(metavar="COMMAND"), COMMANDS)
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
