"""Write the tables of the pages from claims.

`pages.toml` lists the tables. Rows and columns name flags. A cell shows the program whose flags
are those of its row, its column and the table's `where`, all together. If a flag has several
values, the cell shows the fastest of these programs. Besides flags, rows and columns have a
`title`, and a column may have:

  cell      a format with the names of `_fields`, instead of the table's
  over      flags of other programs: {ratio} is the least time of these over the time of the cell

A table has a `page`, a `run` (the command) and a `cell` (a format). It may have `bold` ("row" or
"column": the least time in it), `without` (flags of programs that do not exist or cannot be
compiled) and `headline` (flags of the programs that CI compiles again).

A page of `docs` may also have, up to `<!-- end -->`, the tables of algorithms after
`<!-- algorithms -->` (as `ringcoll.commands.explain.markdown` makes them), and a drawing after
`<!-- draw COLLECTIVE ALGORITHM N -->` (as `draw` prints it). A page with `<!-- options -->` has the
sets of compiler options; one with `<!-- rooms -->` a line for each room of the package, in its own
order.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.compiled.recorded_claims import Claim, ClaimedProgram, fastest
from ringcoll import draw
from ringcoll.commands import explain
from ringcoll.io.files import write
from ringcoll.overlap.options import SETS

FILE = Path(__file__).with_name("pages.toml")
ROOT = FILE.parents[2]
#: Matches the text between the marks of a table of algorithms.
ALGORITHMS = re.compile(r"(?<=<!-- algorithms -->\n).*?(?=<!-- end -->)", re.DOTALL)
_OPTIONS = re.compile(r"(?<=<!-- options -->\n).*?(?=<!-- end -->)", re.DOTALL)
#: Matches the line of a room: `| `room/` | ... |`.
ROOM = re.compile(r"^\| `(\w+(?:/|\.py))` \|.*$", re.MULTILINE)
_DRAWING = re.compile(r"(<!-- draw (\w+) (\w+) (\d+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_NO_FLAGS = ("title", "cell", "over")

Flags = Mapping[str, Any]


@dataclass(frozen=True)
class PageTable:
    """One table of a page; see the module."""

    name: str
    page: str
    run: str
    columns: Sequence[Flags]
    rows: Sequence[Flags]
    where: Flags
    jax: str
    cell: str
    bold: str = ""
    headline: Flags = field(default_factory=dict)
    without: Sequence[Flags] = ()

    def programs(self) -> Iterator[ClaimedProgram]:
        """All programs in the table."""
        for row, column in product(self.rows, self.columns):
            yield from self._cell(row, column)
            yield from self._over(row, column)

    def _cell(self, row: Flags, column: Flags) -> list[ClaimedProgram]:
        """The programs of a cell; it shows the fastest of them."""
        flags = {**self.where, **row, **column}
        named = {name: value for name, value in flags.items() if name not in _NO_FLAGS}
        several = [value if isinstance(value, list) else [value] for value in named.values()]
        combined = [dict(zip(named, one, strict=True)) for one in product(*several)]
        there = [
            one for one in combined if not any(left.items() <= one.items() for left in self.without)
        ]
        return [ClaimedProgram.of(self.run, one) for one in there]

    def _over(self, row: Flags, column: Flags) -> list[ClaimedProgram]:
        over = {**self.where, **column}.get("over")
        return self._cell(row, {**column, **over}) if over else []

    def lines(self, claims: Mapping[ClaimedProgram, Claim]) -> list[str]:
        """The table in Markdown.

        Raises:
            KeyError: a program has no claim.
        """
        head = ["", *(column["title"] for column in self.columns)]
        lines = [head, ["---"] * len(head)]
        for row in self.rows:
            cells = [self._cell_text(row, column, claims) for column in self.columns]
            lines.append([row["title"], *cells])
        return [*(_line(line) for line in lines), "", *self._caption(claims)]

    def _caption(self, claims: Mapping[ClaimedProgram, Claim]) -> list[str]:
        """The source of the figures, and the command that computes them again."""
        again = f'`python -m benchmarks claims --table "{self.name}"`'
        by = ", ".join([f"jax {self.jax}", *sorted({claims[w].compiler for w in self.programs()})])
        return [f"*Compiled*, {by}; by the compiler's estimates:", f"{again}."]

    def _cell_text(self, row: Flags, column: Flags, claims: Mapping[ClaimedProgram, Claim]) -> str:
        which = self._cell(row, column)
        if not which:
            return ""
        claim = fastest([claims[one] for one in which])
        fields = _fields(claim)
        if over := self._over(row, column):
            fields["ratio"] = (
                f"{fastest([claims[one] for one in over]).total_us / claim.total_us:.2f}"
            )
        elif claim.total_us == self._least(row, column, claims):
            fields["total"] = f"**{fields['total']}**"
        return str(column.get("cell", self.cell)).format(**fields)

    def _least(
        self, row: Flags, column: Flags, claims: Mapping[ClaimedProgram, Claim]
    ) -> float | None:
        """The least time in the row or column of a cell, as `bold` says; None without bold."""
        if not self.bold:
            return None
        columns = [one for one in self.columns if "over" not in one and "cell" not in one]
        among = (
            [(row, one) for one in columns]
            if self.bold == "row"
            else [(one, column) for one in self.rows]
        )
        return min(claims[one].total_us for place in among for one in self._cell(*place))


def _fields(claim: Claim) -> dict[str, str]:
    return {
        "total": f"{claim.total_us:.0f}",
        "exposed": f"{claim.exposed_percent:.0f}",
        "temporaries": f"{claim.temporaries / 2**20:.0f}",
    }


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |" if any(cells) else "|" + " |" * len(cells)


def tables(file: Path = FILE) -> list[PageTable]:
    """All tables."""
    read = tomllib.loads(file.read_text(encoding="utf-8"))
    return [PageTable(jax=read["jax"], **one) for one in read["table"]]


def programs(tables: Iterable[PageTable]) -> Iterator[ClaimedProgram]:
    """All programs in these tables."""
    return (which for table in tables for which in table.programs())


def headline(tables: Iterable[PageTable]) -> Iterator[ClaimedProgram]:
    """The programs in these tables that CI compiles again."""
    for table in tables:
        for which in table.programs():
            flags = dict(which.flags)
            if table.headline and all(flags[name] in of for name, of in table.headline.items()):
                yield which


def page_text(
    page: str, tables: Sequence[PageTable], claims: Sequence[Claim]
) -> tuple[str, dict[str, int]]:
    """The text of a page, with its tables written again.

    Returns:
        The text; and, by table, how many of its programs have no claim. Such a table is not
        changed.

    Raises:
        ValueError: the page has no place for a table, or has a place for one that is not listed.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    listed = {table.name: table for table in tables if table.page == page}
    places = sorted(re.findall(r"<!-- table (.*?) -->", text))
    if places != sorted(listed):
        raise ValueError(
            f"{page} has places for the tables {places}, but {FILE.name} lists {sorted(listed)}; "
            "write <!-- table NAME --> and <!-- end --> around each"
        )
    unclaimed: dict[str, int] = {}
    for name, table in listed.items():
        shown = {one.which: one for one in claims if one.jax == table.jax}
        if missing := {which for which in table.programs() if which not in shown}:
            unclaimed[name] = len(missing)
            continue
        start = text.index(f"<!-- table {name} -->\n")
        stop = text.index("<!-- end -->", start)
        lines = "\n".join([f"<!-- table {name} -->", *table.lines(shown), ""])
        text = text[:start] + lines + text[stop:]
    return text, unclaimed


