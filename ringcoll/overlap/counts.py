"""Count the collectives of a compiled program: `collectives` and `assert_collectives`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose

import numpy as np

from ringcoll.io.text import bytes_in_words, choose
from ringcoll.overlap.hlo import in_words
from ringcoll.overlap.lines import CALLS, Line
from ringcoll.overlap.program import Program
from ringcoll.overlap.reading import Reading, read
from ringcoll.overlap.rows import table_lines
from ringcoll.overlap.transfers import COLLECTIVES


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
        kind: the compiler's name, such as "all-gather".
        count: how often it runs: in a loop, once for each turn.
        bytes: what a rank sends in one run, by an algorithm that sends the least.
        axes: the axes of the mesh along which it sends; empty if the mesh is not known.
        asked: who asked for it: "the program", by a collective of `jax.lax`; "ringcoll"; or "the
            partitioner", because of shardings.
        at: the line of source and what it calls, such as "train.py:41 psum, gradient".
        source: the file with its folder, and the line.
        name: the name of the instruction.
    """

    kind: str
    count: int
    bytes: float
    axes: tuple[str, ...]
    asked: str
    at: str
    source: str
    name: str


def collectives(compiled: object, *, mesh: object = None) -> tuple[Collective, ...]:
    """The collectives of a compiled program, in the order in which they start.

    Collectives that the compiler joined into one are one. A loop whose number of turns is not known
    counts once. Of a conditional, only the branch counts that `report` takes for the worst.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`, on any platform, or its text; or
            the result of `lower(...)`, which is compiled first.
        mesh: the mesh that it was compiled for; needed only if its shardings do not name it.

    Raises:
        HloError: the text is not scheduled HLO, or does not fit the mesh.
        TypeError: `compiled` is not a program, or `mesh` is not a mesh.

    >>> total = ranks(lambda x: jax.lax.psum(x, "x"), out_specs=P())
    >>> for row in overlap.collectives(total.lower(jnp.ones(4))):
    ...     print(row.kind, row.count, row.bytes, row.axes, row.asked)
    all-reduce 1 6.0 ('x',) the program
    """
    return _rows(read(compiled, mesh, None, needs_chip=False))


@in_words()
def _rows(reading: Reading) -> tuple[Collective, ...]:
    rows = []
    for name, (sent, _) in reading.timeline.transfers.items():
        line, count = reading.lines.of(name), round(reading.timeline.tally[name, "count"])
        axes, asked = axes_along(sent.members, reading.program), _asked(line)
        row = Collective(sent.kind, count, sent.bytes, axes, asked, line.short, line.source, name)
        rows.append(row)
    return tuple(rows)


def axes_along(members: Sequence[Sequence[int]], program: Program) -> tuple[str, ...]:
    """The axes of the mesh along which ranks of one group differ."""
    found: set[str] = set()
    for group in members if program.axes else ():
        digits = np.unravel_index(group, tuple(program.axes.values()))
        pairs = zip(program.axes, digits, strict=True)
        found |= {name for name, digit in pairs if len(set(digit.tolist())) > 1}
    return tuple(name for name in program.axes if name in found)


def _asked(line: Line) -> str:
    if re.search(r"(^|[/(])ringcoll\.", line.op_name):
        return "ringcoll"
    return "the program" if line.operation in CALLS else "the partitioner"


def assert_collectives(
    compiled: object,
    counts: Mapping[str, int],
    bytes: Mapping[str, float] | None = None,
    *,
    mesh: object = None,
) -> None:
    """Assert how many collectives of each kind a compiled program runs, and what they send.

    A test with it notices when a change of shardings adds a gather, or a sum to each layer:

        overlap.assert_collectives(step.lower(*operands), {"all-gather": 2, "all-reduce": 1})

    Args:
        compiled, mesh: as for `collectives`.
        counts: how often collectives of each kind run. A kind that is not named must not run.
        bytes: the bytes that a rank sends by all collectives of a kind together; kinds that are not
            named may send any number.

    Raises:
        AssertionError: a number is a different one. The message lists all collectives: how often
            they run, kind, axes, bytes, who asked, and line.
        ValueError: there is no such kind.
        HloError, TypeError: as `collectives`.

    >>> total = ranks(lambda x: jax.lax.psum(x, "x"), out_specs=P())
    >>> overlap.assert_collectives(total.lower(jnp.ones(4)), {"all-reduce": 1}, {"all-reduce": 6})
    """
    for kind in (*counts, *(bytes or {})):
        if kind not in COLLECTIVES:
            raise ValueError(f"assert_collectives: kind {kind!r}: {choose(kind, COLLECTIVES)}")
    rows, wrong = collectives(compiled, mesh=mesh), []
    for kind in COLLECTIVES:
        of_kind = [row for row in rows if row.kind == kind]
        count, wanted = sum(row.count for row in of_kind), counts.get(kind, 0)
        if count != wanted:
            wrong.append(f"{kind} runs {count} times, not {wanted}")
        sent, limit = sum(row.count * row.bytes for row in of_kind), (bytes or {}).get(kind)
        if limit is not None and not isclose(sent, limit):
            wrong.append(f"{kind} sends {sent:.0f} bytes, not {limit:.0f}")
    if not wrong:
        return
    lines = [("times", "bytes", "along", "asked by", "collective", "line")]
    for row in rows:
        along, size = ", ".join(row.axes) or "-", bytes_in_words(row.bytes)
        line = row.at or "no line known"
        lines.append((str(row.count), size, along, row.asked, row.kind, line))
    there = table_lines(lines) if rows else ["the program has no collective"]
    raise AssertionError("\n".join([*wrong, "", *there]))
