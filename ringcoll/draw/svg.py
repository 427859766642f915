"""Pictures as files: SVG, written by hand."""

from math import ceil

from ringcoll.draw.legend import legend
from ringcoll.draw.picture import Picture
from ringcoll.draw.plan import Execution
from ringcoll.draw.style import DARK
from ringcoll.io.svg import dark, document, label, shape, svg_text

MARGIN = 16.0
_MOST_FRAMES = 24  # in one file
_MOST_WIDTH = 1100.0  # a page would shrink the letters of a wider picture


def as_svg(plan: Execution) -> str:
    """SVG: all frames in order, with a title and a legend.

    Args:
        plan: a plan of at most 16 ranks.

    Raises:
        ValueError: there are too many ranks or frames.

    >>> draw.as_svg(draw.plan("all_gather", "ring", (4,)))[:4]
    '<svg'
    """
    picture = Picture(plan)
    count = len(picture.frames)
    if count > _MOST_FRAMES:
        raise ValueError(
            f"{count} frames in one picture: at most {_MOST_FRAMES} are readable; "
            "draw fewer ranks, or --animate"
        )
    width, height = picture.size
    columns = _frames_in_a_row(count, width, height)
    total = max(columns * width, 8.4 * len(plan.title), 330.0) + 2 * MARGIN
    root = document(plan.title, dark(DARK))
    label(root, (total / 2, 30), plan.title, 15, font_weight="600")
    for i in range(count):
        x, y = (total - columns * width) / 2 + i % columns * width, 50 + i // columns * height
        picture.draw(shape(root, "g", transform=f"translate({x:.1f} {y:.1f})"), i)
    bottom = 50 + ceil(count / columns) * height + 6
    below = shape(root, "g", transform=f"translate({MARGIN} {bottom:.1f})")
    return svg_text(root, total, bottom + legend(below, plan, total - 2 * MARGIN) + MARGIN)


def _frames_in_a_row(count: int, width: float, height: float) -> int:
    """The number of frames in a row: the picture becomes a little wider than high.

    It is one more if that leaves fewer places of the last row empty.
    """
    columns = min(count, max(1, round((count * height / width) ** 0.5 * 1.25)))
    fits = (columns + 1) * width <= _MOST_WIDTH
    return columns + (fits and -count % (columns + 1) < -count % columns)
