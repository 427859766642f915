"""Compare whole training steps: ringcoll against the quickest form that the compiler has.

Each step is compiled in all its forms, alone and with sets of `ringcoll.overlap.OPTIONS`, for chips
that you need not have, and `ringcoll.overlap` computes its time. `benchmarks/pages/whole.md`
explains the forms; `benchmarks/pages/whole.json` keeps what was found.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product, starmap
from math import inf
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import jax

from benchmarks.compiled import compiling, program_cache
from benchmarks.compiled.programs import COMPILER, PLAIN
from benchmarks.compiled.whole_steps import (
    ALL_TO_ALLS,
    DATA,
    FSDP,
    OURS,
    OVERLAPPED,
    PIECES,
    TP,
    Step,
    program,
)
from benchmarks.machines.measured import PageTable, page_text, show
from benchmarks.measuring import options, report
from ringcoll import overlap
from ringcoll.commands.overlap import mesh_on
from ringcoll.io.files import write
from ringcoll.overlap.options import for_chip

PAGE = Path(__file__).parents[1] / "pages" / "whole.md"
FIGURES = PAGE.with_suffix(".json")
TOPOLOGIES = ("v5e:4x2", "v5p:2x2x2", "v6e:4x2", "tpu7x:2x2x1")
FORMS = (PLAIN, PIECES, ALL_TO_ALLS, COMPILER, OURS, OVERLAPPED)
NONE, SPARSE = "none", "sparse cores"
TRIED = (NONE, SPARSE, "collective matmuls")
#: A step is lost if ours takes this share longer than the quickest form of the compiler.
LOST = 0.03

_LLAMA = (4096, 14336)  # Llama 3 8B
STEPS = {
    "tp8-mlp8192": Step("gated_mlp", {TP: 8}, (1, 8192), 8192, 28672),
    "tp8-mlp4096": Step("gated_mlp", {TP: 8}, (4, 4096), *_LLAMA),
    "tp8-projections8192": Step("attention", {TP: 8}, (1, 8192), 8192, 8192),
    "tp8-block4096": Step("block", {TP: 8}, (4, 4096), *_LLAMA),
    "tp8-words4096": Step("gated_mlp", {TP: 8}, (4, 4096), *_LLAMA, vocabulary=128256),
    "data2-tp4-mlp4096": Step("gated_mlp", {DATA: 2, TP: 4}, (8, 4096), *_LLAMA),
    "data2-tp4-forward": Step("gated_mlp", {DATA: 2, TP: 4}, (8, 4096), *_LLAMA, forward=True),
    "fsdp2-tp4-mlp8192": Step("gated_mlp", {FSDP: 2, TP: 4}, (4, 4096), 8192, 28672),
    "fsdp2-tp4-block4096": Step("block", {FSDP: 2, TP: 4}, (8, 4096), *_LLAMA),
    "fsdp8-mlp4096": Step("gated_mlp", {FSDP: 8}, (8, 8192), *_LLAMA),
    "fsdp8-mlp8192": Step("gated_mlp", {FSDP: 8}, (8, 4096), 8192, 28672),
    "fsdp8-block4096": Step("block", {FSDP: 8}, (16, 4096), *_LLAMA),
    "fsdp8-context32768": Step("context", {FSDP: 8}, (1, 32768), *_LLAMA),
    "fsdp8-experts4096": Step("experts", {FSDP: 8}, (8, 4096), 4096, 4096),
}


class Which(NamedTuple):
    """A program: a step on a topology, in a form, compiled with a set of options."""

    step: str
    topology: str
    form: str
    set: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which programs to compile, and whether to write."""
    add, listed = parser.add_argument, options.listed
    what = f"compile these steps (none: show what is recorded): {', '.join(STEPS)}, or all"
    add("--only", type=listed(*STEPS), default=(), metavar="LIST", help=what)
    for name, known in {"topology": TOPOLOGIES, "form": FORMS, "set": TRIED}.items():
        what = f"{', '.join(known)} (all)"
        add(f"--{name}", type=listed(*known), default="all", metavar="LIST", help=what)
    what = f"record what was compiled in {FIGURES.name}, and write the tables of {PAGE.name}"
    add("--write", action="store_true", help=what)
    compiling.add_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Compile, print and write; 1 if a program was refused."""
    jax.config.update("jax_platforms", "cpu")  # nothing runs, so ask for no accelerator
    found = {Which(**row["which"]): row for row in json.loads(FIGURES.read_text("utf-8"))}
    chosen = starmap(Which, product(args.only, args.topology, args.form, args.set))
    todo = [which for which in chosen if is_program(which)]
    failed = []
    for which in report.progress(todo, len(todo), "compiling", " ".join):
        try:
            figures = compiled(which, args.cache)
        except Exception as error:  # a compiler may refuse a program; the others still count
            figures = {"refused": " ".join(str(error).split())[:160]}
            failed.append(f"{' '.join(which)}: {type(error).__name__}: {error}")
        found[which] = {"which": which._asdict(), **figures}
        if args.write:  # after each, as each takes long
            rows = (json.dumps(found[which]) for which in sorted(found))
            write(FIGURES, "[\n" + ",\n".join(rows) + "\n]\n")
    for table in tables(found):
        show(table)
    if args.write:
        write(PAGE, page_text(PAGE.read_text(encoding="utf-8"), tables(found), notes(found)))
    return compiling.print_failed(failed)


def is_program(which: Which) -> bool:
    """Whether the step has that form, and the chip that set, and not by default."""
    fits = which.set in (NONE, *for_chip(which.topology.partition(":")[0]))
    return which.form in STEPS[which.step].forms and fits


def compiled(which: Which, cache: str | None) -> dict[str, Any]:
    """What the report says of a program, in microseconds; and versions."""
    step = STEPS[which.step]
    made = program(step, which.form, mesh_on(which.topology, step.axes))
    flags = overlap.OPTIONS.get(which.set, {})
    of, _ = program_cache.compiled(cache, which.topology, *made, flags, profile=False)
    seen = overlap.report(of)
    times = {name: round(getattr(seen, name) * 1e6, 1) for name in ("total", "exposed")}
    return {**times, **program_cache.versions()}


def judged(step: str, topology: str) -> Which:
    """Ours as we recommend it: with the set "sparse cores", where it is not there by default."""
    with_set = Which(step, topology, OURS, SPARSE)
    return with_set if is_program(with_set) else with_set._replace(set=NONE)


def tables(found: Mapping[Which, Mapping]) -> list[PageTable]:
    """Every step, what we lose first; the means; and how near each form comes to the quickest."""
    timed = {which: row for which, row in found.items() if "total" in row}
    steps = sorted(compared(timed))

    def cells(which: Which) -> str:
        row = timed.get(which)
        return f"{row['total']:.0f}, {row['exposed'] / row['total']:.1%}" if row else ""

    rows = [
        (*ours[:2], _name(quickest), cells(quickest), cells(ours), f"{ratio:.3f}",
         cells(ours._replace(form=OVERLAPPED)))
        for ratio, quickest, ours in steps
    ]  # fmt: skip
    slower = _lost(ratio for ratio, *_ in steps)
    title = f"steps: {len(steps)}, of which ours is more than {LOST:.0%} slower in {slower}"
    names = "step", "topology", "quickest built-in form", "us, exposed", "ours", "it over ours"
    every = PageTable(title, (*names, "`overlapped`"), rows)
    return [every, _means(steps), _of_overlapped(timed), _forms(timed)]


def compared(timed: Mapping[Which, Mapping]) -> list[tuple[float, Which, Which]]:
    """Of each step: the quickest built-in form over ours, and what these two are."""
    steps = []
    for step, topology in product(STEPS, TOPOLOGIES):
        ours = judged(step, topology)
        others = [w for w in timed if w[:2] == ours[:2] and not w.form.startswith(OURS)]
        if ours in timed and others:
            quickest = min(others, key=lambda which: timed[which]["total"])
            steps.append((timed[quickest]["total"] / timed[ours]["total"], quickest, ours))
    return steps


def _lost(ratios: Iterable[float]) -> int:
    return sum(ratio < 1 / (1 + LOST) for ratio in ratios)


def _name(which: Which) -> str:
    return which.form if which.set == NONE else f"{which.form}, {which.set}"


def _means(steps: Sequence[tuple[float, Which, Which]]) -> PageTable:
    """How many times as fast ours is as the quickest built-in form, by machine and by kind."""
    kinds = {"tensor parallel": "tp8", "with data": "data2", "with FSDP": "fsdp2", "FSDP": "fsdp8"}
    groups = {"all": "", **{name: name for name in TOPOLOGIES}, **kinds}
    rows = []
    for name, of in groups.items():
        ratios = [ratio for ratio, _, ours in steps if " ".join(ours[:2]).find(of) >= 0]
        if ratios:
            mean, slower = geometric_mean(ratios), _lost(ratios)
            rows.append((name, f"{mean:.3f}", str(len(ratios)), str(slower)))
    title = "the quickest built-in form over ours: geometric means"
    return PageTable(title, ("steps", "mean", "how many", "slower"), rows)


def _of_overlapped(timed: Mapping[Which, Mapping]) -> PageTable:
    """How many times as fast `overlapped` makes the plain program, with the same options."""
    ratios = [
        timed[plain]["total"] / row["total"]
        for which, row in timed.items()
        if which.form == OVERLAPPED and (plain := which._replace(form=PLAIN)) in timed
    ]
    mean = f"{geometric_mean(ratios):.3f}" if ratios else ""
    title = "plain over `overlapped`, with the same options: geometric mean"
    return PageTable(
        title, ("mean", "steps", "slower"), [(mean, str(len(ratios)), str(_lost(ratios)))]
    )


def _forms(timed: Mapping[Which, Mapping]) -> PageTable:
    """Of each built-in form and set: how often it is the quickest, and how far off it is."""
    built = [which for which in timed if not which.form.startswith(OURS)]
    least: dict[Any, float] = {}
    for which in built:
        least[which[:2]] = min(timed[which]["total"], least.get(which[:2], inf))
    shares: dict[str, list[float]] = {}
    for which in sorted(built):
        shares.setdefault(_name(which), []).append(timed[which]["total"] / least[which[:2]])
    rows = [
        (name, str(len(of)), str(of.count(1)), f"{geometric_mean(of):.3f}")
        for name, of in shares.items()
    ]
    columns = ("form", "compiled", "quickest", "over the quickest, mean")
    return PageTable("built-in forms", columns, rows)


def notes(found: Mapping[Which, Mapping]) -> list[str]:
    """The versions of the figures; which steps have none; and the programs that were refused."""
    timed = {which: row for which, row in found.items() if "total" in row}
    by = sorted({f"jax {row['jax']}, libtpu {row['libtpu']}" for row in timed.values()})
    lines = [f"figures by {'; '.join(by) or 'none'}"]
    done = {ours[:2] for *_, ours in compared(timed)}
    for topology in TOPOLOGIES:
        if left := [step for step in STEPS if (step, topology) not in done]:
            lines.append(f"not compiled for {topology}: {', '.join(left)}")
    refused = {which: row["refused"] for which, row in found.items() if "refused" in row}
    return lines + [f"refused: {' '.join(which)}: {why}" for which, why in refused.items()]
