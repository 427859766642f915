"""Compile a program for chips that you need not have, and report its exposed communication.

    python -m ringcoll overlap --topology v5e:4x2 --example all_gather_matmul
    python -m ringcoll overlap --topology v5e:8 --example ring_matmul --trace trace.json
    python -m ringcoll overlap --topology v6e:8 --function my:program --options "sparse cores"
    python -m ringcoll overlap --topology v5p:2x2x2 --function my.module:program --json > old.json
    python -m ringcoll overlap --topology v5p:2x2x2 --function my.module:program --against old.json
    python -m ringcoll overlap new.json --against old.json
    python -m ringcoll overlap --text DUMP  # a text, or the folder that --xla_dump_to names

`my.module:program` is called with the mesh. It returns a function and its operands, which are
`jax.ShapeDtypeStruct`s; they, or a `shard_map`, name that mesh. The exit status is 1 if more is
exposed than --max-exposed allows. An example that overlaps is compared with its plain form.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from ringcoll.commands import arguments
from ringcoll.commands.overlap_examples import NAMES, PLAIN, SIZES, Example, example
from ringcoll.io import files
from ringcoll.io.text import choose
from ringcoll.overlap.budget import TOTAL, breaches, limits
from ringcoll.overlap.chips import CHIPS, chip
from ringcoll.overlap.comparison import compare
from ringcoll.overlap.compilation import compile_for
from ringcoll.overlap.options import OPTIONS
from ringcoll.overlap.program import Program, program_of
from ringcoll.overlap.reading import report
from ringcoll.overlap.report import Report
from ringcoll.overlap.wastes import waste
from ringcoll.placement.meshes import mesh

#: Options that name a file, and how it is written. Several reports are drawn one above the other.
_FILES: dict[str, tuple[str, Callable[..., None]]] = {
    "draw": (
        "draw the timeline, as SVG",
        lambda file, first, *below: first.draw(file, *below),
    ),
    "trace": (
        "the timeline as JSON for ui.perfetto.dev or chrome://tracing",
        lambda file, first, *below: files.write(file, first.to_perfetto(*below)),
    ),
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
    named: dict[str, Any] = dict(axes)
    return mesh(topology, axis_types=(AxisType.Auto,) * max(len(axes), 1), **named)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_mesh(parser)
    add_program(parser).add_argument(
        "saved",
        type=_read_report,
        nargs="?",
        metavar="FILE",
        help="a report that --json wrote; nothing is compiled",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="use the cycles of the generated code instead of the compiler's estimates (a minute)",
    )
    add_options(parser)
    for name, (what_it_is, _) in _FILES.items():
        parser.add_argument(f"--{name}", type=arguments.File, metavar="FILE", help=what_it_is)
    parser.add_argument(
        "--against",
        type=_read_report,
        metavar="FILE",
        help="print what changed since this report, which --json wrote (default for an example "
        "that overlaps: its plain form, which pictures and traces then show above it)",
    )
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument(
        "--waste", action="store_true", help="print what is sent without need, and the cure"
    )
    printed.add_argument(
        "--json", action="store_true", help="print JSON instead of a table and a comparison"
    )
    parser.add_argument(
        "--compute", action="store_true", help="print the compute of each line, too"
    )
    parser.add_argument(
        "--details", action="store_true", help="print MB, hops and GFLOP of each line, too"
    )
    parser.add_argument(
        "--text",
        type=lambda path: path if Path(path).exists() else arguments.File(path),
        metavar="PATH",
        help="write the scheduled program to PATH; if no program is named, read it from there: a "
        "file, or the folder that --xla_dump_to names (with --mesh if its groups need one)",
    )
    parser.add_argument("--chip", choices=CHIPS, help="the chip to price for; of a --text, needed")
    parser.add_argument(
        "--max-exposed",
        type=share,
        action="append",
        default=[],
        metavar="[KIND=]SHARE",
        help="the share of the time that may be exposed, such as 0.05, or the exit status is 1; "
        "all-gather=0.01 limits one kind; may be repeated",
    )


def add_program(parser: argparse.ArgumentParser) -> Any:
    """Declare --example, --function, --shape and --kernel; the group of the first two."""
    what = parser.add_mutually_exclusive_group()
    known = ", ".join(NAMES)
    what.add_argument("--example", choices=NAMES, metavar="EXAMPLE", help=known)
    what.add_argument(
        "--function",
        type=arguments.program,
        metavar="MODULE:FUNCTION",
        help="your own program",
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
        "--kernel",
        type=share,
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="what one run of a kernel takes, as you measured it, such as splash*=2e-3; may be "
        "repeated",
    )
    return what


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare --options, which `compiler_options` reads."""
    parser.add_argument(
        "--options",
        action="append",
        default=[],
        metavar="SET|NAME=VALUE",
        help=f"of the compiler: a published set ({', '.join(OPTIONS)}), or one; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Compile, print, draw, and return the exit status."""
    jax.config.update("jax_platforms", "cpu")  # nothing runs, so ask for no accelerator
    args.options = compiler_options(args)
    compiles = args.example or args.function
    if not (compiles or args.saved or args.text):
        args.error("one of the arguments --example --function FILE is required, or --text to read")
    if compiles and args.text:  # it will be written
        args.text = arguments.File(args.text)
        arguments.check_files(args)
    of_programs = args.text or args.waste or args.chip or args.kernel
    if (args.profile or args.options or (args.saved and of_programs)) and not compiles:
        words = "--profile and --options, and with a saved report --text, --waste, --chip, --kernel"
        args.error(f"nothing is compiled; leave out {words}, or name an --example or a --function")
    program, last, before = None, args.saved, args.against
    try:
        shares = limits("--max-exposed", dict(args.max_exposed) or None)
        if not (compiles or last):
            program = program_of(args.text, mesh_of(args) if args.mesh else None)
            last = report(program, chip=args.chip, kernels=dict(args.kernel))
        elif compiles:
            if sys.stderr.isatty():
                print(f"compiling for {args.topology}: seconds, or minutes", file=sys.stderr)
            chips = mesh_of(args)
            if args.example in PLAIN and not (before or args.json):
                plain = example_or_function(args, PLAIN[args.example], chips)
                _, before = _compile_and_report(args, *plain)
            form = example_or_function(args, args.example, chips)
            program, last = _compile_and_report(args, *form)
        compared = compare(before, last) if before else ""
    except (ValueError, ModuleNotFoundError) as error:
        args.error(" ".join(str(error).split()))
    if args.json:
        print(last.to_json())
    else:
        print(last.details() if args.details else last)
        if args.compute:
            print(f"\n{last.compute_by_line()}")
        if compared:
            print(f"\n{compared}")
        if args.waste:
            none = "no waste was found" + " in what could be read" * bool(last.unread)
            print("", *(waste(program, allow_unread="*") or [none]), sep="\n")
    if args.text and compiles and program:
        arguments.write(args.text, program.text)
    reports = [report for report in (before, last) if report and report.segments] or [last]
    for name, (_, write) in _FILES.items():
        if file := getattr(args, name):
            try:
                write(file, *reports)
                print(f"wrote {file}", file=sys.stderr)
            except ValueError as error:  # there are no times to draw
                args.error(str(error))
    broken = breaches(last, shares, {}, 1, ()) if shares else []
    print(*broken, sep="\n", end="\n" * bool(broken), file=sys.stderr)
    return 1 if broken else 0


def mesh_of(args: argparse.Namespace) -> Mesh:
    """The mesh of --topology and --mesh.

    Raises:
        ValueError: the constants of these TPUs are not known; or as `ringcoll.mesh`.
    """
    chips = mesh_on(args.topology, args.mesh)
    kind = chips.devices.flat[0].device_kind
    if kind.startswith("TPU") and chip(kind) is None:
        raise ValueError(
            f"--topology {args.topology}: the constants of this chip are not known, only those of "
            f"{', '.join(CHIPS)}; name one of these, such as v5e:4x2"
        )
    return chips


def example_or_function(args: argparse.Namespace, name: str | None, chips: Mesh) -> Example:
    """The example of a name, or else the program of --function, on a mesh.

    Raises:
        ValueError: as `program_on`.
    """
    return example(name, chips, args.shape) if name else program_on(args.function, chips)


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
        "a tuple of its operands (a schedule is for draw, cost and export)"
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
            compiler_options=args.options,
        )
    except Exception as error:  # from JAX, the compiler, or the user's function
        words = f"cannot compile it: {arguments.in_a_line(error)}"
        if args.function and isinstance(error, TypeError):
            words += "; let --function return operands that fit its function"
        raise ValueError(words) from error
    return program, report(program, chip=args.chip, kernels=dict(args.kernel))


