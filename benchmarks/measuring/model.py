"""What the model of this run predicts: alpha, beta and gamma, fitted to its rows.

One model a dtype: a narrow addition costs another time a byte than a wide one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from benchmarks.collectives.cases import on_shape
from benchmarks.measuring.row import Measurement
from ringcoll.algorithms import COLLECTIVES
from ringcoll.collectives.table import BUILT_INS
from ringcoll.cost import Model, Sample, fit, seconds
from ringcoll.pricing import Price, price

#: Fewer rows would fit any three coefficients.
ENOUGH = 4


class Fitted(NamedTuple):
    """A model, its median relative error, and how many rows it was fitted to."""

    model: Model
    error: float
    rows: int


def paid(row: Measurement) -> Price | None:
    """What the row's algorithm pays, in 1/n of its size; None for a built-in."""
    if row.resolved.endswith(BUILT_INS) or row.ranks == 1:
        return None
    if row.collective in COLLECTIVES:
        name, shape = on_shape(row.resolved)
        return price(row.collective, name, shape or (row.ranks,))
    whole = Fraction(row.ranks)
    return Price(rounds=1, messages=1, startups=1, sent=whole, raw=whole, link=whole)


def predict(
    row: Measurement, model: Model, counted: Callable[[Measurement], Price | None] = paid
) -> float | None:
    """The seconds that a row's algorithm should take, by what it is counted to pay."""
    counts = counted(row)
    if counts is None:
        return None
    return seconds(counts, row.size / row.ranks, model)


def fit_rows(
    rows: Sequence[Measurement], counted: Callable[[Measurement], Price | None] = paid
) -> tuple[dict[str, Fitted], list[Measurement]]:
    """The model of each dtype, and the rows with what it predicts.

    Fitted to the hand-written algorithms, each by its own name, if there are `ENOUGH`.

    Args:
        rows: what was measured.
        counted: what a row's algorithm pays, in 1/n of its size.
    """
    samples: dict[str, list[Sample]] = {}
    for row in rows:
        counts = counted(row)
        if row.algorithm == row.resolved and counts and row.seconds:
            shard = row.size / row.ranks
            link, added = float(counts.link) * shard, float(counts.additions) * shard
            sample = Sample(counts.startups, link, added, row.seconds.median)
            samples.setdefault(row.type, []).append(sample)
    fitted = {name: Fitted(*fit(s), len(s)) for name, s in samples.items() if len(s) >= ENOUGH}
    return fitted, [
        replace(row, predicted=predict(row, fitted[row.type].model, counted))
        if row.type in fitted
        else row
        for row in rows
    ]
