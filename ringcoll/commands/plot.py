"""Plot times: a line for every algorithm, both axes logarithmic."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringcoll.io.figure import Path, figure, save
from ringcoll.io.text import seconds_in_words

#: The colours of lines, in order.
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
_STYLES = ("-", (0, (4, 2)))


class PlotLine(NamedTuple):
    """A line of a plot: the seconds of an algorithm at each place; measured seconds are points."""

    name: str
    places: Sequence[float]
    seconds: Sequence[float]
    measured: Sequence[float] = ()


def plot(
    path: Path,
    title: str,
    along: str,
    lines: Sequence[PlotLine],
    in_words: Callable[[float], str] = str,
    marks: Sequence[float] = (),
) -> None:
    """Draw seconds, as SVG or PNG.

    Args:
        path: the file; its ending says which format.
        title: the text above.
        along: the label of the horizontal axis.
        lines: the lines to draw.
        in_words: writes a place as text.
        marks: places where another line becomes the lowest.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    plotted = figure("plot", path, (8, 4.6))
    axes = plotted.subplots()
    for i, line in enumerate(lines):
        colour, style = _COLOURS[i % len(_COLOURS)], _STYLES[i // len(_COLOURS) % len(_STYLES)]
        axes.plot(line.places, line.seconds, color=colour, linestyle=style, label=line.name)
        if line.measured:
            axes.plot(line.places, line.measured, ".", color=colour)
    for mark in marks:
        axes.axvline(mark, color="#bbbbbb", linewidth=0.8, linestyle=":")
        axes.annotate(
            in_words(mark), (mark, 1), xycoords=("data", "axes fraction"), fontsize="x-small"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda place, _: in_words(place))
    axes.yaxis.set_major_formatter(lambda seconds, _: seconds_in_words(seconds))
    axes.set_xlabel(along)
    axes.set_title(title, fontsize="small", pad=14)
    axes.grid(True, color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    save(plotted, path)
