"""A report of the collectives of a program and their exposed time: text, JSON, a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike

from ringcoll.io.text import aligned
from ringcoll.overlap.chart import draw
from ringcoll.overlap.chips import Chip, Gpu
from ringcoll.overlap.inline import as_html
from ringcoll.overlap.page import Drawn, as_page
from ringcoll.overlap.timeline import Segment
from ringcoll.overlap.trace import as_trace

#: The most rows that are printed. If there are more, those with the most exposed time are.
ROWS = 24
#: Properties of a row that are figures of one run.
_EACH = ("compute_each", "flops_each", "exposed_each")


@dataclass(frozen=True, slots=True)
class Row:
    """A collective of the program, which runs `count` times.

    bytes, hops and wire (seconds) are of one run. The other figures are of the whole program.
    compute (seconds), flops and matmuls are those between start and done; bare is how often no
    matmul is between them; exposed is in seconds. Properties that end in `_each` are of one run.

    source is the file and line of the call. op_name is JAX's name of the operation. at is both in
    short, such as "train.py:41 psum". They are "" if the text does not name them.
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
    source: str = ""
    op_name: str = ""
    at: str = ""

    @property
    def compute_each(self) -> float:
        """Seconds of compute between start and done, of one run."""
        return self.compute / (self.count or 1)

    @property
    def flops_each(self) -> float:
        """FLOPs of matmuls between start and done, of one run."""
        return self.flops / (self.count or 1)

    @property
    def exposed_each(self) -> float:
        """Exposed seconds, of one run."""
        return self.exposed / (self.count or 1)


