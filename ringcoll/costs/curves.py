"""Measured seconds against bytes as straight pieces, and the fewest pieces that fit them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from statistics import median

import numpy as np

#: What one more knot must save: the sum over all points of |log(fitted / measured)|.
_A_KNOT = 0.15


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of so many bytes: straight lines between knots.

    Below the first knot it is flat. Above the last it goes on at the rate of the whole curve.

    >>> curve = Curve(((1e3, 1e-5), (1e6, 2e-5)))
    >>> [f"{curve(size):.1e}" for size in (1, 1e6, 2e6)]
    ['1.0e-05', '2.0e-05', '3.0e-05']
    """

    knots: tuple[tuple[float, float], ...]

    def __call__(self, nbytes: float) -> float:
        (first, floor), (last, most) = self.knots[0], self.knots[-1]
        if nbytes > last > first:
            return most + (nbytes - last) * (most - floor) / (last - first)
        sizes, seconds = np.array(self.knots).T
        return float(np.interp(nbytes, sizes, seconds))


def fit_curve(points: Iterable[tuple[float, float]]) -> tuple[Curve, float]:
    """The curve of the fewest knots that fit the points, and its median relative error.

    Points of one size count as their median. The fit minimises the sum of |log(fitted / measured)|
    and a price for each knot, so a straight line stays one piece however many points it has.

    Args:
        points: bytes and seconds; any number of each size.

    Raises:
        ValueError: no points, or one without bytes or seconds.

    >>> curve, error = fit_curve((2.0**k, 1e-5 + 2.0**k / 1e9) for k in range(10, 30))
    >>> len(curve.knots) < 12, error < 0.02
    (True, True)
    """
    measured = list(points)
    if not measured or not all(size > 0 and seconds > 0 for size, seconds in measured):
        raise ValueError(f"a curve needs points of more than 0 bytes and 0 seconds: {measured}")
    by_size: dict[float, list[float]] = {}
    for size, seconds in measured:
        by_size.setdefault(size, []).append(seconds)
    sizes = sorted(by_size)
    middle = [median(by_size[size]) for size in sizes]
    knots = _knots(sizes, _without_spikes(middle))
    curve = Curve(knots)
    return curve, median(abs(curve(size) / seconds - 1) for size, seconds in measured)


def _without_spikes(seconds: Sequence[float]) -> list[float]:
    """Without single points that are far above their neighbours, as a cold first run is."""
    smooth = list(seconds)
    for i in range(len(seconds) - 1):
        near = max(seconds[max(i - 1, 0)] if i else 0.0, seconds[i + 1])
        if seconds[i] > 1.5 * near:
            smooth[i] = near
    return smooth


def _knots(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Among the points, those that minimise the error and the price of knots."""
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
    between = range(i + 1, j)
    fitted = np.interp([sizes[k] for k in between], [sizes[i], sizes[j]], [seconds[i], seconds[j]])
    return sum(abs(log(f / seconds[k])) for f, k in zip(fitted, between, strict=True))


def across(curves: Mapping[int, Curve], ranks: int, nbytes: float, in_steps: bool = False) -> float:
    """Seconds on a number of ranks that may not have been measured.

    Between two numbers that were, the logarithm of the time is a line in the logarithm of the
    number. Beyond them the slope of the two nearest goes on, at least 0 and at most 1.

    Args:
        curves: by number of ranks; at least one.
        in_steps: n-1 steps of a message of nbytes / n. Then it is the time of a step, at one size
            of messages, that is carried from number to number; beyond them it stays.
    """
    known = sorted(curves)
    if ranks in curves:
        return curves[ranks](nbytes)

    def at(n: int) -> float:
        if in_steps:
            return curves[n](nbytes * n / ranks) / (n - 1) * (ranks - 1)
        return curves[n](nbytes)

    if ranks < known[0] or ranks > known[-1]:
        nearest = known[0] if ranks < known[0] else known[-1]
        if in_steps or len(known) == 1:
            return at(nearest)
        few, many = known[:2] if ranks < known[0] else known[-2:]
        slope = min(max(log(at(many) / at(few)) / log(many / few), 0.0), 1.0)
        return at(nearest) * exp(slope * log(ranks / nearest))
    few, many = next((a, b) for a, b in pairwise(known) if a < ranks < b)
    slope = log(at(many) / at(few)) / log(many / few)
    return at(few) * exp(slope * log(ranks / few))
