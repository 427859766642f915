"""Rows of a report: a collective of the program, all collectives of a line, and their table."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ringcoll.io.text import WIDTH
from ringcoll.overlap.lines import CALLS, Line

#: Stands for a line that the text does not name.
NO_LINE = "no line known"


@dataclass(frozen=True, slots=True)
class Row:
    """A collective of the program, which runs `count` times.

    bytes (what a rank sends, by an algorithm that sends the least), hops and wire (seconds) are of
    one run. The other figures are of the whole program. compute (seconds), flops and matmuls are
    those between start and done; without_matmul is how often none is between them; exposed is in
    seconds.

    source is the file and line of the call. op_name is JAX's name of the operation. at is a label,
    such as "train.py:41 psum, gradient". They are "" if the text does not name them. axes are those
    of the mesh along which it sends; empty if the mesh is not known. crossed is whether a product
    takes what is gathered, and gathers over a different axis too.
    """

    name: str
    kind: str
    asynchronous: bool
    count: int
    bytes: float
    hops: int
    wire: float
    compute: float
    flops: float
    matmuls: int
    without_matmul: int
    exposed: float
    source: str = ""
    op_name: str = ""
    at: str = ""
    axes: tuple[str, ...] = ()
    crossed: bool = False

    @property
    def asked(self) -> str:
        """Who asked for it: "ringcoll", "the program" (by `jax.lax`), or "the partitioner"."""
        if re.search(r"(^|[/(])ringcoll\.", self.op_name):
            return "ringcoll"
        return "the program" if Line(op_name=self.op_name).operation in CALLS else "the partitioner"


@dataclass(frozen=True, slots=True)
class LineWork:
    """The compute of a line, in seconds of the whole program; source and at are as in `Row`."""

    seconds: float
    source: str = ""
    at: str = ""

    kind: ClassVar[str] = "compute"


@dataclass(frozen=True)
class LineRows:
    """The rows of one kind of collective of one line."""

    at: str
    kind: str
    rows: Sequence[Row]

    def sum_of(self, figure: str) -> float:
        """The sum of a figure of the whole program, such as "exposed" or "count"."""
        return sum(getattr(row, figure) for row in self.rows)

    def mean_of(self, figure: str) -> float:
        """The mean of a figure of one run, such as "bytes" or "wire"."""
        total = sum(row.count * getattr(row, figure) for row in self.rows)
        return total / (self.sum_of("count") or 1)

    @property
    def name(self) -> str:
        """The line in words: "train.py:27 matmul_reduce_scatter, gradient"."""
        return self.at or NO_LINE

    @property
    def label(self) -> str:
        """The name, and the number of rounds: "train.py:27 matmul_reduce_scatter, 7 rounds"."""
        # What is sent both ways in one round has two rows, and one name.
        calls = {row.op_name.rpartition("ringcoll.")[2] for row in self.rows}
        spans = (re.search(r".*rounds? (\d+)(?: to (\d+))?", call) for call in calls)
        rounds = sum(int(span[2] or span[1]) - int(span[1]) + 1 for span in filter(None, spans))
        return f"{self.name}, {rounds} rounds" if rounds > 1 else self.name


def by_line(rows: Iterable[Row], whole: bool = False) -> list[LineRows]:
    """The rows of each line together, the most exposed line first.

    A line has kinds of collectives and passes; `whole`: all of them are together.
    """
    by_key = defaultdict(list)
    for row in rows:
        by_key[(row.source or row.at,) if whole else (row.source, row.at, row.kind)].append(row)
    lines = [LineRows(of_line[0].at, of_line[0].kind, of_line) for of_line in by_key.values()]
    return sorted(lines, key=lambda line: (-line.sum_of("exposed"), -line.sum_of("without_matmul")))


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table, at most `WIDTH` columns wide: numbers to the right, a kind, a label."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *numbers, kind, label in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(numbers, widths, strict=False)]
        start = "  ".join([*cells, f"{kind:<{widths[-2]}}", ""])
        room = WIDTH - len(start)
        file, _, rest = label.partition(" ")  # what is too long loses its middle, not its file
        short = f"{file} ...{rest[-max(1, room - len(file) - 4) :]}"[:room]
        yield start + (label if len(label) <= room else short)
