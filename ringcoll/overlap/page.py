"""Timelines as one page: zoom, the source line of each part, two programs on one axis of time."""

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from ringcoll.overlap.picture import LOOKS
from ringcoll.overlap.timeline import Segment
from ringcoll.overlap.tracks import tracks
from ringcoll.web.page import page, part


class Drawn(NamedTuple):
    """What is drawn of a report; times are in seconds.

    rows are the lines of source, the most exposed first: (label, names of instructions, kind,
    count, wire of each, exposed).
    """

    title: str
    totals: Sequence[str]
    total: float
    exposed: float
    rows: Sequence[tuple[str, Sequence[str], str, int, float, float]]
    segments: Sequence[Segment]


def as_page(reports: Sequence[Drawn]) -> str:
    """HTML: the timelines one above the other, on one axis of time."""
    data = {
        "looks": [[kind, colour, legend] for kind, (colour, legend) in LOOKS.items()],
        "reports": [_report(made) for made in reports],
    }
    title = " above ".join(made.title for made in reports)
    body = part("ringcoll.overlap", "page.html", title=escape(title))
    return page(title, body, [part("ringcoll.overlap", "page.js")], data)


def _report(made: Drawn) -> dict[str, Any]:
    kinds = list(LOOKS)
    labels = {s.label: (s.label, s.at, s.source) for s in made.segments}
    index = {label: i for i, label in enumerate(labels)}
    return {
        "title": made.title,
        "totals": made.totals,
        "total": made.total * 1e6,
        "labels": list(labels.values()),
        "tracks": [
            {
                "name": track.name,
                "segments": [
                    [kinds.index(s.row), s.start * 1e6, (s.stop - s.start) * 1e6, index[s.label]]
                    for s in track.segments
                ],
            }
            for track in tracks(made.segments)
        ],
        "rows": [
            [label, names, kind, count, wire * 1e6, exposed * 1e6]
            for label, names, kind, count, wire, exposed in made.rows
        ],
    }
