"""The tracks of a timeline: one for the chip, and one for each direction of its links."""

from collections.abc import Sequence
from typing import NamedTuple

from ringcoll.overlap.timeline import Segment


class Track(NamedTuple):
    """Segments that do not overlap, in order."""

    name: str
    segments: Sequence[Segment]


def tracks(segments: Sequence[Segment]) -> list[Track]:
    """The track of the chip, which shows exposed time too, then the tracks of the links.

    A transfer is on the track of every direction that it occupies. If two transfers go in one
    direction over different links at the same time, that direction has two tracks.
    """
    every = _without_overlap("compute", [s for s in segments if s.row != "wire"])
    for way in sorted({way for segment in segments for way in segment.ways}):
        every += _without_overlap(f"links {way}", [s for s in segments if way in s.ways])
    return every


def _without_overlap(name: str, segments: Sequence[Segment]) -> list[Track]:
    """One track, or several if segments overlap in time; the second is "name (2)"."""
    lanes: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: s.start):
        free = (lane for lane in lanes if lane[-1].stop <= segment.start * (1 + 1e-9))
        lane = next(free, None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(segment)
    return [Track(f"{name} ({i})" if i > 1 else name, lane) for i, lane in enumerate(lanes, 1)]
