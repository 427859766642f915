"""Compare steps that others measured on TPUs with what the report says of the same shapes.

The program is `examples.decoder_step` with the sizes, shardings and options of a published step;
`ringcoll.overlap` computes its time. `benchmarks/pages/steps.json` has the published steps, and
beside each what was predicted, or why nothing was; `benchmarks/pages/steps.md` explains the tables.
Large models take many minutes and gigabytes to compile.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType

import ringcoll
from benchmarks.compiled import compiling, program_cache
from benchmarks.machines.measured import PageTable, page_text, show
from benchmarks.measuring import options, report
from examples import decoder_step
from ringcoll import overlap
from ringcoll.io.files import write

PAGE = Path(__file__).parents[1] / "pages" / "steps.md"
DATA = PAGE.with_suffix(".json")
NEAR = 0.85, 1.15  # predicted over measured
DIFFERENT = 0.01  # a smaller share between measured times has no sign


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which steps to compile, and whether to write."""
    names = options.listed(*(step["name"] for step in read()["steps"]))
    what = "compile these again, with commas between (none: show what is recorded)"
    parser.add_argument("--only", type=names, default=(), metavar="NAME", help=what)
    what = f"record what was compiled in {DATA.name}, and write the tables of {PAGE.name}"
    parser.add_argument("--write", action="store_true", help=what)
    compiling.add_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Compile, print and write; 1 if a program was refused."""
    jax.config.update("jax_platforms", "cpu")  # nothing runs, so ask for no accelerator
    data = read()
    failed = []
    todo = [step for step in data["steps"] if step["name"] in args.only]
    for step in report.progress(todo, len(todo), "compiling", lambda step: step["name"]):
        step.pop("predicted", step.pop("not_compiled", None))
        try:
            step["predicted"] = predicted(data, step, args.cache)
        except Exception as error:  # a compiler may refuse a program; the others still count
            step["not_compiled"] = " ".join(str(error).split())[:160]
            failed.append(f"{step['name']}: {type(error).__name__}: {error}")
        if args.write:  # after each, as each takes long
            write(DATA, as_text(data))
    for table in tables(data):
        show(table)
    if args.write:
        write(PAGE, page_text(PAGE.read_text(encoding="utf-8"), tables(data), notes(data)))
    return compiling.print_failed(failed)


def read() -> dict[str, Any]:
    """The published steps, and what is recorded of them."""
    return json.loads(DATA.read_text(encoding="utf-8"))


def as_text(data: Mapping[str, Any]) -> str:
    """The data as JSON, with a line for each set of options, model, step and pair."""

    def part(of: Any) -> str:
        if isinstance(of, list):
            return "[\n" + ",\n".join(f"  {json.dumps(one)}" for one in of) + "\n ]"
        return "{\n" + ",\n".join(f'  "{k}": {json.dumps(v)}' for k, v in of.items()) + "\n }"

    return "{\n" + ",\n".join(f' "{name}": {part(of)}' for name, of in data.items()) + "\n}\n"


def program(data: Mapping[str, Any], step: Mapping) -> tuple[Callable, tuple, dict[str, str]]:
    """The program of a step, its operands, and the options of the compiler."""
    sizes = decoder_step.Sizes(
        **data["models"][step["model"]],
        rows=step["rows"],
        sequence=step["sequence"],
        **step.get("training", {}),
    )
    axes = dict(zip(decoder_step.AXES, step["mesh"], strict=True))
    mesh = ringcoll.mesh(step["topology"], **axes, axis_types=(AxisType.Auto,) * 2)
    sets = {**overlap.OPTIONS, **data["options"]}
    flags = {k: v for name in step["options"] for k, v in sets[name].items()}
    return *decoder_step.program(sizes, mesh), flags


def predicted(data: Mapping[str, Any], step: Mapping, cache: str | None) -> dict[str, Any]:
    """What the report says of a step, in seconds; the seconds to compile it; and versions."""
    made = program(data, step)
    compiled, seconds = program_cache.compiled(cache, step["topology"], *made, profile=False)
    seen = overlap.report(compiled)
    times = {name: round(getattr(seen, name), 4) for name in ("total", "exposed", "host")}
    return {**times, "compiling": round(seconds), **program_cache.versions()}


def tables(data: Mapping[str, Any]) -> list[PageTable]:
    """Every step, and every pair of steps."""
    steps = {step["name"]: step for step in data["steps"]}
    totals = {n: step["predicted"]["total"] for n, step in steps.items() if "predicted" in step}
    ratios = {name: total / steps[name]["measured"] for name, total in totals.items()}
    rows = []
    for name, step in steps.items():
        shape = f"{step['mesh'][0]} x {step['mesh'][1]}", f"{step['rows']} x {step['sequence']}"
        cells = name, step["model"], step["topology"], *shape, step["kept"]
        found = step.get("not_compiled", ""), ""
        if name in totals:
            waits = "{exposed:.2f}, {host:.2f}".format(**step["predicted"])
            found = f"{totals[name]:.2f} ({waits})", f"{ratios[name]:.3f}"
        rows.append((*cells, ", ".join(step["options"]), f"{step['measured']:.2f}", *found))
    judged = [ratio for name, ratio in ratios.items() if "profiled" not in steps[name]]
    near = sum(NEAR[0] <= ratio <= NEAR[1] for ratio in judged)
    title = f"steps: {len(ratios)} of {len(steps)} compiled, {near} of {len(judged)} near"
    names = "step", "model", "topology", "fsdp x tensor", "rows a device x sequence", "kept"
    columns = *names, "options", "measured s", "predicted s (exposed, host)", "ratio"
    return [PageTable(title, columns, rows), _pairs(data["pairs"], steps, totals)]


def _pairs(pairs: list, steps: Mapping[str, Mapping], totals: Mapping[str, float]) -> PageTable:
    """Steps that differ in one thing: the time of the second over that of the first."""
    rows, signs = [], []
    for first, second in pairs:
        measured = steps[second]["measured"] / steps[first]["measured"]
        predicted, sign = "", "not compiled"
        if {first, second} <= totals.keys():
            modelled = totals[second] / totals[first]
            predicted, sign = f"{modelled:.3f}", "too small to count"
            if abs(measured - 1) > DIFFERENT:
                signs.append((modelled - 1) * (measured - 1) > 0)
                sign = "right" if signs[-1] else "wrong"
        rows.append((first, second, f"{measured:.3f}", predicted, sign))
    columns = "first", "second", "second over first, measured", "predicted", "sign"
    return PageTable(f"pairs: {sum(signs)} of {len(signs)} with the right sign", columns, rows)


def notes(data: Mapping[str, Any]) -> list[str]:
    """The source of each step, with its note; and the versions that made the predictions."""
    steps = data["steps"]
    found = [step["predicted"] for step in steps if "predicted" in step]
    by = "; ".join(sorted({f"jax {of['jax']}, libtpu {of['libtpu']}" for of in found}))
    sources = (f"[{s['name']}]({s['source']}): {s.get('note', 'as published')}" for s in steps)
    return [f"predictions by {by or 'none'}", *sources]
