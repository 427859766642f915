"""Timelines as a picture and as a trace: the chip above its links."""

import json
from collections.abc import Iterator, Sequence
from math import log10
from typing import NamedTuple

from ringcoll.io.svg import DARK, FAINT, Element, dark, document, label, rect, shape, svg_text
from ringcoll.overlap.timeline import Segment
from ringcoll.overlap.tracks import tracks

#: The colour of each row of a timeline, and its text in the legend.
LOOKS = {
    "compute": ("#4477aa", "compute"),
    "memory": ("#ccbb44", "wait for memory"),
    "host": ("#aa3377", "wait for the host"),
    "exposed": ("#ee6677", "wait for the wire: exposed"),
    "wire": ("#228833", "wire"),
    "skipped": ("#bbbbbb", "more turns of a loop, alike"),
}
_MARGIN, _LEFT, _WIDTH, _HIGH = 16.0, 116.0, 860.0, 18.0


def as_svg(timelines: Sequence[tuple[str, Sequence[Segment]]]) -> str:
    """SVG: timelines one above the other, on one axis of time, with a legend.

    Args:
        timelines: the title and the segments of each.
    """
    root, y = document("what a chip and its links do", dark(DARK)), _MARGIN
    every = [segment for _, segments in timelines for segment in segments]
    total = max((segment.stop for segment in every), default=0.0) or 1e-6
    for title, segments in timelines:
        if title:
            label(root, (_MARGIN, y + 10), title, 12, text_anchor="start")
            y += 20
        for track in tracks(segments):
            label(root, (_LEFT - 8, y + 13), track.name, 12, fill=FAINT, text_anchor="end")
            for row, start, stop in _bars(track.segments, _WIDTH / total):
                rect(root, (_LEFT + start, y, stop - start, _HIGH), LOOKS[row][0])
            y += _HIGH + 3
        y += 9
    _axis(root, y, total * 1e6)
    _legend(root, y + 32, {segment.row for segment in every})
    return svg_text(root, _LEFT + _WIDTH + _MARGIN, y + 44 + _MARGIN)


def _bars(segments: Sequence[Segment], scale: float) -> list[tuple[str, float, float]]:
    """Row, left and right of each bar, in pixels.

    Neighbours of one row become one bar if less than half a pixel is between them.
    """
    bars: list[tuple[str, float, float]] = []
    for segment in segments:
        row, start, stop = segment.row, segment.start * scale, segment.stop * scale
        if bars and bars[-1][0] == row and start <= bars[-1][2] + 0.5:
            _, start, right = bars.pop()
            stop = max(right, stop)
        bars.append((row, start, stop))
    return bars


def _axis(root: Element, y: float, most: float) -> None:
    """Draw an axis of time, in microseconds, with five ticks or more."""
    power = 10.0 ** int(log10(most) // 1)
    step = next(power / part for part in (1, 2, 5, 10) if most * part >= 5 * power)
    for tick in range(int(most / step) + 1):
        x = _LEFT + _WIDTH * tick * step / most
        shape(root, "line", x1=x, x2=x, y1=y - 6, y2=y - 1, stroke=FAINT)
        label(root, (x, y + 11), f"{tick * step:g}", 11, fill=FAINT)
    label(root, (_LEFT - 8, y + 11), "microseconds", 11, fill=FAINT, text_anchor="end")


def _legend(root: Element, y: float, rows: set[str]) -> None:
    x = _LEFT
    for row, (colour, text) in LOOKS.items():
        if row in rows:
            rect(root, (x, y, 11, 11), colour)
            label(root, (x + 16, y + 10), text, 12, text_anchor="start")
            x += 40 + 6.2 * len(text)


class TimelineView(NamedTuple):
    """What a picture shows of a report; times are in seconds."""

    title: str
    total: float
    exposed: float
    segments: Sequence[Segment]


#: Chrome's names of colours, by the row of a segment. For other rows Chrome chooses.
_COLOURS = {"exposed": "terrible", "memory": "bad", "host": "bad", "skipped": "grey"}


def as_trace(views: Sequence[TimelineView]) -> str:
    """A process for each report, with a thread for each track; times are in microseconds."""
    events = [event for pid, view in enumerate(views, 1) for event in _events(pid, view)]
    totals = [
        {"name": view.title, "total_us": view.total * 1e6, "exposed_us": view.exposed * 1e6}
        for view in views
    ]
    trace = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"reports": totals}}
    return json.dumps(trace)


def _events(pid: int, view: TimelineView) -> Iterator[dict]:
    yield _metadata("process_name", pid, 0, name=view.title)
    for tid, track in enumerate(tracks(view.segments), 1):
        yield _metadata("thread_name", pid, tid, name=track.name)
        yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
        for segment in track.segments:
            exposed = segment.row == "exposed"
            event = {
                "name": f"exposed: {segment.label}" if exposed else segment.label,
                "cat": segment.row,
                "ph": "X",
                "ts": segment.start * 1e6,
                "dur": (segment.stop - segment.start) * 1e6,
                "pid": pid,
                "tid": tid,
                "args": {"source": segment.source, "at": segment.at},
            }
            if segment.row in _COLOURS:
                event["cname"] = _COLOURS[segment.row]
            yield event


def _metadata(what: str, pid: int, tid: int, **values: str | int) -> dict:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": values}
