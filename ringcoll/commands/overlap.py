"""Compile a program for chips that you need not have, and report its exposed communication.

    python -m ringcoll overlap --topology v5e:4x2 --example all_gather_matmul
    python -m ringcoll overlap --topology h200:8 --example all_gather_matmul --html page.html
    python -m ringcoll overlap --topology v5p:2x2x2 --function my.module:program --json > old.json
    python -m ringcoll overlap --topology v5p:2x2x2 --function my.module:program --against old.json
    python -m ringcoll overlap new.json --against old.json

`my.module:program` is called with the mesh. It returns a function and its operands, which are
`jax.ShapeDtypeStruct`s with a `NamedSharding` on that mesh. The exit status is 1 if a limit, such
as --max-exposed, is broken. An example that overlaps is compared with its plain form.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from ringcoll.commands import arguments, overlap_limits
from ringcoll.commands.overlap_examples import NAMES, PLAIN, SIZES, Example, example
from ringcoll.io import files
from ringcoll.overlap.chips import CHIPS, Chip, chip
from ringcoll.overlap.comparison import compare
from ringcoll.overlap.compilation import compile_for
from ringcoll.overlap.program import Program
from ringcoll.overlap.reading import report
from ringcoll.overlap.report import Report
from ringcoll.placement import gpus
from ringcoll.placement.meshes import mesh
from ringcoll.placement.topology import devices

_CONSTANTS = [field.name for field in fields(Chip) if field.name != "name"]


#: How the file of each option is written. Several reports are drawn one above the other.
_FILES: dict[str, Callable[..., None]] = {
    "draw": lambda file, first, *below: first.draw(file, *below),
    "html": lambda file, first, *below: files.write(file, first.to_html(*below)),
    "trace": lambda file, first, *below: files.write(file, first.to_perfetto(*below)),
}


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Declare --topology and --mesh."""
    parser.add_argument(
        "--topology",
        default="v5e:4x2",
        metavar="KIND:SIZE",
        help="chips, such as v5e:4x2, v5e:8, v5litepod-8, v5p:2x2x2, h200:8 (default: %(default)s)",
    )
    parser.add_argument(
        "--mesh",
        type=axes,
        default={},
        metavar="x=4,y=2",
        help="axes of the mesh (default: one axis x)",
    )


