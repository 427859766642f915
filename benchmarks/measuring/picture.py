"""Draw a run: the time over lax's by size, and the predicted time against the measured one."""

from collections.abc import Sequence
from math import nan

from benchmarks.measuring.row import Measurement
from ringcoll.commands.plot import PlotLine, draw_lines
from ringcoll.io.figure import figure, save
from ringcoll.io.text import bytes_in_words, seconds_in_words


def draw(path: str, title: str, rows: Sequence[Measurement]) -> None:
    """Draw a row of panels for each collective, and one for predictions; a column for each type.

    Args:
        path: the file; its ending says which format.
        title: the text above.
        rows: measurements with times, from small sizes to large.
    """
    collectives, types, algorithms = (
        list(dict.fromkeys(getattr(row, name) for row in rows))
        for name in ("collective", "type", "algorithm")
    )
    predicts = any(row.predicted for row in rows)
    height = len(collectives) + predicts
    picture = figure("draw", path, (4.2 * max(len(types), 2), 2.3 * height + 1))
    grid = picture.subplots(height, len(types), squeeze=False)
    for column, of_type in enumerate(types):
        mine = [row for row in rows if row.type == of_type]
        for panel, collective in zip(grid[:, column], collectives, strict=False):
            some = [row for row in mine if row.collective == collective]
            what = f"{collective} of {of_type}: time over lax by size"
            lines = [_over_lax(name, some) for name in algorithms]
            draw_lines(panel, what, "", lines, bytes_in_words)
            panel.set_yscale("log", base=2)
            panel.yaxis.set_major_formatter("{x:g}")
        if predicts:
            panel = grid[-1, column]
            points = [_predicted(name, mine) for name in algorithms]
            what = f"{of_type}: predicted time"
            draw_lines(panel, what, "measured time", points, seconds_in_words)
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter(lambda seconds, _: seconds_in_words(seconds))
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_minor_formatter("")
            measured = [seconds for line in points for seconds in line.places]
            panel.plot(measured, measured, color="#bbbbbb", linewidth=0.8)  # where both are equal
    labels = grid[0, 0].get_legend_handles_labels()
    picture.legend(*labels, loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    picture.suptitle(f"{title}\nbelow 1 is faster than lax", fontsize="small")
    save(picture, path)


def _over_lax(algorithm: str, rows: Sequence[Measurement]) -> PlotLine:
    """The ratios of an algorithm by size."""
    of = [row for row in rows if row.algorithm == algorithm]
    ratios = [row.vs_lax.median for row in of if row.vs_lax]
    return PlotLine(algorithm, [row.size for row in of], ratios, ratios)


def _predicted(algorithm: str, rows: Sequence[Measurement]) -> PlotLine:
    """Predicted by measured seconds of an algorithm, as points without a line."""
    of = [row for row in rows if row.algorithm == algorithm and row.predicted]
    measured = [row.seconds.median for row in of if row.seconds]
    return PlotLine(algorithm, measured, [nan] * len(of), [row.predicted or nan for row in of])
