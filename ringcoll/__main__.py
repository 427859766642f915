"""`python -m ringcoll COMMAND`: what the library can say without a program around it.

See `python -m ringcoll -h`, and `python -m ringcoll COMMAND -h`.
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
    explore,
    exporting,
    fit,
    importing,
    overlap,
    predict,
)

#: Each is a module that has `add_arguments(parser)`, `run(args) -> exit status` and says
#: what it does in the first line of its docstring.
COMMANDS = {
    "draw": draw,
    "explore": explore,
    "cost": cost,
    "predict": predict,
    "machine": fit,
    "explain": explain,
    "overlap": overlap,
    "export": exporting,
    "import": importing,
}


def add_commands(commands: Any, modules: Mapping[str, Any]) -> None:
    """A command for every module, to what `add_subparsers` returned."""
    for name, module in modules.items():
        command = commands.add_parser(
            name,
            help=(module.__doc__ or "").partition("\n")[0],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, error=command.error)


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run the command that was asked for, its files looked at first; the exit status.

    That is 130 after Ctrl-C, as a shell has it, also if a command goes on to tell what it has
    found so far, and sets `args.interrupted`.
    """
    try:
        args = parser.parse_args(argv)
        arguments.check_files(args)
        args.interrupted = False
        status = args.run(args)
        sys.stdout.flush()
        if args.interrupted:
            raise KeyboardInterrupt
    except BrokenPipeError:  # who reads has seen enough: `head`, or a pager that was left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor at exit
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="python -m ringcoll")
    versions = f"ringcoll {__version__}, jax {jax.__version__}, Python {python_version()}"
    parser.add_argument("--version", action="version", version=versions)
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True), COMMANDS)
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