def _read_report(text: str) -> Report:
    """Read a report that --json wrote.

    Raises:
        argparse.ArgumentTypeError: the file cannot be read, or is not a report.
    """
    try:
        return Report.from_json(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "it holds something else, or another version wrote it")
        raise argparse.ArgumentTypeError(
            f"{text!r} is no report that --json wrote: {why}; make it again with --json > FILE"
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


def compiler_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of --options together; ends the program if they are not known, or clash."""
    together: dict[str, Any] = {}
    for text in args.options:
        option, equals, value = text.partition("=")
        if not equals and text not in OPTIONS:
            cure = f"{choose(text, OPTIONS)}, or write NAME=VALUE"
            args.error(f"--options {text!r} is no set of options; {cure}")
        one = {option: {"true": True, "false": False}.get(value.lower(), value)}
        for name, value in (one if equals else OPTIONS[text]).items():
            if str(together.setdefault(name, value)).lower() != str(value).lower():
                args.error(f"--options {text}: {name} is {together[name]} too; leave one out")
    return together


def share(text: str) -> tuple[str, float]:
    """Read KIND=SHARE, a limit of `assert_overlapped`; one share for all; or NAME=SECONDS."""
    kind, _, value = text.rpartition("=")
    return kind or TOTAL, float(value)
