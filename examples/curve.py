"""Draws the losses of a run."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

_INK, _MUTED, _GRID = "#0b0b0b", "#52514e", "#e1e0d9"


def draw(path: Path, title: str, seen: Mapping[int, float], held_out: Mapping[int, float]) -> None:
    """Draw the loss of every step as a line, and that of held-out text as points."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    panel = figure.subplots()
    panel.plot(list(seen), list(seen.values()), color="#2a78d6", linewidth=1, label="seen")
    panel.plot(
        list(held_out), list(held_out.values()), color="#eb6834", marker="o", label="held out"
    )
    panel.set_title(title, color=_INK, loc="left", fontsize=11)
    panel.set_xlabel("step", color=_MUTED)
    panel.set_ylabel("loss, nats a byte", color=_MUTED)
    panel.grid(True, color=_GRID, linewidth=0.8)
    panel.tick_params(colors=_MUTED)
    panel.spines[:].set_visible(False)
    panel.legend(frameon=False, labelcolor=_INK)
    figure.savefig(path, dpi=150)
