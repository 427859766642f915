"""Pictures by matplotlib (the extra `bench`): modelled times as lines, measured ones as points."""

import os
from collections.abc import Sequence
from io import BytesIO
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from ringcoll.io import files
from ringcoll.io.text import bytes_in_words, seconds_in_words

#: The colours of lines, in order.
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
_STYLES = ("-", (0, (4, 2)))
#: What replaces white paper, black ink and the pale grid if the reader's device is dark.
_PAPER, _INK, _GRID = "#1c2029", "#e7e9ef", "#323947"
_DARK = (
    "@media (prefers-color-scheme:dark){"
    + "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in (("#ffffff", _PAPER), ("#000000", _INK), ("#eeeeee", _GRID))
        for what in ("fill", "stroke")
    )
    + f"text,[style='stroke: #000000']{{fill:{_INK}}}}}"  # their fill is black by default
)


class PlotLine(NamedTuple):
    """A line of a plot: the modelled seconds at each number of bytes; measured ones are points."""

    name: str
    sizes: Sequence[float]
    modelled: Sequence[float]
    measured: Sequence[float]


def figure(size: tuple[float, float]) -> Figure:
    """An empty figure of this width and height, in inches."""
    return Figure(figsize=size, layout="constrained")


def save(picture: Figure, path: str) -> None:
    """Write a figure to a file; the ending of the path names the format (svg, png)."""
    drawn = BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # text as text
        picture.savefig(drawn, dpi=150, format=os.path.splitext(path)[1][1:].lower() or "svg")
    files.write(path, in_the_dark(drawn.getvalue()))


def in_the_dark(picture: bytes) -> bytes:
    """An SVG by matplotlib, with colours for dark paper added; any other picture unchanged."""
    return picture.replace(b"</style>", f"\n{_DARK}</style>".encode(), 1)


def plot(path: str, title: str, lines: Sequence[PlotLine]) -> None:
    """Draw seconds, as SVG or PNG.

    Args:
        path: the file; its ending says which format.
        title: the text above.
        lines: the lines to draw.
    """
    plotted = figure((8, 4.6))
    axes = plotted.subplots()
    for i, line in enumerate(lines):
        colour, style = _COLOURS[i % len(_COLOURS)], _STYLES[i // len(_COLOURS) % len(_STYLES)]
        axes.plot(line.sizes, line.modelled, color=colour, linestyle=style, label=line.name)
        axes.plot(line.sizes, line.measured, ".", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda size, _: bytes_in_words(round(size)))
    axes.yaxis.set_major_formatter(lambda seconds, _: seconds_in_words(seconds))
    axes.set_xlabel("bytes")
    axes.set_title(title, fontsize="small", pad=14)
    axes.grid(True, color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    save(plotted, path)
