"""`python -m benchmarks`: measure the collectives, or run a command.

See `python -m benchmarks -h`, and `python -m benchmarks COMMAND -h`.
"""

import os
import sys
import time
from collections.abc import Sequence

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

# JAX reads the environment when it is imported.
from benchmarks import START
from benchmarks.collectives import sweep, tune
from benchmarks.compiled import (
    check_claims,
    collectives,
    context,
    experts,
    matmul,
    meshes,
    overlap,
    recipes,
    steps,
    whole,
)
from benchmarks.hosts import cluster, failures, wire
from benchmarks.machines import fit, measured
from benchmarks.referee import referee
from benchmarks.soak import soak
from ringcoll.__main__ import add_commands, run
from ringcoll.choose.table import default_table
from ringcoll.commands.arguments import Parser

#: Each command is a module. It has `add_arguments(parser)` and `run(args) -> exit status`, and the
#: first line of its docstring describes it.
COMMANDS = {
    "tune": tune,
    "collectives": collectives,
    "matmul": matmul,
    "overlap": overlap,
    "context": context,
    "experts": experts,
    "recipes": recipes,
    "meshes": meshes,
    "steps": steps,
    "whole": whole,
    "claims": check_claims,
    "machines": fit,
    "measured": measured,
    "referee": referee,
    "cluster": cluster,
    "wire": wire,
    "failures": failures,
    "soak": soak,
}


def main(argv: Sequence[str] | None = None, start: float | None = None) -> int:
    """Run one command; without one, the sweep over collectives.

    Args:
        argv: the arguments, by default those of the program.
        start: the time at which --budget begins, by default now.
    """
    parser = Parser(prog="python -m benchmarks", description=sweep.__doc__)
    sweep.add_arguments(parser)
    start = time.perf_counter() if start is None else start
    parser.set_defaults(run=sweep.run, error=parser.error, start=start)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_commands(commands, COMMANDS)
    try:  # check before the work, which would otherwise end in a traceback
        default_table()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main(start=START))
