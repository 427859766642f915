"""A report of the collectives of a program and their exposed time: text, JSON, a picture."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from html import escape
from os import PathLike, fspath

from ringcoll.io.files import write
from ringcoll.io.text import wrapped
from ringcoll.overlap.chips import Chip, Gpu
from ringcoll.overlap.lines import Line
from ringcoll.overlap.options import SETS
from ringcoll.overlap.picture import TimelineView, as_svg, as_trace
from ringcoll.overlap.rows import NO_LINE, LineRows, LineWork, Row, by_line, table_lines
from ringcoll.overlap.timeline import Segment

#: The most lines of source that are printed. If there are more, the most exposed are.
LINES = 24
#: What `to_dict` adds to the fields of a report.
_DERIVED = ("timed", "exposed_share", "advice")

_TRANSPOSED = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}
#: What hides a collective under a matmul, and where that matmul is.
_FORMS = {
    "all-gather": "if a matmul takes it: `all_gather_matmul`",
    "reduce-scatter": "if it adds up a matmul: `matmul_reduce_scatter`",
    "all-reduce": "if it adds up a matmul: `matmul_all_reduce`",
}


#: The set of options by which collectives hide under any work, where a chip can.
_OFFLOAD = "sparse cores"


@dataclass(frozen=True)
class Report:
    """A program on one chip; see the package for the model. Times are in seconds.

    `timed` is false for programs for CPUs and for GPUs that are not known, unless `report` was
    given a chip. Then every time is 0, and `exposed_share` counts collectives instead of seconds.
    `communication` is how long the busiest link is busy. `unread` has the names of instructions
    whose communication or number of turns could not be read; the times may leave these out.
    `versions` are those of the packages that compiled the program, empty if only a text was given;
    `notes` say where a text comes from, or why there is no profile. `host` is how long the chip
    waits for copies to or from its host's memory. `unpriced` has the names of kernels whose work is
    not known; they count with the least that they can take. `works` is `compute` by line, the most
    first. `least` has "total" and "exposed" for built-in collectives that take the least that links
    allow; every other figure is of those expected.
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
    notes: tuple[str, ...] = ()
    host: float = 0.0
    unpriced: tuple[str, ...] = ()
    least: Mapping[str, float] = field(default_factory=dict)
    works: tuple[LineWork, ...] = ()

    @property
    def timed(self) -> bool:
        return self.chip is not None

    @property
    def exposed_share(self) -> float:
        """Exposed time over total time.

        Without times, it is the share of collectives that have no matmul under them.
        """
        return self._share(self.exposed if self.timed else self._without_matmul)

    @property
    def _without_matmul(self) -> int:
        return sum(row.without_matmul for row in self.rows)

    def exposed_of(self, kind: str) -> float:
        """Exposed seconds of one kind of collective, such as "all-gather"."""
        return sum(row.exposed for row in self.rows if row.kind == kind)

    def exposed_share_of(self, kind: str) -> float:
        """What one kind of collective adds to `exposed_share`."""
        return self._share(sum(getattr(row, self.figure) for row in self.rows if row.kind == kind))

    def _share(self, exposed: float) -> float:
        whole = self.total if self.timed else sum(row.count for row in self.rows)
        return exposed / whole if whole else 0.0

    def __str__(self) -> str:
        return "\n".join(_text(self))

    @property
    def figure(self) -> str:
        """The figure of a row that says how exposed it is."""
        return "exposed" if self.timed else "without_matmul"

    @property
    def summary(self) -> str:
        """How much is exposed, in a few words: "1474 of 3995 us exposed (36.9%)"."""
        if self.timed:
            part, whole = f"{self.exposed * 1e6:.0f}", f"{self.total * 1e6:.0f} us"
        else:
            part = f"{self._without_matmul}"
            whole = f"{sum(row.count for row in self.rows)} collectives"
        return f"{part} of {whole} exposed ({self.exposed_share:.1%})"

    @property
    def parts(self) -> dict[str, float]:
        """The seconds that make up the total, by name."""
        host = {"waits for the host": self.host} if self.host else {}
        return {"compute": self.compute, "memory": self.memory, **host, "exposed": self.exposed}

    @property
    def title(self) -> str:
        """The program, and where it runs: "jit_step on 8 x v5e"."""
        return f"{self.name} on {self.ranks} x {self.chip.name if self.chip else 'device'}"

    @property
    def advice(self) -> str:
        """What to change first: the most exposed line, and what could hide it. "" if none is."""
        line = next(iter(by_line(self.rows, whole=True)), None)
        if line is None or line.sum_of(self.figure) < 0.5e-6:
            return ""
        first = by_line(line.rows)[0]
        # A compiler may write a scatter as a sum; the operation is what was called.
        called = Line(op_name=first.rows[0].op_name).operation.replace("_", "-")
        kind = called if called in _FORMS else first.kind
        if first.at.endswith(", gradient"):  # that of a gather is a scatter, and vice versa
            kind = _TRANSPOSED.get(kind, "")
        form = _FORMS.get(kind, "")
        # ringcoll's matmuls have compared the forms already. A product hides one gather.
        ours = any(re.search(r"ringcoll\.\w*einsum", row.op_name) for row in first.rows)
        crossed = kind == "all-gather" and any(row.crossed for row in line.rows)
        cures = [form] if form and not (ours or crossed) else []
        if kind in _FORMS and self._may_offload:
            cures.insert(0, f'compile with overlap.OPTIONS["{_OFFLOAD}"]')
        return "; ".join([f"to change first: {first.at or first.kind}", *cures])

    @property
    def _may_offload(self) -> bool:
        """Whether sparse cores could take collectives, and nothing says that they do."""
        chips, there = SETS[_OFFLOAD]["chips"], SETS[_OFFLOAD]["default"]
        is_named = any(_OFFLOAD in note for note in self.notes)
        return self.chip is not None and self.chip.name in {*chips} - {*there} and not is_named

    def details(self) -> str:
        """The text of the report, with MB, hops and GFLOP of each line."""
        return "\n".join(_text(self, details=True))

    def compute_by_line(self) -> str:
        """A table of the compute of each line, the most first."""
        rows = [("compute us", "%", "", "line")]
        for work in self.works[:LINES]:
            share = f"{100 * self._share(work.seconds):.1f}"
            rows.append((f"{work.seconds * 1e6:.1f}", share, "", work.at or NO_LINE))
        return "\n".join(table_lines(rows))

    def _repr_html_(self) -> str:
        """What a notebook shows: the timeline, if there are times, above the figures."""
        lines = [*_figures(self), *filter(None, [self.advice])]
        text = f"<pre>{escape(chr(10).join(lines))}</pre>"
        return as_svg([("", self.segments)]) + text if self.total > 0 else text

    def to_dict(self) -> dict:
        """All figures as plain data, without the segments."""
        fields = asdict(replace(self, segments=()))
        del fields["segments"]
        return {**fields, **{name: getattr(self, name) for name in _DERIVED}}

    def to_json(self) -> str:
        """All figures as JSON, without the segments."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """The report that `to_json` or `python -m ringcoll overlap --json` wrote.

        It has no timeline, so it cannot be drawn.

        Raises:
            ValueError: the text is not such a report.
        """
        try:
            fields = json.loads(text)
            fields = {name: fields[name] for name in fields.keys() - {*_DERIVED}}
            if chip := fields["chip"]:
                fields["chip"] = Chip(**chip) if "clock" in chip else Gpu(**chip)
            rows = ({**row, "axes": tuple(row["axes"])} for row in fields["rows"])
            fields["rows"] = tuple(Row(**row) for row in rows)
            fields["works"] = tuple(LineWork(**work) for work in fields.get("works", ()))
            fields["least"] = {k: float(v) for k, v in fields.get("least", {}).items()}
            for name in ("notes", "unpriced"):
                fields[name] = tuple(fields.get(name, ()))
            return cls(**fields, segments=())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"from_json: {text[:40]!r} is not a report, or another version of ringcoll wrote "
                "it; make it again with report.to_json() or python -m ringcoll overlap --json"
            ) from error

    def to_perfetto(self, *below: "Report") -> str:
        """The timeline as JSON that ui.perfetto.dev and chrome://tracing open.

        It has a track for the chip, which shows exposed time too, and a track for each direction
        of its links.

        Args:
            below: further reports for the same file, each shown as a process of its own.

        Raises:
            ValueError: there are no times.
        """
        return as_trace([report._view("to_perfetto") for report in (self, *below)])

    def _view(self, function: str) -> TimelineView:
        """What pictures show; an error if there are no times. `function` is for the message."""
        if self.chip is None:
            raise ValueError(
                f"{function}: {self.name} has no times to draw, as a TPU's or a known GPU's has"
            )
        if self.total and not self.segments:
            raise ValueError(
                f"{function}: {self.name} was read from a file, which has no timeline; compile the "
                "program again"
            )
        return TimelineView(self.title, self.total, self.exposed, self.segments)

    def draw(self, path: str | PathLike[str], *below: "Report") -> None:
        """Draw the timeline, the chip above its links, as SVG.

        Args:
            path: the file; its name ends in .svg.
            below: reports whose timelines are drawn below this one, on the same axis of time.

        Raises:
            ValueError: there are no times to draw, or the name ends otherwise.
        """
        if not fspath(path).endswith(".svg"):
            raise ValueError(f"draw: {fspath(path)!r} is not an SVG; end the name with .svg")
        timelines = [
            (f"{report.title}: {_totals(report)[0]}", report._view("draw").segments)
            for report in (self, *below)
        ]
        write(path, as_svg(timelines))


def _text(report: Report, details: bool = False) -> Iterator[str]:
    """The lines of a report: its figures, what they assume, and what to change first."""
    yield from _figures(report, details)
    yield from ["", "assumed:"]
    yield from wrapped((f"  {assumption}" for assumption in report.assumptions), then="    ")
    versions = ", ".join(" ".join(pair) for pair in report.versions.items())
    notes = [f"compiled by {versions or 'unknown versions of jax and of the compiler'}"]
    if report.unread:
        notes.append(f"not read, so the times may leave it out: {', '.join(report.unread)}")
    if report.advice:
        notes.append(report.advice)
    yield ""
    yield from wrapped(notes, then="")


def _figures(report: Report, details: bool = False) -> Iterator[str]:
    """What is exposed, where, and the totals."""
    first, *totals = _totals(report)
    yield f"{report.title}: {first}"
    yield from wrapped(report.notes)
    yield ""
    lines = by_line(report.rows)
    if not lines:
        yield "no collectives"
    else:
        heads = (f"exposed{' us' * report.timed}", "%", "times", "collective", "line")
        head, *table = table_lines([heads, *(_cells(report, line) for line in lines[:LINES])])
        yield head
        for printed, line in zip(table, lines, strict=False):
            yield printed
            if details:
                yield _details(report, line)
    if more := lines[LINES:]:
        yield f"... and {len(more)} more, with less exposed"
    if totals:
        yield from ["", *totals]


def _cells(report: Report, line: LineRows) -> tuple[str, ...]:
    """A line: its exposed time, the share in per cent, how often its collectives run, and names."""
    exposed = line.sum_of(report.figure)
    share = f"{100 * report._share(exposed):.1f}"
    shown = f"{exposed * 1e6:.1f}" if report.timed else f"{exposed:.0f}"
    return shown, share, f"{line.sum_of('count'):.0f}", line.kind, line.label


def _details(report: Report, line: LineRows) -> str:
    """What each run of a line's collectives sends, and what runs meanwhile: means."""
    count = line.sum_of("count") or 1
    hops = max(row.hops for row in line.rows)
    sent = f"{line.mean_of('bytes') / 1e6:.2f} MB" + f", {hops} hop{'s' * (hops > 1)}" * bool(hops)
    under = f"{line.sum_of('flops') / count / 1e9:.1f} GFLOP under it"
    if report.timed:
        sent += f", {line.mean_of('wire') * 1e6:.1f} us on the wire"
        under = f"{line.sum_of('compute') / count * 1e6:.1f} us of compute, {under}"
    blocking = "" if any(row.asynchronous for row in line.rows) else "; blocking"
    return f"{'each: ':>12}{sent}; {under}{blocking}"


