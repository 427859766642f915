"""Compute the compiled figures of the pages again, and compare them with the claims.

Without a flag, it computes only the headline figures, those of docs/matmuls.md. Nothing runs on a
TPU or GPU, and no time is measured. `claims.json` holds the claims with their commands, versions
and tolerances; `pages.toml` says which pages show them. A claim is for the versions of JAX and of
the compiler that it names; programs without a claim for the installed versions are counted and left
out. The exit status is 1 if a program fails or has no claim for any version, or if its time is off
by more than 2 %, its exposure by more than one point, or its temporaries by more than 2 % (and 1
MiB).
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_context

import jax

from benchmarks.compiled import compiling, pages, recorded_claims
from benchmarks.compiled.pages import PageTable
from benchmarks.compiled.recorded_claims import Claim, ClaimedProgram
from benchmarks.measuring import report
from ringcoll.commands.arguments import count, in_a_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which claims to compute, and what to do with the figures."""
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    names = [table.name for table in pages.tables()]
    which.add_argument("--all", action="store_true", help="every claim")
    which.add_argument(
        "--table", choices=names, action="append", metavar="NAME", help=", ".join(names)
    )
    compiling.add_cache(parser)
    what = "compile in N processes at a time (1)"
    add("--jobs", type=count, default=1, metavar="N", help=what)
    what = "only programs that changed since their claim, or have none for these versions"
    add("--changed", action="store_true", help=what)
    add("--update", action="store_true", help="save the new figures as claims, and write the pages")
    add("--write", action="store_true", help="only write the pages from the claims")


def run(args: argparse.Namespace) -> int:
    """Find and compare figures, or write pages, and return the exit status."""
    _ask_for_no_accelerator()
    every, claims = pages.tables(), recorded_claims.load()
    if args.write:
        return _write(every, claims)
    asked = [table for table in every if args.all or table.name in (args.table or ())]
    programs = pages.programs(asked) if asked else pages.headline(every)
    todo = list(dict.fromkeys(programs))
    known = here(claims)
    if args.changed:
        asked_for, todo = todo, [which for which in todo if _has_changed(which, known)]
        print(f"{len(asked_for) - len(todo)} of {len(asked_for)} programs have not changed")
        if not todo:
            return 0
    if args.update:
        return _find(args, todo, known, claims, every)
    without = [which for which in todo if which not in known]
    todo = [which for which in todo if which in known]
    if without:
        print(f"left out: {len(without)} programs without a claim for {_versions()}")
    if not todo:
        args.error(f"there are no claims for {_versions()}; --update saves what is found")
    status = _find(args, todo, known, claims, every)
    never = set(without) - {one.which for one in claims}
    if never:
        print(f"{len(never)} of these have no claim for any version: claims --changed --update")
    return 1 if never else status


def _has_changed(which: ClaimedProgram, known: Mapping[ClaimedProgram, Claim]) -> bool:
    claimed = known.get(which)
    return (
        claimed is None or claimed.digest is None or claimed.digest != recorded_claims.digest(which)
    )


def here(claims: Iterable[Claim]) -> dict[ClaimedProgram, Claim]:
    """The claims for the installed versions."""
    return {
        one.which: one
        for one in claims
        if (one.jax, one.compiler) == (jax.__version__, recorded_claims.compiler())
    }


def _find(
    args: argparse.Namespace,
    todo: Sequence[ClaimedProgram],
    known: dict[ClaimedProgram, Claim],
    claims: list[Claim],
    every: Sequence[PageTable],
) -> int:
    table = report.table("program", "claimed us", "%", "now us", "%", "off by", "")
    status = 0
    bar = report.progress(todo, len(todo), "compiling", lambda which: which.command)
    for which, now in zip(bar, _figures(todo, args.cache, args.jobs), strict=True):
        claimed = known.get(which)
        if isinstance(now, str):
            table.add_row(which.command, *_cells(claimed), "", "", "", f"failed: {now}")
            status = 1
            continue
        words = claimed.off(now) if claimed else []
        apart = f"{now.total_us / claimed.total_us - 1:+.1%}" if claimed else ""
        table.add_row(which.command, *_cells(claimed), *_cells(now), apart, ", ".join(words))
        if args.update:
            kept = [
                one
                for one in claims
                if (one.which, one.jax, one.compiler) != (which, now.jax, now.compiler)
            ]
            claims = [*kept, replace(now, digest=recorded_claims.digest(which))]
            recorded_claims.save(claims)
        elif words:
            status = 1
    report.show(f"Claims for {_versions()}", table)
    return max(status, _write(every, claims)) if args.update else status


def _figures(todo: Sequence[ClaimedProgram], cache: str | None, jobs: int) -> Iterator[Claim | str]:
    """The figures of each program in order, or in a line why it failed."""
    if jobs == 1:
        yield from (_figures_of(which, cache) for which in todo)
        return
    # JAX has threads, so a process cannot be forked.
    with ProcessPoolExecutor(jobs, get_context("spawn"), _ask_for_no_accelerator) as pool:
        yield from pool.map(_figures_of, todo, repeat(cache))


def _ask_for_no_accelerator() -> None:
    """Use the CPU in this process: nothing runs."""
    jax.config.update("jax_platforms", "cpu")


def _figures_of(which: ClaimedProgram, cache: str | None) -> Claim | str:
    try:
        return recorded_claims.find(which, cache)
    except Exception as error:  # a compiler may refuse a program; the others still count
        return in_a_line(error)


def _cells(of: Claim | None) -> tuple[str, str]:
    if of is None:
        return "", ""
    return f"{of.total_us:.0f}", f"{of.exposed_percent:.1f}"


def _write(every: Sequence[PageTable], claims: Sequence[Claim]) -> int:
    changed, unclaimed = pages.write_pages(every, claims)
    for page in changed:
        print(f"written: {page}")
    for name, number in unclaimed.items():
        print(f"not written: {name!r}: {number} of its programs have no claim")
    return 1 if unclaimed else 0


def _versions() -> str:
    return f"jax {jax.__version__}, {recorded_claims.compiler()}"
