"""Pictures as files: SVG, written by hand."""

from math import ceil

from ringcoll.draw.legend import legend
from ringcoll.draw.picture import Picture
from ringcoll.draw.plan import Plan
from ringcoll.draw.style import dark
from ringcoll.web.svg import document, label, shape, svg_text

MOST_FRAMES = 24  # in one file
MARGIN = 16.0
_MOST_WIDTH = 1100.0  # a page would shrink the letters of a wider picture


def as_svg(plan: Plan, number: int | None = None) -> str:
    """SVG: one frame, or all frames in order, with a title and a legend.

    Args:
        plan: a plan of at most 16 ranks.
        number: the number of the round; 0 is the start, None is all.

    Raises:
        ValueError: there are too many ranks or frames, or there is no such round.

    >>> draw.as_svg(draw.plan("all_gather", "ring", (4,)), number=1)[:4]
    '<svg'
    """
    picture = Picture(plan)
    count = len(picture.frames)
    if number is not None and not 0 <= number < count:
        raise ValueError(f"round {number}: there are 0 (the start) to {count - 1}")
    if number is None and count > MOST_FRAMES:
        raise ValueError(
            f"{count} frames in one picture: at most {MOST_FRAMES} are readable; "
            "choose one round, draw fewer ranks, or write a page"
        )
    chosen = range(count) if number is None else [number]
    width, height = picture.size
    columns = _frames_in_a_row(len(chosen), width, height)
    total = max(columns * width, 8.4 * len(plan.title), 330.0) + 2 * MARGIN
    down = ceil(len(chosen) / columns)
    root = document(plan.title, dark())
    label(root, (total / 2, 30), plan.title, 15, font_weight="600")
    for i, k in enumerate(chosen):
        x, y = (total - columns * width) / 2 + i % columns * width, 50 + i // columns * height
        picture.draw(shape(root, "g", transform=f"translate({x:.1f} {y:.1f})"), k)
    bottom = 50 + down * height + 6
    below = shape(root, "g", transform=f"translate({MARGIN} {bottom:.1f})")
    return svg_text(root, total, bottom + legend(below, plan, total - 2 * MARGIN) + MARGIN)


def _frames_in_a_row(count: int, width: float, height: float) -> int:
    """The number of frames in a row: the picture becomes a little wider than high.

    It is one more if that leaves fewer places of the last row empty.
    """
    columns = min(count, max(1, round((count * height / width) ** 0.5 * 1.25)))
    fits = (columns + 1) * width <= _MOST_WIDTH
    return columns + (fits and -count % (columns + 1) < -count % columns)
