"""Fit alpha, beta and gamma to the rows of a run, and predict times.

Each dtype has its own model, because the time to add a byte differs between dtypes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from benchmarks.collectives.cases import on_shape
from benchmarks.measuring.row import Measurement
from ringcoll.algorithms import COLLECTIVES
from ringcoll.costs import Model, Price, Sample, fit, price, seconds
from ringcoll.schedules.registry import LAX

#: The fewest rows for a fit: three coefficients fit any three rows.
ENOUGH = 4


class Fitted(NamedTuple):
    """A model, its median relative error, and how many rows it was fitted to."""

    model: Model
    error: float
    rows: int


def paid(row: Measurement) -> Price | None:
    """The price of a row's algorithm in units of 1/n of its size; None for a built-in.

    It is also None with an option: no price includes the time to encode, or to add by a tree.
    """
    if row.resolved == LAX or row.ranks == 1 or row.option:
        return None
    if row.collective in COLLECTIVES:
        name, shape = on_shape(row.resolved)
        return price(row.collective, name, shape or (row.ranks,))
    size = Fraction(row.ranks)
    return Price(rounds=1, messages=1, startups=1, sent=size, raw=size, link=size)


def predict(
    row: Measurement, model: Model, counted: Callable[[Measurement], Price | None] = paid
) -> float | None:
    """The seconds of a row's algorithm by its price; None for a built-in."""
    counts = counted(row)
    if counts is None:
        return None
    return seconds(counts, row.size / row.ranks, model)


def fit_rows(
    rows: Sequence[Measurement], counted: Callable[[Measurement], Price | None] = paid
) -> tuple[dict[str, Fitted], list[Measurement]]:
    """The model of each dtype, and the rows with its predictions.

    A model is fitted to the rows of hand-written algorithms (not of "auto"), if there are `ENOUGH`.

    Args:
        rows: the measurements.
        counted: the price of a row's algorithm, in units of 1/n of its size.
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
