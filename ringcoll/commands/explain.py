"""List the algorithms, with rounds, bytes and papers; or the plans of a program, with reasons.

    python -m ringcoll explain
    python -m ringcoll explain ring
    python -m ringcoll explain --function my.module:program --topology v5e:4x2

`my.module:program` is called with the mesh, as by `overlap`; nothing is compiled.

Formulas are for n ranks on one axis. They are found from counts at several n. Over several axes,
the rounds and messages of the axes add up. Bytes are what a rank sends, as a share of the full
vector.
"""

import argparse
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from ringcoll.commands import arguments, overlap
from ringcoll.costs.closed_forms import closed_form, prices, recognised
from ringcoll.debug.explaining import explain
from ringcoll.io.text import aligned, wrapped
from ringcoll.schedules.registry import (
    ALL_TO_ALLS,
    AS_ALL_REDUCE,
    GATHERS,
    STAGED,
    TOUR,
    ScheduleLike,
    Stages,
    build,
    listed_name,
)
from ringcoll.schedules.schedule import Schedule, ScheduleError
from ringcoll.schedules.tree import check_balanced, tree

#: The lists of algorithms, and the collectives that each serves.
LISTS: Mapping[str, tuple[tuple[str, ...], Mapping[str, Callable[..., Any]]]] = {
    "all-gather, reduce-scatter": (("all_gather", "psum_scatter", "psum", TOUR), GATHERS),
    "all-reduce only": (("psum",), STAGED),
    "all-to-all": (("all_to_all",), ALL_TO_ALLS),
}
SHOWN = 4  # ranks of the schedule that is printed


class About(NamedTuple):
    """The parts of the docstring of an algorithm: first line, `When:`, `Source:`, and all of it."""

    does: str
    when: str
    source: str
    docstring: str


def about(algorithm: Callable[..., Any]) -> About:
    """The docstring of an algorithm, in parts."""
    docstring = inspect.getdoc(algorithm) or ""
    does, *others = (" ".join(paragraph.split()) for paragraph in docstring.split("\n\n"))
    sections = dict(paragraph.partition(": ")[::2] for paragraph in others)
    return About(does, sections.get("When", ""), sections.get("Source", ""), docstring)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    known = dict.fromkeys(name for _, kind in LISTS.values() for name in kind)
    parser.add_argument(
        "name",
        nargs="?",
        choices=[*known, *AS_ALL_REDUCE.values()],
        metavar="NAME",
        help=", ".join(known),
    )
    parser.add_argument(
        "--function",
        type=arguments.program,
        metavar="MODULE:FUNCTION",
        help="your own program: print its plans",
    )
    overlap.add_mesh(parser)


def run(args: argparse.Namespace) -> int:
    """Print, and return the exit status."""
    if args.function and args.name:
        args.error("--function: a program has plans, not an algorithm; leave out the NAME")
    if args.function:
        _print_plans(args)
        return 0
    print(*wrapped(in_full(args.name) if args.name else index()), sep="\n")
    return 0


def _print_plans(args: argparse.Namespace) -> None:
    """Print the plans of the program that --function makes for a mesh of the topology."""
    jax.config.update("jax_platforms", "cpu")  # nothing runs, so ask for no accelerator
    try:
        mesh = overlap.mesh_on(args.topology, args.mesh)
        function, operands = overlap.program_on(args.function, mesh)
    except (ValueError, ModuleNotFoundError) as error:
        args.error(" ".join(str(error).split()))
    try:
        print(explain(function)(*operands))
    except Exception as error:  # from JAX, or the user's function
        args.error(f"cannot trace it: {arguments.in_a_line(error)}")


def index() -> Iterator[str]:
    """Every algorithm in a few lines."""
    for title, (served, kind) in LISTS.items():
        yield title
        for name, algorithm in kind.items():
            described, (rounds, sent) = about(algorithm), _counted(served[0], algorithm)
            yield f"  {name}: {described.does}"
            yield f"    rounds {rounds}; bytes {sent}"
            if kind is GATHERS and name in AS_ALL_REDUCE:
                yield f"    As an all-reduce: {AS_ALL_REDUCE[name]}"
            yield f"    When: {described.when}"
            if described.source:
                yield f"    Source: {described.source}"
        yield ""


