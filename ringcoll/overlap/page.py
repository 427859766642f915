"""Timelines as one page: zoom, the source line of each part, two programs on one axis of time."""

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from ringcoll.overlap.picture import LOOKS
from ringcoll.overlap.rows import LineRows
from ringcoll.overlap.timeline import Segment
from ringcoll.overlap.tracks import tracks
from ringcoll.web.page import page, part


class TimelineView(NamedTuple):
    """What a picture shows of a report; times are in seconds. The most exposed line is first."""

    title: str
    totals: Sequence[str]
    total: float
    exposed: float
    lines: Sequence[LineRows]
    segments: Sequence[Segment]


def as_page(views: Sequence[TimelineView]) -> str:
    """HTML: the timelines one above the other, on one axis of time."""
    data = {
        "looks": [[kind, colour, legend] for kind, (colour, legend) in LOOKS.items()],
        "reports": [_data(view) for view in views],
    }
    title = " above ".join(view.title for view in views)
    body = part("ringcoll.overlap", "page.html", title=escape(title))
    return page(title, body, part("ringcoll.overlap", "page.js"), data)


def _data(view: TimelineView) -> dict[str, Any]:
    """What the script of the page reads of a report; times are in microseconds."""
    kinds = list(LOOKS)
    labels = {s.label: (s.label, s.at, s.source) for s in view.segments}
    index = {label: i for i, label in enumerate(labels)}
    return {
        "title": view.title,
        "totals": view.totals,
        "total": view.total * 1e6,
        "labels": list(labels.values()),
        "tracks": [
            {
                "name": track.name,
                "segments": [
                    [kinds.index(s.row), s.start * 1e6, (s.stop - s.start) * 1e6, index[s.label]]
                    for s in track.segments
                ],
            }
            for track in tracks(view.segments)
        ],
        "rows": [
            [
                line.label,
                [row.name for row in line.rows],
                line.kind,
                round(line.sum_of("count")),
                line.mean_of("wire") * 1e6,
                line.sum_of("exposed") * 1e6,
            ]
            for line in view.lines
        ],
    }
