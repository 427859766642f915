"""Compile a step in many forms, for chips that you need not have, and say which is the quickest.

    python -m ringcoll try --topology v6e:4x2 --function my.module:program
    python -m ringcoll try --topology v5p:2x2x2 --function my.module:program --write choices.json

`my.module:program` is called with the mesh, as by `overlap`. The forms are: the step as it is, also
with each published set of compiler options for the chip; `ringcoll.overlapped(step)`; and that with
another algorithm at one gather or sum after the other. Totals are those of `overlap`'s report.
Ctrl-C prints what was compiled until then.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from ringcoll.commands import arguments, overlap
from ringcoll.io.text import aligned, folded, wrapped
from ringcoll.overlap.chips import chip
from ringcoll.overlap.compilation import compile_for
from ringcoll.overlap.options import OPTIONS, for_chip
from ringcoll.overlap.reading import report
from ringcoll.overlap.report import Report
from ringcoll.transform.trying import Trial, quickest, tried


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    overlap.add_mesh(parser)
    overlap.add_program(parser).required = True
    parser.add_argument(
        "--budget",
        type=arguments.count,
        default="600",
        metavar="SECONDS",
        help="begin no other program after this time (default: %(default)s)",
    )
    parser.add_argument(
        "--write",
        type=arguments.File,
        metavar="FILE",
        help="write the algorithms of the quickest form, for ringcoll.overlapped(f, choices=FILE)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Compile, print, write, and return the exit status."""
    jax.config.update("jax_platforms", "cpu")  # nothing runs, so ask for no accelerator

    def report_of(form: Any, options: Mapping[str, Any]) -> Report:
        program = compile_for(args.topology, form, *operands, compiler_options=options)
        return report(program, kernels=dict(args.kernel))

    try:
        chips = overlap.mesh_of(args)
        f, operands = overlap.example_or_function(args, args.example, chips)
        sets = sets_for(chips.devices.flat[0].device_kind)
        trials = until_ctrl_c(args, tried(f, operands, report_of, sets, args.budget))
    except (ValueError, ModuleNotFoundError) as error:
        args.error(" ".join(str(error).split()))
    except Exception as error:  # from JAX, the compiler, or the user's function
        args.error(f"cannot compile it: {arguments.in_a_line(error)}")
    print(as_json(trials) if args.json else "\n".join(in_words(trials, args.write)))
    if args.write and (choices := quickest(trials).choices):
        arguments.write(args.write, json.dumps(choices, indent=2) + "\n")
    elif args.write:
        print(f"{args.write} is not written: the quickest form has no choices", file=sys.stderr)
    return 0


def sets_for(device: str) -> Mapping[str, Mapping[str, str]]:
    """The sets of options that are for a kind of device, and not on by default."""
    return {name: OPTIONS[name] for name in for_chip(getattr(chip(device), "name", ""))}


def until_ctrl_c(args: argparse.Namespace, trials: Iterable[Trial]) -> list[Trial]:
    """All trials, or those until Ctrl-C if there are any; each is printed on a terminal."""
    found: list[Trial] = []
    try:
        for trial in trials:
            found.append(trial)
            if not found[0].report.timed:
                args.error("the report has no times for this chip; name a TPU, such as v6e:4x2")
            if sys.stderr.isatty():
                print(f"{trial.name}: {trial.why or trial.report.summary}", file=sys.stderr)
    except KeyboardInterrupt:
        if not found:
            raise
        args.interrupted = True
    return found


def as_json(trials: Sequence[Trial]) -> str:
    """The trials, with the total of each and its parts in place of a report."""
    dicts = ({**vars(one), "report": one.report and _parts(one.report)} for one in trials)
    return json.dumps([*dicts], indent=2)


def in_words(trials: Sequence[Trial], file: str | None = None) -> Iterator[str]:
    """The table, what its rows are, what is not in it and why, and the lines to write."""
    compiled = [one for one in trials if one.report]
    plain, best = compiled[0], quickest(compiled)
    parts = dict.fromkeys(part for one in compiled for part in _parts(one.report))
    rows = [("form", *(f"{part} us" for part in parts), "times as fast")]
    for one in sorted(compiled, key=lambda one: one.report.total):
        figures = (f"{1e6 * _parts(one.report).get(part, 0.0):.0f}" for part in parts)
        rows.append((one.name, *figures, f"{plain.report.total / (one.report.total or 1):.3f}"))
    yield from (plain.report.title, "", *aligned(folded(rows)))
    below = []
    if sites := {one.name.partition(":")[0]: one.site for one in trials if one.site}:
        below += [
            "the row of a site is the quickest form until then, with another algorithm there:"
        ]
        below += [f"{number}: {site}" for number, site in sites.items()]
    for why in dict.fromkeys(one.why for one in trials if one.why):
        below.append(f"{', '.join(one.name for one in trials if one.why == why)}: {why}")
    if unknown := {x for one in compiled for x in (*one.report.unpriced, *one.report.unread)}:
        below.append(f"not priced, so totals are too low: {', '.join(sorted(unknown))}")
    yield from wrapped(["", *below] if below else [])
    yield ""
    if best is plain:
        yield "nothing that was tried is quicker than the step as it is"
    elif best.choices is None and any(one.choices is not None for one in compiled):
        yield f"the built-in wins: no form of overlapped is quicker than {best.name!r}:"
    else:
        yield f"the quickest is {best.name!r}:"
    if best.choices is not None:
        choices = f"{file!r}" if file else json.dumps(best.choices, indent=4)
        yield f"step = ringcoll.overlapped(step{f', choices={choices}' * bool(best.choices)})"
    if best.options:
        yield f'step = jax.jit(step, compiler_options=ringcoll.overlap.OPTIONS["{best.options}"])'


def _parts(report: Report) -> dict[str, float]:
    return {"total": report.total, **report.parts}
