"""Compile programs for machines that need not be here, and write tables and files about them."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import jax

from benchmarks.compiled import program_cache
from benchmarks.compiled.program_figures import Figures, hidden_of, print_counted, print_timed
from benchmarks.compiled.programs import DIRECTIONS, tuning
from benchmarks.measuring import files, options, report
from ringcoll import overlap
from ringcoll.commands.overlap import add_options, compiler_options
from ringcoll.placement import topology as topologies
from ringcoll.placement.gpus import is_named

#: Makes, from keywords that name a program, its function and operands for `overlap.compile_for`.
Make = Callable[..., tuple[Callable, tuple]]


def add_programs(
    parser: argparse.ArgumentParser,
    *,
    topology: str,
    shape: str,
    algorithms: Sequence[str],
    direction: str | None = None,
) -> None:
    """Declare which programs to compile, and what `add_arguments` declares.

    Args:
        parser: the parser of the command.
        topology, shape: the default, with commas between.
        algorithms: the names that are known; by default all are compiled.
        direction: the default; None if the command has no directions.
    """
    add = parser.add_argument
    what = f"topologies with commas between ({topology})"
    add("--topology", default=topology, metavar="LIST", help=what)
    sizes = options.shapes(shape.partition(",")[0].count("x") + 1)
    what = f"shapes with commas between ({shape})"
    add("--shape", type=sizes, default=shape, metavar="LIST", help=what)
    known = options.listed(*algorithms)
    what = f"{', '.join(algorithms)} (all)"
    add("--algorithm", type=known, default="all", metavar="LIST", help=what)
    if direction:
        known = options.listed(*DIRECTIONS)
        what = f"names with commas between ({direction})"
        add("--direction", type=known, default=direction, metavar="LIST", help=what)
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how to compile, and where to write the results."""
    add = parser.add_argument
    add("--profile", action="store_true", help="take times from the static profile (slow)")
    add_options(parser)
    options.add_json(parser, "what was found")
    what = "write the timeline of every program into this folder, as SVG"
    add("--draw", type=Path, metavar="DIR", help=what)
    add_cache(parser)


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Declare --cache."""
    what = "keep compiled programs in this folder, and reuse those that are in it"
    parser.add_argument("--cache", metavar="DIR", help=what)


def devices_of(args: argparse.Namespace) -> dict[str, int]:
    """The number of devices of each --topology; an unknown topology ends the program."""
    counts: dict[str, int] = {}
    try:
        counts = {name: len(topologies.devices(name)) for name in args.topology.split(",")}
    except (ValueError, ModuleNotFoundError) as error:
        args.error(f"--topology {args.topology}: {' '.join(str(error).split())}")
    return counts


def every(**flags: Iterable[str]) -> list[dict[str, str]]:
    """All combinations of the values of flags, as keywords; the last flag changes fastest."""
    return [dict(zip(flags, values, strict=True)) for values in product(*flags.values())]


def compile_all(args: argparse.Namespace, todo: Sequence[Mapping[str, str]], make: Make) -> int:
    """Compile every program, print a table, and return 1 if the compiler refused one.

    Args:
        args: the arguments, with those of `add_arguments`.
        todo: the keywords for `make`, which are also the first columns of the table; each has a
            topology and an algorithm.
        make: makes a program.
    """
    found, failed = find_all(args, todo, make)
    if timed := [one for one in found if one.timed]:
        print_timed(timed)
    if counted := [one for one in found if not one.timed or is_named(one.which["topology"])]:
        print_counted(counted)
    return print_failed(failed)


def find_all(
    args: argparse.Namespace, todo: Sequence[Mapping[str, str]], make: Make
) -> tuple[list[Figures], list[str]]:
    """The figures of each program, and a line for each refused one. Also write them to --json."""
    jax.config.update("jax_platforms", "cpu")  # nothing runs, so ask for no accelerator
    if args.draw:
        args.draw.mkdir(parents=True, exist_ok=True)
    found: list[Figures] = []
    failed: list[str] = []
    bar = report.progress(todo, len(todo), "compiling", lambda one: " ".join(one.values()))
    with report.until_interrupted(args, found, failed):
        for which in bar:
            try:
                found.append(_found(args, which, make))
            except Exception as error:  # a compiler may refuse a program; the others still count
                words = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                failed.append(f"{' '.join(which.values())}: {words}")
    files.write_json(args, [{**row.pop("which"), **row} for row in map(asdict, found)])
    return found, failed


def print_failed(failed: Sequence[str]) -> int:
    """Print a line for each refused program, and return the exit status."""
    for line in failed:
        report.console().print(f"[red]failed[/red] {line}")
    return 1 if failed else 0


def key(which: Mapping[str, str], make: Make) -> str:
    """A digest of everything that a program is compiled from; arguments as for `compile_one`."""
    return program_cache.key(*_compiled_from(which, make), profile=False)


def _compiled_from(
    which: Mapping[str, str], make: Make, options: Mapping[str, Any] | None = None
) -> tuple[str, Callable, tuple, Mapping[str, Any]]:
    """The topology, the function, its operands, and the options of the compiler."""
    function, operands = make(**which)
    topology = which["topology"]
    flags = {**tuning(topology, which["algorithm"]), **(options or {})}
    return topology, function, operands, flags


def compile_one(
    which: Mapping[str, str],
    make: Make,
    *,
    profile: bool = False,
    options: Mapping[str, Any] | None = None,
    cache: str | None = None,
) -> tuple[Figures, overlap.Program]:
    """The figures of a program, and the program.

    Args:
        which: as in `compile_all`.
        make: makes the program of `which`.
        profile: whether to take times from the static profile.
        options: options of the compiler, in addition to those of the algorithm.
        cache: a folder of compiled programs; see `benchmarks.compiled.program_cache`.

    Raises:
        Exception: whatever JAX or the compiler raises.
    """
    of = _compiled_from(which, make, options)
    program, seconds = program_cache.compiled(cache, *of, profile)
    seen = overlap.report(program)
    micro = 1e6
    found = Figures(
        dict(which),
        seen.total * micro,
        seen.exposed * micro,
        seen.communication * micro,
        seen.temporaries,
        seen.program_bytes,
        seconds,
        seen.timed,
        hidden_of(seen),
    )
    return found, program


def _found(args: argparse.Namespace, which: Mapping[str, str], make: Make) -> Figures:
    found, program = compile_one(
        which, make, profile=args.profile, options=compiler_options(args), cache=args.cache
    )
    if args.draw and found.timed:
        name = "-".join(which.values())
        path = args.draw / f"{name.replace(':', '-').replace('/', '-')}.svg"
        overlap.report(program).draw(path)
    return found
