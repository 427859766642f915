"""`python -m ringcoll COMMAND`: the commands of the library.

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

#: Each command is a module. It has `add_arguments(parser)` and `run(args) -> exit status`, and the
#: first line of its docstring says what it does.
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
