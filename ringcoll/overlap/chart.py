"""Draw timelines, with compute above the wire."""

from collections.abc import Sequence
from typing import Any

from ringcoll.io.figure import Path, figure, save
from ringcoll.overlap.timeline import Segment
from ringcoll.overlap.tracks import dealt

#: Row of the picture (1 above, 0 below), colour, and text of the legend.
LOOKS = {
    "compute": (1, "#4477aa", "compute"),
    "memory": (1, "#ccbb44", "wait for memory"),
    "exposed": (1, "#ee6677", "wait for the wire: exposed"),
    "wire": (0, "#228833", "wire"),
    "skipped": (1, "#bbbbbb", "more turns of a loop, alike"),
}


def draw(timelines: Sequence[tuple[str, Sequence[Segment]]], path: Path) -> None:
    """Draw timelines, one above the other, on one axis of time.

    Args:
        timelines: the title and the segments of each.
        path: the file; its ending says which format (svg, png).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    made = figure("draw", path, (11, 0.9 + 1.7 * len(timelines)))
    panels = made.subplots(len(timelines), sharex=True, squeeze=False)[:, 0]
    for axes, (title, segments) in zip(panels, timelines, strict=True):
        _panel(axes, title, segments)
    axes.set_xlabel("microseconds")
    shown = [axes.get_legend_handles_labels() for axes in panels]
    legend = {label: bar for bars, labels in shown for bar, label in zip(bars, labels, strict=True)}
    made.legend(
        legend.values(),
        legend.keys(),
        loc="outside lower center",
        ncols=len(LOOKS),
        fontsize="small",
        frameon=False,
    )
    save(made, path)


def _panel(axes: Any, title: str, segments: Sequence[Segment]) -> None:
    for kind, (row, colour, legend) in LOOKS.items():
        lanes = dealt([s for s in segments if s.row == kind])
        for i, lane in enumerate(lanes):
            axes.broken_barh(
                [(s.start * 1e6, (s.stop - s.start) * 1e6) for s in lane],
                (row + 0.35 - 0.7 * (i + 1) / len(lanes), 0.7 / len(lanes)),
                facecolors=colour,
                edgecolors="white",
                linewidth=0.4,
                hatch="//" if kind == "skipped" else None,
                label=legend,
            )
    axes.set(yticks=(1, 0), yticklabels=("compute", "wire"))
    axes.set_ylim(-0.5, 1.5)
    axes.set_title(title, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
