"""Pictures as SVG, written by hand: elements, and a document with dark colours."""

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

Element = ElementTree.Element
Box = tuple[float, float, float, float]  # x, y, width, height

PAPER, INK, FAINT = "#ffffff", "#1d2433", "#667085"
#: These colours on dark paper.
DARK = {PAPER: "#1c2029", INK: "#e7e9ef", FAINT: "#a0a9ba"}
CLASS = "ringcoll"  # the CSS class of every picture
FONT = "ui-sans-serif, system-ui, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"


def dark(colours: Mapping[str, str]) -> str:
    """CSS that gives a picture dark colours if the reader's device asks for them.

    The selectors find elements by their light colours, which a viewer without CSS shows. They
    select only inside `CLASS`, because a page may hold other pictures. They also select the
    picture itself, which has the colour of its letters.

    Args:
        colours: for each light colour, the dark one.
    """
    rules = "".join(
        f":is(.{CLASS},.{CLASS} *)[{what}='{light}']{{{what}:{colour}}}"
        for light, colour in colours.items()
        for what in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme:dark){{{rules}}}"


def shape(parent: Element, tag: str, **attributes: Any) -> Element:
    """Add an element; a number gets four digits, and _ in an attribute's name becomes -."""
    return ElementTree.SubElement(
        parent,
        tag,
        {
            name.replace("_", "-"): value if isinstance(value, str) else f"{value:.4g}"
            for name, value in attributes.items()
        },
    )


def rect(parent: Element, box: Box, fill: str, **look: Any) -> None:
    """Draw a rectangle."""
    x, y, width, height = box
    shape(parent, "rect", x=x, y=y, width=width, height=height, fill=fill, **look)


def label(parent: Element, at: tuple[float, float], text: str, size: float, **look: Any) -> None:
    """Write a line of text, centred unless `text_anchor` says otherwise."""
    look = {"text_anchor": "middle", **look}
    shape(parent, "text", x=at[0], y=at[1], font_size=size, **look).text = text


def document(title: str, css: str) -> Element:
    """An empty picture.

    Args:
        title: the title, which a screen reader reads aloud.
        css: the style of the picture, such as its dark colours.
    """
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
    root.set("class", CLASS)
    root.set("font-family", FONT)
    root.set("fill", INK)
    shape(root, "title").text = title
    shape(root, "style").text = css
    shape(root, "rect", width="100%", height="100%", fill=PAPER)
    return root


def svg_text(root: Element, width: float, height: float) -> str:
    """The SVG text of a picture of this size."""
    root.set("viewBox", f"0 0 {width:.0f} {height:.0f}")
    root.set("width", f"{width:.0f}")
    root.set("height", f"{height:.0f}")
    return ElementTree.tostring(root, encoding="unicode")
