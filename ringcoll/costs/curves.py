"""Curves: measured seconds over bytes as a few straight lines, and their fit.

Curves never fall. Measurements may fall (a cold first run, noise, a protocol that was chosen
badly). There the curve goes through the lower median of those that contradict each other.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate
from math import log
from statistics import median, median_low

import numpy as np

#: How much one more knot must lower the sum over all points of |log(fitted / measured)|.
_A_KNOT = 0.15


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds as a function of bytes: straight lines between knots (bytes, seconds).

    Below the first knot it is flat. Above the last knot it rises as the whole curve does, from the
    first knot to the last.

    >>> curve = Curve(((1e3, 1e-5), (1e6, 2e-5)))
    >>> [f"{curve(size):.1e}" for size in (1, 1e6, 2e6)]
    ['1.0e-05', '2.0e-05', '3.0e-05']
    """

    knots: tuple[tuple[float, float], ...]

    def __call__(self, nbytes: float) -> float:
        (first, floor), (last, most) = self.knots[0], self.knots[-1]
        if nbytes <= first or first == last:
            return floor
        if nbytes > last:
            return most + (nbytes - last) * (most - floor) / (last - first)
        above = bisect_left(self.knots, (nbytes,))
        (low, short), (high, long) = self.knots[above - 1 : above + 1]
        return short + (long - short) * (nbytes - low) / (high - low)


def rising(sizes: Iterable[float], seconds: Callable[[float], float]) -> Curve:
    """A curve with knots at these sizes. Where `seconds` falls, the curve stays level."""
    ordered = sorted(set(sizes))
    return Curve(tuple(zip(ordered, accumulate(map(seconds, ordered), max), strict=True)))


def down_to(curve: Curve, start: float) -> Curve:
    """Extend a curve below its first knot, along its first line, but not below `start` seconds.

    >>> down_to(Curve(((8.0, 3.0), (16.0, 4.0))), 1.0).knots[0]
    (0.0, 2.0)
    """
    (first, floor), *more = curve.knots
    if not more or first == 0:
        return curve
    slope = (more[0][1] - floor) / (more[0][0] - first)
    return Curve(((0.0, min(max(floor - slope * first, start), floor)), *curve.knots))


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


class Way(Enum):
    """How a collective sends. Its time grows with the number of ranks accordingly."""

    SWITCH = "on one host"
    RING = "n-1 steps round a ring of all ranks, over hosts"
    TREE = "up and down a tree of hosts"
    DIRECT = "a message to every other rank, over hosts"


def across(curves: Mapping[int, Curve], ranks: int, way: Way = Way.SWITCH, local: int = 1) -> Curve:
    """The curve for a number of ranks that may not have been measured.

    Between two measured numbers, the logarithm of the time is a line in the logarithm of the
    number. Beyond the measured numbers on one host, the line through the nearest two continues.
    Beyond them over several hosts, the time has two parts that grow differently: the start grows
    with the depth of a tree, or with the messages of a rank; the rest grows with the bytes that
    leave a host. A ring is different: the line is for the time of one step with messages of one
    size, and beyond the measured numbers that time stays the same.

    Args:
        curves: the measured curves by number of ranks; at least one.
        ranks: the number of ranks.
        way: how the collective sends.
        local: the ranks of a host, if there are several hosts.
    """
    return _across(tuple(sorted(curves.items())), ranks, way, local)


@lru_cache(maxsize=4096)
def _across(known: tuple[tuple[int, Curve], ...], ranks: int, way: Way, local: int) -> Curve:
    if ranks in (curves := dict(known)):
        return curves[ranks]
    if way is Way.RING:  # the times that these would have with `ranks` ranks and the same steps
        curves = {n: _stretched(curve, ranks / n, (ranks - 1) / (n - 1)) for n, curve in known}
    numbers = list(curves)
    # The measured numbers below and above; beyond all of them, the nearest two.
    above = min(max(bisect_left(numbers, ranks), 1), len(numbers) - 1)
    few, many = numbers[max(above - 1, 0)], numbers[above]
    if few < ranks < many or (way is Way.SWITCH and few < many):
        return _on_a_line(few, curves[few], many, curves[many], ranks)
    nearest = few if ranks < few else many
    if way is Way.RING:
        return curves[nearest]
    return _grown(curves[nearest], nearest, ranks, way, local)


def _on_a_line(few: int, fewer: Curve, many: int, more: Curve, ranks: int) -> Curve:
    """A curve on the line through two: log(time) over log(ranks).

    Beyond the two, its slope is clipped to [0, 1].
    """
    span = log(many / few)
    beyond = not few < ranks < many
    nearest, near = (few, fewer) if ranks < few else (many, more)

    def seconds(size: float) -> float:
        slope = log(more(size) / fewer(size)) / span
        if beyond:
            return near(size) * (ranks / nearest) ** min(max(slope, 0.0), 1.0)
        return fewer(size) * (ranks / few) ** slope

    return rising((size for curve in (fewer, more) for size, _ in curve.knots), seconds)


def _stretched(curve: Curve, wide: float, long: float) -> Curve:
    """A curve with bytes times `wide`, and seconds times `long`."""
    return Curve(tuple((size * wide, seconds * long) for size, seconds in curve.knots))


def _grown(curve: Curve, known: int, ranks: int, way: Way, local: int) -> Curve:
    """The curve of `known` ranks, grown to `ranks`: the start and the rest grow differently."""
    (starts, crossing), (once, before) = (_growth(way, n, local) for n in (ranks, known))
    start = curve.knots[0][1]
    return rising(
        (size for size, _ in curve.knots),
        lambda size: start * starts / once + (curve(size) - start) * crossing / before,
    )


def _growth(way: Way, ranks: int, local: int) -> tuple[float, float]:
    """Two numbers: the start is in proportion to the first, the rest to the second."""
    hosts = max(ranks / local, 2)
    if way is Way.DIRECT:
        return ranks - 1, 1 - 1 / hosts
    if way is Way.TREE:  # two hosts exchange their sums; of more hosts, an inner one sends two sums
        return log(2 * hosts), 0.5 if hosts == 2 else 1.0
    return log(2 * ranks), 1 - 1 / ranks
