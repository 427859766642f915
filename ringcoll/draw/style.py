"""Colours, and the cell that shows whose data a rank holds."""

from collections.abc import Sequence

from ringcoll.draw.steps import RankSet, ranges
from ringcoll.io import svg
from ringcoll.io.svg import INK, Box, Element, rect

#: Sixteen colours of shards or ranks, as far from each other and from the empty cell as possible,
#: also for readers who cannot see red or green. (The least distance in OKLab is 0.08, by the
#: simulation of Machado, Oliveira and Fernandes, IEEE TVCG 15, 2009.)
COLOURS = (
    *("#2c71b7", "#e4a249", "#4db491", "#9c2e5a", "#9b8df5", "#362988", "#51400d", "#efdc3a"),
    *("#8f5d04", "#671650", "#b96367", "#ab8704", "#71c1f7", "#c3d491", "#6094b0", "#62488c"),
)
EMPTY, LINE, BOX, MUTED = "#eceff4", "#98a2b3", "#f8f9fb", "#8a94a6"
#: Colours of text on a dark and on a light cell; they are the same on dark paper.
ON_DARK, ON_LIGHT = "#fdfdfd", "#11151d"
#: `COLOURS` on dark paper. A colour that has light text there has light text here too.
DARK_COLOURS = (
    *("#5891c8", "#ffbc64", "#68ceaa", "#a856f1", "#a496ff", "#605bbe", "#e76466", "#fbe84b"),
    *("#679995", "#9b4559", "#bb5e27", "#687092", "#79c9ff", "#ddefab", "#4d581d", "#60478b"),
)
DARK = {
    **dict(zip(COLOURS, DARK_COLOURS, strict=True)),
    **svg.DARK,
    **{EMPTY: "#2b313d", LINE: "#667085", BOX: "#222733", MUTED: "#7b8598"},
}


def outline(parent: Element, box: Box) -> None:
    """Mark a box as new in its round."""
    rect(parent, box, "none", stroke=INK, stroke_width=1.8)


def cell(
    parent: Element, box: Box, lanes: Sequence[RankSet], stripes: int, colours: Sequence[str]
) -> None:
    """Draw the data of one column: a band for each lane, and in it a stripe for each rank.

    Args:
        parent: the element to draw into.
        box: the place to draw at.
        lanes: for each lane, the ranks whose data is held.
        stripes: their number; 1 if the column already says whose data it is.
        colours: one for each stripe, or one for all.
    """
    x, y, width, height = box
    rect(parent, box, EMPTY)
    if len(set(lanes)) == 1:
        lanes = lanes[:1]
    band = height / len(lanes)
    high = band - (0.8 if len(lanes) > 1 else 0)
    for lane, held in enumerate(lanes):
        top = y + band * lane
        if held and stripes > 1 and len(colours) == 1:  # a tint shows that something is held
            rect(parent, (x, top, width, high), colours[0], fill_opacity=0.22)
        if held and stripes == 1:
            held = frozenset([0])
        alone = [range(rank, rank + 1) for rank in sorted(held)]
        for run in ranges(held) if len(colours) == 1 else alone:
            stripe = (x + width * run.start / stripes, top, width * len(run) / stripes, high)
            rect(parent, stripe, colours[run.start % len(colours)])


def is_dark(colour: str) -> bool:
    """Whether white text is easier to read on a colour than dark text."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.3
