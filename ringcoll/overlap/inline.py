"""How a notebook shows a report: its timeline, and its text."""

from collections.abc import Iterator, Sequence
from html import escape

from ringcoll.overlap.chart import LOOKS
from ringcoll.overlap.timeline import Segment

_WIDTH, _HIGH = 720.0, 26.0


def as_html(text: str, advice: str, segments: Sequence[Segment], total: float) -> str:
    """The timeline, if the program has times, above the text of a report without assumptions."""
    words = text.partition("\n\nassumed:")[0] + (f"\n{advice}" if advice else "")
    shown = f"<pre>{escape(words)}</pre>"
    return as_svg(segments, total) + shown if total else shown


def as_svg(segments: Sequence[Segment], total: float) -> str:
    """A strip of compute above a strip of the wire, `total` seconds long, with a legend."""
    parts, x = [], 0.0
    for kind, (row, colour, legend) in LOOKS.items():
        mine = [segment for segment in segments if segment.row == kind]
        if not mine:
            continue
        top = (1 - row) * (_HIGH + 4)
        parts += [
            f'<rect x="{start:.1f}" y="{top:g}" width="{stop - start:.1f}" height="{_HIGH:g}"'
            f' fill="{colour}"/>'
            for start, stop in _joined(mine, total)
        ]
        down = 2 * _HIGH + 24
        parts.append(f'<rect x="{x:g}" y="{down - 10:g}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14:g}" y="{down:g}">{escape(legend)}</text>')
        x += 34 + 6.5 * len(legend)
    size = f'viewBox="0 0 {max(_WIDTH, x):g} {2 * _HIGH + 30:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} width="100%" '
        f'font-family="sans-serif" font-size="12" fill="currentColor">'
        f"<title>compute above the wire, {total * 1e6:.0f} us</title>{''.join(parts)}</svg>"
    )


def _joined(segments: Sequence[Segment], total: float) -> Iterator[tuple[float, float]]:
    """Where bars begin and end, in pixels; bars less than half a pixel apart are joined."""
    start = stop = 0.0
    for segment in sorted(segments, key=lambda one: one.start):
        left, right = (_WIDTH * at / total for at in (segment.start, segment.stop))
        if left > stop + 0.5:
            if stop > start:
                yield start, stop
            start = left
        stop = max(stop, right)
    if stop > start:
        yield start, stop