def _figure(report: Report, name: str, seconds: float) -> str:
    """Microseconds; from the least to those expected if they differ: "241 to 390"."""
    figures = (f"{t * 1e6:.0f}" for t in (report.least.get(name, seconds), seconds))
    return " to ".join(dict.fromkeys(figures))


def _totals(report: Report) -> list[str]:
    lines = [report.summary]
    if report.timed:
        figures = {"total": report.total, **report.parts}
        total, *parts = (f"{name} {_figure(report, name, t)}" for name, t in figures.items())
        first = f"{total} us = {' + '.join(parts)} us ({report.exposed_share:.1%})"
        unpriced = f", without a price: {', '.join(report.unpriced)}" if report.unpriced else ""
        lines = [first + unpriced]
        bound = max(report.compute, report.communication)
        lines.append(
            f"the busiest link is busy for {report.communication * 1e6:.0f} us; the total is "
            f"{report.total / bound - 1 if bound else 0:.1%} above the longer of that and compute"
        )
    if not isinstance(report.chip, Chip):
        count = sum(row.count for row in report.rows)
        hidden = count - report._without_matmul
        lines.append(f"{hidden} of {count} collectives have a matmul between start and done")
    sizes = [
        f"{what} {size / 2**20:.1f} MiB"
        for what, size in (("temporaries", report.temporaries), ("program", report.program_bytes))
        if size is not None
    ]
    if sizes:
        lines.append(", ".join(sizes))
    return lines
