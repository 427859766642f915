"""What the cells of a picture mean."""

from collections.abc import Callable, Sequence

from ringcoll.draw.looks import COLOURS, FAINT, Element, cell, label, outline, shape
from ringcoll.draw.plan import Carries, Plan
from ringcoll.draw.steps import Ranks

_SIDE, _LINE = 14.0, 24.0
_Glyph = Callable[[Element, float], None]


def legend(into: Element, plan: Plan, width: float) -> float:
    """Draw it in lines of this width; returns its height."""
    x, y = 0.0, 8.0
    for glyph, text in _entries(plan):
        needs = _SIDE + 7 + 5.8 * len(text) + 24
        if x and x + needs > width:
            x, y = 0.0, y + _LINE
        place = shape(into, "g", transform=f"translate({x:.4g} {y:.4g})")
        glyph(place, _SIDE)
        label(place, (_SIDE + 7, 11), text, 12, fill=FAINT, text_anchor="start")
        x += needs
    return y + _LINE


def _entries(plan: Plan) -> list[tuple[_Glyph, str]]:
    stripes = min(plan.size, 4)
    some = frozenset(range(stripes // 2 + 1))
    entries: list[tuple[_Glyph, str]] = []
    carries = {phase.carries for phase in plan.phases}
    if Carries.BLOCKS in carries:
        entries.append((_cell([some], stripes), "cell d, stripe s: the block from rank s for d"))
    elif plan.whole:
        rainbow = _cell([some], stripes, COLOURS[:stripes])
        entries.append((rainbow, "stripe s: the data of rank s is in the sum"))
    elif plan.adds:
        entries.append((_cell([some], stripes), "stripe s: the data of rank s is in the sum"))
        entries.append((_cell([frozenset(range(stripes))], stripes), "complete"))
    else:
        entries.append((_cell([frozenset([0])], 1), "shard held"))
    entries.append((_cell([frozenset()], 1), "nothing"))
    entries.append((_cell([frozenset()], 1, is_new=True), "new in this round"))
    lanes = max((phase.schedule.lanes for phase in plan.phases), default=1)
    if lanes > 1:
        bands = [frozenset([0]) if lane % 2 == 0 else frozenset[int]() for lane in range(lanes)]
        entries.append((_cell(bands, 1), f"bands: {lanes} lanes, 1/{lanes} of a shard each"))
    return entries


def _cell(
    lanes: Sequence[Ranks], of: int, colours: Sequence[str] = COLOURS[:1], is_new: bool = False
) -> _Glyph:
    def draw(into: Element, side: float) -> None:
        cell(into, (0, 0, side, side), lanes, of, colours)
        if is_new:
            outline(into, (0, 0, side, side))

    return draw
