"""The legend of a picture."""

from collections.abc import Callable, Sequence

from ringcoll.draw.plan import Execution
from ringcoll.draw.steps import RankSet
from ringcoll.draw.style import COLOURS, cell, outline
from ringcoll.io.svg import FAINT, Element, label, shape

SIDE, _LINE = 14.0, 24.0
Glyph = Callable[[Element], None]


def legend(into: Element, plan: Execution, width: float) -> float:
    """Draw the legend in lines of this width, and return its height."""
    x, y = 0.0, 8.0
    for glyph, text in entries(plan):
        needs = SIDE + 7 + 5.8 * len(text) + 24
        if x and x + needs > width:
            x, y = 0.0, y + _LINE
        place = shape(into, "g", transform=f"translate({x:.4g} {y:.4g})")
        glyph(place)
        label(place, (SIDE + 7, 11), text, 12, fill=FAINT, text_anchor="start")
        x += needs
    return y + _LINE


def entries(plan: Execution) -> list[tuple[Glyph, str]]:
    """The entries: a function that draws a square of `SIDE`, and what the square means."""
    stripes = min(plan.size, 4)
    some = frozenset(range(stripes // 2 + 1))
    listed: list[tuple[Glyph, str]] = []
    if plan.tour:
        every, none = frozenset(range(stripes)), frozenset[int]()
        listed.append((_cell([every, none], stripes), "upper half: the shard"))
        listed.append(
            (_cell([none, some], stripes), "lower half, stripe s: rank s has added to its sum")
        )
    elif plan.has_blocks:
        listed.append((_cell([some], stripes), "cell d, stripe s: the block from rank s for d"))
    elif plan.whole:
        rainbow = _cell([some], stripes, COLOURS[:stripes])
        listed.append((rainbow, "stripe s: the data of rank s is in the sum"))
    elif plan.adds:
        listed.append((_cell([some], stripes), "stripe s: the data of rank s is in the sum"))
        listed.append((_cell([frozenset(range(stripes))], stripes), "complete"))
    else:
        listed.append((_cell([frozenset([0])], 1), "shard held"))
    listed.append((_cell([frozenset()], 1), "nothing"))
    listed.append((_cell([frozenset()], 1, is_new=True), "new in this round"))
    if (lanes := plan.lanes) > 1:
        bands = [frozenset([0]) if lane % 2 == 0 else frozenset[int]() for lane in range(lanes)]
        listed.append((_cell(bands, 1), f"bands: {lanes} lanes, 1/{lanes} of a shard each"))
    return listed


def _cell(
    lanes: Sequence[RankSet],
    stripes: int,
    colours: Sequence[str] = COLOURS[:1],
    is_new: bool = False,
) -> Glyph:
    """A function that draws a cell, as `style.cell` does."""

    def draw(into: Element) -> None:
        cell(into, (0, 0, SIDE, SIDE), lanes, stripes, colours)
        if is_new:
            outline(into, (0, 0, SIDE, SIDE))

    return draw
