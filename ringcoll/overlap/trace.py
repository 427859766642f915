"""Timelines as a trace: the JSON that Perfetto and Chrome read."""

import json
from collections.abc import Iterator, Sequence

from ringcoll.overlap.page import TimelineView
from ringcoll.overlap.tracks import tracks

#: Chrome's names of colours, by the row of a segment. For other rows Chrome chooses.
_COLOURS = {"exposed": "terrible", "memory": "bad", "skipped": "grey"}


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