@dataclass(frozen=True)
class Report:
    """A program on one chip; see the package for the model. Times are in seconds.

    `timed` is false for programs for CPUs and for GPUs that are not known, unless `report` was
    given a chip. Then every time is 0, and `exposed_share` counts collectives instead of seconds.
    `communication` is how long the busiest link is busy. `unread` has the names of instructions
    whose communication or number of turns could not be read; the times may leave these out.
    `versions` are those of the packages that compiled the program; it is empty if only a text was
    given. `advice` says what to change first.
    """

    name: str
    chip: Chip | Gpu | None
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
    unread: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""

    @property
    def timed(self) -> bool:
        return self.chip is not None

    @property
    def exposed_share(self) -> float:
        """Exposed time over total time.

        Without times, it is the share of collectives that have no matmul under them.
        """
        if self.timed:
            return self._share(self.exposed)
        return self._share(sum(row.bare for row in self.rows))

    def exposed_of(self, kind: str) -> float:
        """Exposed seconds of one kind of collective, such as "all-gather"."""
        return sum(row.exposed for row in self.rows if row.kind == kind)

    def exposed_share_of(self, kind: str) -> float:
        """What one kind of collective adds to `exposed_share`."""
        if self.timed:
            return self._share(self.exposed_of(kind))
        return self._share(sum(row.bare for row in self.rows if row.kind == kind))

    def _share(self, exposed: float) -> float:
        whole = self.total if self.timed else sum(row.count for row in self.rows)
        return exposed / whole if whole else 0.0

    def __str__(self) -> str:
        return "\n".join(_table(self))

    def _repr_html_(self) -> str:
        """What a notebook shows: the timeline above the text."""
        return as_html(str(self), self.advice, self.segments, self.total)

    def to_dict(self) -> dict:
        """All figures as plain data, without the segments."""
        fields = asdict(replace(self, segments=()))
        del fields["segments"]
        for plain, row in zip(fields["rows"], self.rows, strict=True):
            plain |= {name: getattr(row, name) for name in _EACH}
        return {**fields, "timed": self.timed, "exposed_share": self.exposed_share}

    def to_json(self, indent: int | None = 2) -> str:
        """All figures as JSON, without the segments."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_perfetto(self, *below: "Report") -> str:
        """The timeline as JSON that ui.perfetto.dev and chrome://tracing open.

        It has a track for the chip, which shows exposed time too, and a track for each direction
        of its links.

        Args:
            below: further reports for the same file, each shown as another process.

        Raises:
            ValueError: there are no times.
        """
        return as_trace([made._checked("to_perfetto") for made in (self, *below)])

    def to_html(self, *below: "Report") -> str:
        """The timeline as one page that loads nothing: zoom, and the source line of each part.

        Args:
            below: reports whose timelines are shown below this one, on the same axis of time.

        Raises:
            ValueError: there are no times.
        """
        return as_page([made._checked("to_html") for made in (self, *below)])

    def _checked(self, function: str) -> Drawn:
        """What is drawn; an error if there are no times. `function` is for the message."""
        if self.chip is None:
            raise ValueError(
                f"{function}: {self.name} has no times to draw, as a TPU's or a known GPU's has"
            )
        title = f"{self.name} on {self.ranks} x {self.chip.name}"
        rows = [
            (row.at or row.name, row.name, row.kind, row.count, row.wire, row.exposed)
            for row in sorted(self.rows, key=lambda row: -row.exposed)
        ]
        return Drawn(title, _totals(self), self.total, self.exposed, rows, self.segments)

    def draw(self, path: str | PathLike[str], *below: "Report") -> None:
        """Draw the timeline, compute above the wire, as SVG or PNG.

        Args:
            path: the file; its ending says which format.
            below: reports whose timelines are drawn below this one, on the same axis of time.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: there are no times to draw.
        """
        timelines = []
        for made in (self, *below):
            drawn = made._checked("draw")
            timelines.append((f"{drawn.title}: {drawn.totals[0]}", drawn.segments))
        draw(timelines, path)


def _table(report: Report) -> list[str]:
    """A report as lines of text: collectives, totals, assumptions."""
    shown = sorted(report.rows, key=lambda row: -row.exposed)[:ROWS]
    shown = [row for row in report.rows if row in shown]
    timed = report.timed
    cells: list[Sequence[str]] = [_TIMED if timed else _UNTIMED]
    cells += [_timed(row) if timed else _untimed(row) for row in shown]
    left = 2
    if any(row.at for row in shown):
        cells = [
            (at, *rest) for at, rest in zip(["at", *(r.at for r in shown)], cells, strict=True)
        ]
        left = 3
    lines = [f"{report.name}: {report.ranks} x {report.chip.name if report.chip else 'device'}"]
    lines += aligned(cells, left=left) if report.rows else ["no collectives"]
    if timed and any(row.count > 1 for row in shown):
        lines.append("(MB to exposed us are of one run; in all us is the exposed time of all runs)")
    if len(shown) < len(report.rows):
        lines.append(f"... and {len(report.rows) - len(shown)} more, with less exposed")
    lines += ["", *_totals(report), "", "assumed:"]
    lines += [f"  {assumption}" for assumption in report.assumptions]
    versions = ", ".join(" ".join(pair) for pair in report.versions.items())
    lines += ["", f"compiled by {versions or 'unknown versions of jax and of the compiler'}"]
    if report.unread:
        lines.append(f"not read, so the times may leave it out: {', '.join(report.unread)}")
    if report.advice:
        lines.append(report.advice)
    return lines


_WHAT = ("collective", "kind", "times", "MB")
_TIMED = (*_WHAT, "hops", "wire us", "under it us", "GFLOP", "exposed us", "in all us")
_UNTIMED = (*_WHAT, "matmuls under it", "GFLOP", "bare")


def _what(row: Row) -> tuple[str, ...]:
    kind = row.kind if row.asynchronous else f"{row.kind} (blocks)"
    return row.name, kind, f"{row.count}", f"{row.bytes / 1e6:.2f}"


def _timed(row: Row) -> tuple[str, ...]:
    return (
        *_what(row),
        f"{row.hops or '-'}",
        f"{row.wire * 1e6:.1f}",
        f"{row.compute_each * 1e6:.1f}",
        f"{row.flops_each / 1e9:.1f}",
        f"{row.exposed_each * 1e6:.1f}",
        f"{row.exposed * 1e6:.1f}",
    )


def _untimed(row: Row) -> tuple[str, ...]:
    return (
        *_what(row),
        f"{row.matmuls / (row.count or 1):g}",
        f"{row.flops_each / 1e9:.1f}",
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
    if not isinstance(report.chip, Chip):
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
