"""Draw a run: the time over lax's by size, and the predicted time by the measured one."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.measuring.row import Measurement
from ringcoll.io.files import write
from ringcoll.io.text import bytes_in_words, seconds_in_words

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


def draw(path: str, header: Mapping[str, Any], rows: Sequence[Measurement]) -> None:
    """Draw a row of panels for each collective, and one for predictions; a column for each type.

    Args:
        path: the file, an SVG.
        header: the machine, as `options.describe` returns it.
        rows: measurements with times, from small sizes to large.
    """
    algorithms = list(dict.fromkeys(row.algorithm for row in rows))
    collectives = list(dict.fromkeys(row.collective for row in rows))
    types = list(dict.fromkeys(row.type for row in rows))
    size = 4.2 * max(len(types), 2), 2.3 * len(collectives) + 3.3  # inches
    picture = Figure(figsize=size, layout="constrained")
    grid = picture.subplots(len(collectives) + 1, len(types), squeeze=False)
    lines = {}
    for of_type, (*panels, last) in zip(types, grid.T, strict=True):
        for number, name in enumerate(algorithms):
            colour = f"C{number % 10}"
            mine = [row for row in rows if (row.type, row.algorithm) == (of_type, name)]
            for panel, collective in zip(panels, collectives, strict=True):
                some = [row for row in mine if row.collective == collective]
                ratios = [row.vs_lax.median for row in some if row.vs_lax]
                if some:
                    (lines[name],) = panel.plot([r.size for r in some], ratios, ".-", color=colour)
            if known := [row for row in mine if row.predicted]:
                measured = [row.seconds.median for row in known if row.seconds]
                last.plot(measured, [row.predicted for row in known], ".", color=colour)
                last.plot(measured, measured, color="#bbbbbb", linewidth=0.8, zorder=1)  # equal
        for panel, collective in zip(panels, collectives, strict=True):
            _frame(panel, f"{collective} of {of_type}: time over lax by size", 2)
            panel.xaxis.set_major_formatter(lambda size, _: bytes_in_words(size))
            panel.yaxis.set_major_formatter("{x:g}")
        _frame(last, f"{of_type}: predicted time by measured time", 10)
        for axis in (last.xaxis, last.yaxis):
            axis.set_major_formatter(lambda seconds, _: seconds_in_words(seconds))
            axis.set_minor_formatter("")
    picture.legend(
        list(lines.values()),
        list(lines),
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize="small",
    )
    on = f"{header['devices']} x {header['device_kind']}, jax {header['jax']}, {header['date']}"
    picture.suptitle(f"{on}; over lax: below 1 is faster", fontsize="small")
    drawn = BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # text as text
        picture.savefig(drawn, format="svg")
    write(path, _in_the_dark(drawn.getvalue()))


def _frame(panel: Any, title: str, base: int) -> None:
    """Set the title, logarithmic scales, and grid of a panel; hide a panel without data."""
    if not panel.has_data():
        panel.set_visible(False)
        return
    panel.set_title(title, fontsize="small")
    panel.set_xscale("log", base=base)
    panel.set_yscale("log", base=base)
    panel.grid(True, color="#eeeeee")
    panel.spines[["top", "right"]].set_visible(False)


def _in_the_dark(picture: bytes) -> bytes:
    """An SVG by matplotlib, with colours for dark paper added."""
    return picture.replace(b"</style>", f"\n{_DARK}</style>".encode(), 1)