def write_pages(
    tables: Sequence[PageTable], claims: Sequence[Claim]
) -> tuple[list[str], dict[str, int]]:
    """Write the tables into their pages, including the tables of algorithms and the drawings.

    Returns:
        The pages that changed; and missing claims, as `page_text`.
    """
    changed: list[str] = []
    unclaimed: dict[str, int] = {}
    for page in dict.fromkeys(table.page for table in tables):
        text, missing = page_text(page, tables, claims)
        unclaimed |= missing
        if text != (ROOT / page).read_text(encoding="utf-8"):
            write(ROOT / page, text)
            changed.append(page)
    for path in sorted(ROOT.glob("docs/**/*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := with_rooms(with_algorithms(text))) != text:
            write(path, new)
            changed.append(str(path.relative_to(ROOT)))
    return changed, unclaimed


def with_algorithms(text: str) -> str:
    """The text of a page, with its tables and drawings, but for those of claims, made again."""
    lines = "\n".join(explain.markdown()).strip() + "\n"
    text = _OPTIONS.sub(lambda _: "\n".join([*_sets(), ""]), text)
    return _DRAWING.sub(_drawing, ALGORITHMS.sub(lambda _: lines, text))


def _sets() -> Iterator[str]:
    """The table of sets of compiler options."""
    yield from map(_line, (["set", "for", "what it does", "not with"], ["---"] * 4))
    for name, one in SETS.items():
        chips = (chip + ", by default" * (chip in one.get("default", "")) for chip in one["chips"])
        link = f"[{name}]({one['source']})"
        yield _line([link, "; ".join(chips), one["does"], one.get("clashes", "")])


def with_rooms(text: str) -> str:
    """The text of a page, with the line of each room made again: what it is, files, lines.

    Lines are to the nearest 50, so that the page does not change with every commit.
    """
    head, mark, rest = text.partition("<!-- rooms -->\n")
    return head + mark + ROOM.sub(lambda found: _room(found[1]), rest)


def _room(name: str) -> str:
    place = ROOT / "ringcoll" / name
    sources = [path.read_text(encoding="utf-8") for path in place.rglob("*.py")]
    about = (place / "__init__.py" if sources else place).read_text(encoding="utf-8")
    words = ast.get_docstring(ast.parse(about)) or ""
    sentence = " ".join(re.split(r"(?<=\.)\s", words, maxsplit=1)[0].split())
    sources = sources or [about]
    lines = 50 * round(sum(source.count("\n") for source in sources) / 50)
    return f"| `{name}` | {sentence} | {len(sources)} | {lines} |"


def _drawing(found: re.Match[str]) -> str:
    mark, collective, algorithm, n = found.groups()
    drawing = draw.as_text(draw.plan(collective, algorithm, (int(n),)))
    return f"{mark}```text\n{drawing.strip()}\n```\n"
