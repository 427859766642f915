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
    found = _numbered("compute", [s for s in segments if s.row != "wire"])
    for way in sorted({way for segment in segments for way in segment.ways}):
        found += _numbered(f"links {way}", [s for s in segments if way in s.ways])
    return found


def _numbered(name: str, segments: Sequence[Segment]) -> list[Track]:
    names = [name, *(f"{name} ({i})" for i in range(2, len(segments) + 1))]
    return [Track(*one) for one in zip(names, dealt(segments), strict=False)]


def dealt(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Distribute segments over lanes so that segments in a lane do not overlap in time."""
    lanes: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: s.start):
        free = (lane for lane in lanes if lane[-1].stop <= segment.start * (1 + 1e-9))
        lane = next(free, None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(segment)
    return lanes
