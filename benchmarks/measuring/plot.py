"""Bus bandwidth against size, a PNG a collective: measured as points, modelled as a line."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.measuring.model import Fitted, predict
from benchmarks.measuring.row import Measurement
from ringcoll.collectives.table import LAX
from ringcoll.io.figure import save
from ringcoll.io.text import bytes_in_words

_INK, _MUTED, _GRID = "#0b0b0b", "#52514e", "#e1e0d9"
#: An algorithm keeps its colour whatever else is drawn; lax is the grey that others
#: are held against.
_COLOURS = {LAX: "#898781", "ring": "#2a78d6", "pairwise": "#2a78d6", "hop": "#2a78d6"}
_COLOURS |= {"bruck": "#1baf7a", "halving_doubling": "#eb6834", "two_ended": "#4a3aa7"}
_COLOURS |= {"bidirectional_ring": "#e34948", "recursive_doubling": "#eda100"}
_COLOURS |= {"direct": "#008300", "torus": "#e87ba4", "one_shot": "#9085e9"}


def draw(
    folder: str,
    header: Mapping[str, Any],
    rows: Sequence[Measurement],
    fitted: Mapping[str, Fitted],
) -> list[Path]:
    """Write `folder`/COLLECTIVE.png for every collective among the rows."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for collective, some in groupby(rows, lambda row: row.collective):
        figure = _figure(collective, header, list(some), fitted)
        paths.append(Path(folder) / f"{collective}.png")
        save(figure, paths[-1])
    return paths


def _figure(
    collective: str,
    header: Mapping[str, Any],
    rows: Sequence[Measurement],
    fitted: Mapping[str, Fitted],
) -> Figure:
    types = list(dict.fromkeys(row.type for row in rows))
    figure = Figure(figsize=(1 + 5.5 * len(types), 4.6), layout="constrained")
    panels = figure.subplots(1, len(types), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, types, strict=True):
        of_type = [row for row in rows if row.type == name and row.algorithm == row.resolved]
        _panel(panel, of_type, fitted.get(name))
        panel.set_title(name, color=_INK, loc="left", fontsize=11)
    panels[0].set_ylabel("bus bandwidth, GB/s", color=_MUTED)
    figure.suptitle(
        f"{collective}, {header['devices']} x {header['device_kind']}, jax {header['jax']}: "
        "measured (middle half shaded), modelled (dashed)",
        color=_INK,
        fontsize=12,
        x=0.01,
        ha="left",
    )
    return figure


def _panel(panel: Axes, rows: Sequence[Measurement], fitted: Fitted | None) -> None:
    for name in dict.fromkeys(row.algorithm for row in rows):
        of_name = [row for row in rows if row.algorithm == name]
        colour = _COLOURS.get(name, _MUTED)
        sizes = [row.size for row in of_name]
        low, median, high = zip(*map(_gigabytes_per_second, of_name), strict=True)
        panel.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        panel.plot(sizes, median, color=colour, linewidth=2, marker="o", markersize=5, label=name)
        if fitted:
            _modelled(panel, of_name, fitted, colour)
    sizes = sorted({row.asked for row in rows})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sizes, [bytes_in_words(size) for size in sizes])
    panel.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
    panel.set_xlabel("size, bytes", color=_MUTED)
    panel.grid(True, color=_GRID, linewidth=0.8)
    panel.tick_params(colors=_MUTED, which="both")
    panel.spines[:].set_visible(False)
    panel.legend(frameon=False, labelcolor=_INK)


def _gigabytes_per_second(row: Measurement) -> list[float]:
    return [row.busbw(seconds) / 1e9 for seconds in reversed(row.seconds or ())]


def _modelled(panel: Axes, rows: Sequence[Measurement], fitted: Fitted, colour: str) -> None:
    """A line over the sizes of an algorithm's rows; none where lax decides what is done."""
    sizes = np.geomspace(rows[0].size, rows[-1].size, 100)
    like = [replace(rows[0], size=round(size)) for size in sizes.tolist()]
    seconds = [predict(row, fitted.model) for row in like]
    if all(seconds):
        rates = [row.busbw(s) / 1e9 for row, s in zip(like, seconds, strict=True) if s]
        panel.plot(sizes, rates, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
