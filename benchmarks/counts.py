"""Programs of which the text holds no times, as of GPUs: what is hidden is counted."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks import report
from ringcoll.overlap import Report


def counts(made: Report) -> dict[str, tuple[int, int]]:
    """By kind of collective, how many have a matmul under them, and how many there are."""
    hidden: Counter[str] = Counter()
    every: Counter[str] = Counter()
    for row in made.rows:
        hidden[row.kind] += row.count - row.bare
        every[row.kind] += row.count
    return {kind: (hidden[kind], every[kind]) for kind in every}


def show(found: Sequence[Any]) -> None:
    """Print a table of what `benchmarks.overlap` found."""
    made = report.table(
        *("topology", "form", "direction", "shape", "algorithm"),
        *("with a matmul under them", "temp\nMiB", "compile\ns"),
    )
    for one in found:
        made.add_row(
            *one.names,
            ", ".join(f"{kind} {hidden} of {n}" for kind, (hidden, n) in one.counts.items()),
            "" if one.temporaries is None else f"{one.temporaries / 2**20:.0f}",
            f"{one.compile_seconds:.1f}",
        )
    report.console().print(made)
