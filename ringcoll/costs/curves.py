"""Curves: measured seconds over bytes as a few straight lines, and their fit.

Curves never fall. Measurements may fall (a cold first run, noise, a protocol that was chosen
badly). There the curve goes through the lower median of those that contradict each other.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, log
from statistics import median, median_low

import numpy as np

#: How much one more knot must lower the sum over all points of |log(fitted / measured)|.
_A_KNOT = 0.15


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds as a function of bytes: straight lines between knots (bytes, seconds).

    Below them, a message takes at most as long as the smallest one that was measured. Above them
    nobody measured: there the time is infinite.

    >>> curve = Curve(((1e3, 1e-5), (1e6, 2e-5)))
    >>> [curve(size) for size in (1, 1e3, 1e6, 2e6)]
    [1e-05, 1e-05, 2e-05, inf]
    """

    knots: tuple[tuple[float, float], ...]

    def __call__(self, nbytes: float) -> float:
        (first, floor), (last, _) = self.knots[0], self.knots[-1]
        if nbytes <= first:
            return floor
        if nbytes > last:
            return inf
        above = bisect_left(self.knots, (nbytes,))
        (low, short), (high, long) = self.knots[above - 1 : above + 1]
        return short + (long - short) * (nbytes - low) / (high - low)


def fit_curve(points: Iterable[tuple[float, float]]) -> tuple[Curve, float]:
    """A curve with few knots that fits the points, and its median relative error.

    Points of one size count as their median. The fit minimises the sum of |log(fitted / measured)|
    plus a price for each knot, so a straight line stays one line however many points it has.

    Args:
        points: bytes and seconds, above 0; any number of points for each size.

    >>> curve, error = fit_curve((2.0**k, 1e-5 + 2.0**k / 1e9) for k in range(10, 30))
    >>> len(curve.knots) < 12, error < 0.02
    (True, True)
    """
    measured = list(points)
    by_size: dict[float, list[float]] = {}
    for size, seconds in measured:
        by_size.setdefault(size, []).append(seconds)
    sizes = sorted(by_size)
    curve = Curve(_knots(sizes, _never_falling([median(by_size[size]) for size in sizes])))
    return curve, median(abs(curve(size) / seconds - 1) for size, seconds in measured)


def _never_falling(seconds: Sequence[float]) -> list[float]:
    """Seconds without falls: where they fall, neighbours are replaced by their lower median."""
    pools: list[list[float]] = []
    for measured in seconds:
        pools.append([measured])
        while len(pools) > 1 and median_low(pools[-2]) > median_low(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [median_low(pool) for pool in pools for _ in pool]


def _knots(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """The points to use as knots: those with the least error plus price of knots."""
    costs: list[tuple[float, tuple[int, ...]]] = [(_A_KNOT, (0,))]
    for j in range(1, len(sizes)):
        costs.append(
            min(
                (cost + _A_KNOT + _error(sizes, seconds, i, j), (*chosen, j))
                for i, (cost, chosen) in enumerate(costs)
            )
        )
    return tuple((sizes[i], seconds[i]) for i in costs[-1][1])


def _error(sizes: Sequence[float], seconds: Sequence[float], i: int, j: int) -> float:
    """The error of the points between knots i and j."""
    between = range(i + 1, j)
    fitted = np.interp([sizes[k] for k in between], [sizes[i], sizes[j]], [seconds[i], seconds[j]])
    return sum(abs(log(f / seconds[k])) for f, k in zip(fitted, between, strict=True))
