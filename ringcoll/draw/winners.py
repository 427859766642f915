"""Where which of several names wins: a panel for each case, a cell for each row and column."""

from collections.abc import Mapping, Sequence

from ringcoll.draw.style import COLOURS, ON_DARK, ON_LIGHT, dark, is_dark
from ringcoll.web.svg import FAINT, Element, document, label, rect, shape, svg_text

#: A colour for each name: neighbours differ in lightness.
FILLS = tuple(COLOURS[i] for i in (1, 0, 7, 3, 12, 5, 13, 9, 2, 6, 4, 8))
LETTERS = "ABCDEFGHIJKL"
_CELL, _MARGIN, _LEFT, _TOP, _LINE = (26.0, 20.0), 16.0, 52.0, 30.0, 22.0
#: What an axis shows, and its values.
Axis = tuple[str, Sequence[int]]


def as_winners(
    title: str, panels: Mapping[str, Sequence[Sequence[str]]], rows: Axis, columns: Axis
) -> str:
    """SVG: panels whose cells have the colour and the letter of a name; the legend has the names.

    Args:
        title: the title.
        panels: by the name of a panel, the name of each cell, row by row.
        rows, columns: the axes.

    Raises:
        ValueError: there are more names than letters.
    """
    names = list(dict.fromkeys(name for cells in panels.values() for row in cells for name in row))
    if len(names) > len(LETTERS):
        raise ValueError(f"{len(names)} names in one picture: at most {len(LETTERS)} have a letter")
    wide, high = _CELL
    width = _LEFT + wide * len(columns[1]) + _MARGIN
    height = _TOP + high * len(rows[1]) + 2 * _LINE
    root, down = document(title, dark()), -(-len(panels) // 2)
    label(root, (_MARGIN, 24), title, 13, text_anchor="start", font_weight="600")
    for i, (of_panel, cells) in enumerate(panels.items()):
        x, y = _MARGIN + i % 2 * width, 36 + i // 2 * height
        panel = shape(root, "g", transform=f"translate({x:.4g} {y:.4g})")
        middle = _LEFT + wide * len(columns[1]) / 2
        label(panel, (middle, 20), of_panel, 12, font_weight="600")
        for row, (value, some) in enumerate(zip(rows[1], cells, strict=True)):
            top = _TOP + high * row
            label(panel, (_LEFT - 6, top + 14), str(value), 10, fill=FAINT, text_anchor="end")
            for column, name in enumerate(some):
                _cell(panel, _LEFT + wide * column, top, names.index(name))
        bottom = _TOP + high * len(rows[1]) + 14
        for column, value in enumerate(columns[1]):
            words = str(value) if column % 2 == 0 else ""
            label(panel, (_LEFT + wide * (column + 0.5), bottom), words, 10, fill=FAINT)
        label(panel, (_LEFT - 6, bottom), f"{rows[0]} \\ {columns[0]}", 10, text_anchor="end")
    bottom = 36 + down * height
    for i, name in enumerate(names):
        y = bottom + _LINE * i
        _cell(root, _MARGIN, y, i)
        label(root, (_MARGIN + wide + 8, y + 14), name, 12, text_anchor="start")
    return svg_text(root, 2 * width + _MARGIN, bottom + _LINE * len(names) + _MARGIN)


def _cell(parent: Element, x: float, y: float, number: int) -> None:
    """Draw the cell of the name with this number."""
    fill, (width, height) = FILLS[number], _CELL
    rect(parent, (x, y, width - 1, height - 1), fill)
    ink = ON_DARK if is_dark(fill) else ON_LIGHT
    label(parent, (x + width / 2, y + 14), LETTERS[number], 11, fill=ink)