def markdown() -> Iterator[str]:
    """The tables of docs/algorithms.md, which `python -m benchmarks claims --write` writes."""
    for title, (served, kind) in LISTS.items():
        yield f"| {title} | rounds | bytes | when |"
        yield "|---|---|---|---|"
        for name, algorithm in kind.items():
            counted, when = _counted(served[0], algorithm), about(algorithm).when.rstrip(".")
            cells = (_names(kind, name, quote="`"), *counted, when)
            yield f"| {' | '.join(cells)} |"
        yield ""


def in_full(name: str) -> Iterator[str]:
    """All about the algorithms of a name: their docstrings, schedules and prices."""
    for title, (served, kind) in LISTS.items():
        its_name = listed_name(served[0], name)
        if its_name not in kind:
            continue
        algorithm = kind[its_name]
        yield from (f"{_names(kind, its_name)} ({title})", "")
        yield from (*about(algorithm).docstring.splitlines(), "")
        yield f"At n = {SHOWN}, a line a round; every move as (shift, offsets):"
        yield from (f"  {line}" for line in _rounds(served[0], algorithm))
        yield ""
        if kind is not ALL_TO_ALLS:
            yield from (_additions(build(served[0], algorithm, (SHOWN,))), "")
        yield "Seconds for B bytes of the full vector (on a ring, if n > 2):"
        yield from aligned([row for name in served for row in _prices(name, algorithm)], left=3)
        yield ""


def _additions(schedule: Schedule | Stages) -> str:
    """The tree by which rank 0 adds, and whether `order=Tree(...)` takes it."""
    try:
        check_balanced(schedule)
    except ScheduleError:
        ends = "not balanced, so order=Tree(...) refuses it"
    else:
        ends = "balanced, so order=Tree(...) takes it"
    return f"At n = {SHOWN} the sum of rank 0 is {tree(schedule)}: {ends}."


def _names(kind: Mapping[str, Any], name: str, quote: str = "") -> str:
    """The name of an algorithm and, if it has another name as an all-reduce, that name."""
    other = AS_ALL_REDUCE.get(name) if kind is GATHERS else None
    added = f" (all-reduce: {quote}{other}{quote})" if other else ""
    return f"{quote}{name}{quote}{added}"


def _counted(collective: str, algorithm: ScheduleLike) -> tuple[str, str]:
    """Closed forms: rounds (with messages, if there are more of them), and bytes."""
    paid = prices(collective, algorithm)
    rounds, messages, sent = (
        str(recognised(counts) or "")
        for counts in (
            {n: p.rounds for n, p in paid.items()},
            {n: p.messages for n, p in paid.items()},
            {n: p.sent / n for n, p in paid.items()},
        )
    )
    return rounds if rounds == messages else f"{rounds} ({messages} messages)", sent


def _rounds(collective: str, algorithm: ScheduleLike) -> Iterator[str]:
    """The moves of each round, in a line."""
    built = build(collective, algorithm, (SHOWN,))
    for schedule in built if isinstance(built, tuple) else (built,):
        for moves in schedule.rounds:
            yield "  ".join(
                f"({move.shift:+d}, {[*move.offsets]})"
                + (f" on axis {move.axis}" if len(schedule.shape) > 1 else "")
                + (f" in lane {move.lane}" if schedule.lanes > 1 else "")
                for move in moves
            )


def _prices(collective: str, algorithm: ScheduleLike) -> Iterator[tuple[str, str, str]]:
    """The closed forms of the price on a switch and on a ring."""
    for network, on_a_ring in (("on a switch", False), ("on a ring", True)):
        form = closed_form(prices(collective, algorithm, on_a_ring))
        yield f"  {collective}", network, str(form or "-")
