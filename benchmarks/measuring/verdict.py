"""What the rows of a run show, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measuring.report import FASTER, SLOWER
from benchmarks.measuring.row import Measurement
from ringcoll.schedules.registry import LAX


def verdict(rows: Sequence[Measurement], header: Mapping[str, Any]) -> str:
    """Describe whether named algorithms are faster than lax, and what "auto" took.

    Args:
        rows: measurements with times.
        header: the machine, as `options.describe` returns it.
    """
    if header["devices"] == 1:
        return (
            "One device sends nothing, so these times do not compare algorithms; eight virtual "
            "devices: JAX_NUM_CPU_DEVICES=8 python -m benchmarks"
        )
    copies = header["platform"] == "cpu" and header["processes"] == 1
    words = []
    named = [row.vs_lax for row in rows if not row.label.startswith(("auto", LAX)) and row.vs_lax]
    if named:
        slower = sum(ratio.low > SLOWER for ratio in named)
        faster = sum(ratio.high < FASTER for ratio in named)
        because, expected = "", ""
        if copies and 2 * slower > len(named):
            because, expected = "one process: messages are copies, so ", ", as expected,"
        counts = f"{slower} of {len(named)} rows (faster in {faster})"
        words.append(f"{because}named algorithms are slower than lax{expected} in {counts}")
    chosen = [row for row in rows if row.algorithm == "auto" and row.vs_lax]
    others = [row for row in chosen if row.resolved != LAX]
    if chosen:
        words.append(f"`auto` took lax in {len(chosen) - len(others)} of {len(chosen)} rows")
    if others:
        ratios = sorted(row.vs_lax.median for row in others if row.vs_lax)
        names = ", ".join(dict.fromkeys(row.resolved for row in others))
        span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        words.append(f"in the others it took {names}, at {span} of lax's time")
    if copies:
        words.append("between hosts: python -m benchmarks cluster")
    text = "; ".join(words)
    return text[:1].upper() + text[1:]