def mesh_on(topology: str, axes: Mapping[str, int] = MappingProxyType({})) -> Mesh:
    """A mesh of the topology whose axes are left to the compiler."""
    named: dict[str, Any] = dict(axes or {"x": len(devices(topology))})
    return mesh(topology, axis_types=(AxisType.Auto,) * len(named), **named)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_mesh(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    known = ", ".join(NAMES)
    what.add_argument("--example", choices=NAMES, metavar="EXAMPLE", help=known)
    what.add_argument(
        "--function",
        type=arguments.program,
        metavar="MODULE:FUNCTION",
        help="your own program",
    )
    what.add_argument(
        "saved",
        type=_read_report,
        nargs="?",
        metavar="FILE",
        help="a report that --json wrote; nothing is compiled",
    )
    shape = "x".join(map(str, SIZES))
    parser.add_argument(
        "--shape",
        type=arguments.matmul_sizes,
        default=shape,
        metavar="MxKxF",
        help="the shape of an example: [M, K] @ [K, F], or [M, F] @ [F, K] (default: %(default)s)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="use the cycles of the generated code instead of the compiler's estimates (a minute)",
    )
    add_option(parser)
    parser.add_argument(
        "--constant",
        type=_constant,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"a constant of the chip: {', '.join(_CONSTANTS)}; may be repeated",
    )
    parser.add_argument(
        "--draw",
        type=arguments.File,
        metavar="FILE",
        help="draw the timeline, as SVG",
    )
    parser.add_argument(
        "--html",
        type=arguments.File,
        metavar="FILE",
        help="the timeline as a page: zoom, and the line of source of each part",
    )
    parser.add_argument(
        "--trace",
        type=arguments.File,
        metavar="FILE",
        help="the timeline as JSON for ui.perfetto.dev or chrome://tracing",
    )
    parser.add_argument(
        "--against",
        type=lambda text: text if text in NAMES else _read_report(text),
        metavar="FILE",
        help="print what changed since this: a report that --json wrote, or an example, which "
        "pictures, pages and traces then show above the other (default for an example that "
        "overlaps: its plain form)",
    )
    parser.add_argument(
        "--details", action="store_true", help="print MB, hops and GFLOP of each line, too"
    )
    parser.add_argument(
        "--text", type=arguments.File, metavar="FILE", help="write the scheduled program to FILE"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a table; with --against, a list"
    )
    overlap_limits.add_arguments(parser)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Declare --option."""
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the compiler; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Compile, print, draw, and return the exit status."""
    jax.config.update("jax_platforms", "cpu")  # nothing runs, so ask for no accelerator
    budget = overlap_limits.budget(args)
    if args.saved and args.text:
        args.error("--text: a saved report has no program; name an --example or a --function")
    program, last, before = None, args.saved, args.against
    if args.example and not (before or args.json):
        before = PLAIN.get(args.example)
    try:
        if not args.saved or isinstance(before, str):
            if sys.stderr.isatty():
                print(f"compiling for {args.topology}: seconds, or minutes", file=sys.stderr)
            chips = mesh_on(args.topology, args.mesh)
            _check_chip(args, chips)
        if isinstance(before, str):
            _, before = _compile_and_report(args, *example(before, chips, args.shape))
        if args.example:
            program, last = _compile_and_report(args, *example(args.example, chips, args.shape))
        elif args.function:
            program, last = _compile_and_report(args, *program_on(args.function, chips))
        compared = compare(before, last) if before else ""
    except (ValueError, ModuleNotFoundError) as error:
        args.error(" ".join(str(error).split()))
    reports = [report for report in (before, last) if report]
    if args.json:
        dicts = [report.to_dict() for report in reports]
        print(json.dumps(dicts if before else dicts[0], indent=2))
    else:
        print(last.details() if args.details else last)
        if compared:
            print(f"\n{compared}")
    if args.text and program:
        files.write(args.text, program.text)
    for name, write in _FILES.items():
        if file := getattr(args, name):
            try:
                write(file, *([report for report in reports if report.segments] or [last]))
            except ValueError as error:  # there are no times to draw
                args.error(str(error))
    try:
        breaches = budget.breaches(last) if budget else []
    except ValueError as error:  # seconds are limited, but there are no times
        args.error(str(error))
    print(*breaches, sep="\n", end="\n" * bool(breaches), file=sys.stderr)
    return 1 if breaches else 0


def _check_chip(args: argparse.Namespace, mesh: Mesh) -> None:
    """Refuse a chip whose constants are not known, before anything is compiled.

    Raises:
        ValueError: they are not known; or --constant is given for GPUs, whose times are measured.
    """
    if gpus.is_named(args.topology):
        if args.constant:
            raise ValueError(f"--constant: {args.topology} is priced by measurements; leave it out")
        return
    try:
        chip(mesh.devices.flat[0].device_kind)
    except ValueError as error:
        known = ", ".join(CHIPS)
        raise ValueError(
            f"--topology {args.topology}: the constants of this chip are not known, only those of "
            f"{known}; name one of these, such as v5e:4x2"
        ) from error


def program_on(function: Callable[[Mesh], Any], mesh: Mesh) -> Example:
    """The program that a user's function makes for a mesh.

    Raises:
        ValueError: it does not return a function and operands.
    """
    returned = function(mesh)
    match returned:
        case (program, tuple() | list() as operands) if callable(program):
            return program, tuple(operands)
    raise ValueError(
        f"--function: {function.__name__} returned {repr(returned)[:80]}; return a function and "
        "a tuple of its operands"
    )


def _compile_and_report(
    args: argparse.Namespace, function: Callable, operands: tuple[Any, ...]
) -> tuple[Program, Report]:
    """Compile a program, and report its overlap.

    Raises:
        ValueError: JAX or the compiler refuses the program, or the report cannot read it.
    """
    try:
        program = compile_for(
            args.topology,
            function,
            *operands,
            profile=args.profile,
            compiler_options=dict(args.option),
        )
    except Exception as error:  # from JAX, the compiler, or the user's function
        words = f"cannot compile it: {arguments.in_a_line(error)}"
        for name, value in args.option:
            if name in str(error):
                words += f"; --option {name}={value}: give an option and a value that it knows"
        if args.function and isinstance(error, TypeError):
            words += "; let --function return operands that fit its function"
        raise ValueError(words) from error
    constants = dict(args.constant)
    changed = replace(chip(program.kind or ""), **constants) if constants else None
    return program, report(program, chip=changed)


def _read_report(text: str) -> Report:
    """Read a report that --json wrote.

    Raises:
        argparse.ArgumentTypeError: the file cannot be read, or is not a report.
    """
    try:
        return Report.from_json(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "it holds something else")
        raise argparse.ArgumentTypeError(
            f"{text!r} is no report that --json wrote: {why}; name its file, which --json > FILE "
            "writes, or an example"
        ) from error


def axes(text: str) -> dict[str, int]:
    """Read the axes of a mesh, major first, such as "x=4,y=2".

    Raises:
        argparse.ArgumentTypeError: it is not such a list, or names an axis twice.
    """
    parts = [part.partition("=") for part in text.split(",")]
    if not all(name and size.isdecimal() and int(size) for name, _, size in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh; write x=4,y=2")
    if len({name for name, _, _ in parts}) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} names an axis twice; write x=4,y=2")
    return {name: int(size) for name, _, size in parts}


def _option(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE, an option of the compiler; true and false become Python's."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an option with a value; write NAME=VALUE"
        )
    return name, {"true": True, "false": False}.get(value.lower(), value)


def _constant(text: str) -> tuple[str, float]:
    """Read NAME=VALUE, a constant of the chip."""
    name, _, value = text.partition("=")
    if name not in _CONSTANTS:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(_CONSTANTS)}")
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: {value!r} is not a number above 0")
    return name, number
