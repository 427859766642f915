"""A report: what a program communicates and what of it is exposed, as text, JSON, a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike

from ringcoll.overlap.chips import Chip
from ringcoll.overlap.draw import draw
from ringcoll.overlap.timeline import Segment
from ringcoll.text import aligned

#: Rows that are printed; of more, those with the most exposed.
ROWS = 24


@dataclass(frozen=True, slots=True)
class Row:
    """A collective of the program, summed over the `count` times that it runs.

    bytes, hops and wire (seconds) are of one time; compute (seconds), flops and matmuls are
    what stands between start and done; bare is how often no matmul does.
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
    bare: int
    exposed: float


@dataclass(frozen=True)
class Report:
    """A program on one chip; see the package for the model. Times are in seconds.

    `timed` is false for CPU and GPU programs, of which the text tells the structure only:
    then every time is 0, and `exposed_share` counts collectives instead of seconds.
    `communication` is the time for which the busiest link is busy.
    """

    name: str
    chip: Chip | None
    ranks: int
    rows: tuple[Row, ...]
    total: float
    compute: float
    memory: float
    exposed: float
    communication: float
    flops: float
    sources: Mapping[str, float]
    temporaries: int | None
    program_bytes: int | None
    assumptions: tuple[str, ...]
    segments: tuple[Segment, ...]

    @property
    def timed(self) -> bool:
        return self.chip is not None

    @property
    def exposed_share(self) -> float:
        """Exposed over total time; untimed: the share of collectives with no matmul under them."""
        if self.timed:
            return self.exposed / self.total if self.total else 0.0
        count = sum(row.count for row in self.rows)
        return sum(row.bare for row in self.rows) / count if count else 0.0

    def __str__(self) -> str:
        return "\n".join(_table(self))

    def to_dict(self) -> dict:
        """All figures as plain data, without the segments."""
        fields = asdict(replace(self, segments=()))
        del fields["segments"]
        return {**fields, "timed": self.timed, "exposed_share": self.exposed_share}

    def to_json(self, indent: int | None = 2) -> str:
        """All figures as JSON, without the segments."""
        return json.dumps(self.to_dict(), indent=indent)

    def draw(self, path: str | PathLike[str], *below: "Report") -> None:
        """Draw the timeline, compute above the wire, as SVG or PNG.

        Args:
            path: of the file; its ending says which format.
            below: whose timelines are drawn below this one, on the same axis of time.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: there are no times to draw.
        """
        timelines = []
        for made in (self, *below):
            if made.chip is None:
                raise ValueError(
                    f"draw: {made.name} has no times to draw; only a TPU's program has"
                )
            title = f"{made.name} on {made.ranks} x {made.chip.name}: {_totals(made)[0]}"
            timelines.append((title, made.segments))
        draw(timelines, path)


def _table(report: Report) -> list[str]:
    """The collectives of a program, its totals and what is assumed, as lines of text."""
    shown = sorted(report.rows, key=lambda row: -row.exposed)[:ROWS]
    shown = [row for row in report.rows if row in shown]
    timed = report.timed
    cells: list[Sequence[str]] = [_TIMED if timed else _UNTIMED]
    cells += [_timed(row) if timed else _untimed(row) for row in shown]
    lines = [f"{report.name}: {report.ranks} x {report.chip.name if report.chip else 'device'}"]
    lines += aligned(cells, left=2) if report.rows else ["no collectives"]
    if len(shown) < len(report.rows):
        lines.append(f"... and {len(report.rows) - len(shown)} more, with less exposed")
    lines += ["", *_totals(report), "", "assumed:"]
    lines += [f"  {assumption}" for assumption in report.assumptions]
    return lines


_WHAT = ("collective", "kind", "times", "MB")
_TIMED = (*_WHAT, "hops", "wire us", "under it us", "GFLOP", "exposed us")
_UNTIMED = (*_WHAT, "matmuls under it", "GFLOP", "bare")


def _what(row: Row) -> tuple[str, ...]:
    kind = row.kind if row.asynchronous else f"{row.kind} (blocks)"
    return row.name, kind, f"{row.count}", f"{row.bytes / 1e6:.2f}"


def _timed(row: Row) -> tuple[str, ...]:
    n = row.count or 1
    return (
        *_what(row),
        f"{row.hops or '-'}",
        f"{row.wire * 1e6:.1f}",
        f"{row.compute / n * 1e6:.1f}",
        f"{row.flops / n / 1e9:.1f}",
        f"{row.exposed / n * 1e6:.1f}",
    )


def _untimed(row: Row) -> tuple[str, ...]:
    n = row.count or 1
    return (
        *_what(row),
        f"{row.matmuls / n:g}",
        f"{row.flops / n / 1e9:.1f}",
        f"{row.bare}",
    )


def _totals(report: Report) -> list[str]:
    lines = []
    if report.timed:
        lines.append(
            f"total {report.total * 1e6:.0f} us = compute {report.compute * 1e6:.0f} + "
            f"memory {report.memory * 1e6:.0f} + exposed {report.exposed * 1e6:.0f} us "
            f"({report.exposed_share:.1%})"
        )
        bound = max(report.compute, report.communication)
        lines.append(
            f"communication {report.communication * 1e6:.0f} us on the busiest link; "
            f"{report.total / bound - 1 if bound else 0:.1%} above the longer of the two"
        )
    else:
        count, bare = (sum(getattr(row, key) for row in report.rows) for key in ("count", "bare"))
        lines.append(f"{count - bare} of {count} collectives have a matmul between start and done")
    sizes = [
        f"{what} {size / 2**20:.1f} MiB"
        for what, size in (("temporaries", report.temporaries), ("program", report.program_bytes))
        if size is not None
    ]
    if sizes:
        lines.append(", ".join(sizes))
    return lines
