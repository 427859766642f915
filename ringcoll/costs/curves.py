"""Measured seconds against bytes as straight pieces, and the fewest pieces that fit them.

Curves never fall. Where measurements do (a cold first run, noise, a protocol that was chosen
badly), a curve goes through the lower median of those that contradict each other.
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
        if nbytes <= first or first == last:
            return floor
        if nbytes > last:
            return most + (nbytes - last) * (most - floor) / (last - first)
        above = bisect_left(self.knots, (nbytes,))
        (low, short), (high, long) = self.knots[above - 1 : above + 1]
        return short + (long - short) * (nbytes - low) / (high - low)


def rising(sizes: Iterable[float], seconds: Callable[[float], float]) -> Curve:
    """The curve of some seconds, with knots at these sizes, that never falls."""
    ordered = sorted(set(sizes))
    return Curve(tuple(zip(ordered, accumulate(map(seconds, ordered), max), strict=True)))


def down_to(curve: Curve, start: float) -> Curve:
    """A curve that goes on below its first knot, along its first piece, to no less than a start.

    >>> down_to(Curve(((8.0, 3.0), (16.0, 4.0))), 1.0).knots[0]
    (0.0, 2.0)
    """
    (first, floor), *more = curve.knots
    if not more or first == 0:
        return curve
    slope = (more[0][1] - floor) / (more[0][0] - first)
    return Curve(((0.0, min(max(floor - slope * first, start), floor)), *curve.knots))


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
    curve = Curve(_knots(sizes, _never_falling([median(by_size[size]) for size in sizes])))
    return curve, median(abs(curve(size) / seconds - 1) for size, seconds in measured)


def _never_falling(seconds: Sequence[float]) -> list[float]:
    """Seconds that never fall: neighbours that fall get their lower median, until none fall."""
    pools: list[list[float]] = []
    for one in seconds:
        pools.append([one])
        while len(pools) > 1 and median_low(pools[-2]) > median_low(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [median_low(pool) for pool in pools for _ in pool]


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


class Way(Enum):
    """What a collective does among ranks, which says how its time grows with their number."""

    SWITCH = "on one host"
    RING = "n-1 steps round a ring of all ranks, over hosts"
    TREE = "up and down a tree of hosts"
    DIRECT = "a message to every other rank, over hosts"


def across(curves: Mapping[int, Curve], ranks: int, way: Way = Way.SWITCH, local: int = 1) -> Curve:
    """The curve of a number of ranks that may not have been measured.

    Between two numbers that were, the logarithm of the time is a line in the logarithm of the
    number. On one host, the line through the nearest two goes on beyond all that were. Over hosts,
    two parts grow apart beyond them: the start with the depth of a tree, or with the messages of a
    rank; the rest with the bytes that leave a host. For a ring, this holds for the time of a step
    with messages of one size; beyond the measured numbers it stays the same.

    Args:
        curves: by number of ranks; at least one.
        ranks: their number.
        way: of the collective.
        local: the ranks of a host, if there are several hosts.
    """
    return _across(tuple(sorted(curves.items())), ranks, way, local)


@lru_cache(maxsize=4096)
def _across(known: tuple[tuple[int, Curve], ...], ranks: int, way: Way, local: int) -> Curve:
    if ranks in (curves := dict(known)):
        return curves[ranks]
    if way is Way.RING:  # as if each had been of so many ranks
        curves = {n: _stretched(one, ranks / n, (ranks - 1) / (n - 1)) for n, one in known}
    numbers = list(curves)
    # The two around it, or the nearest two.
    above = min(max(bisect_left(numbers, ranks), 1), len(numbers) - 1)
    few, many = numbers[max(above - 1, 0)], numbers[above]
    if few < ranks < many or (way is Way.SWITCH and few < many):
        return _on_a_line(few, curves[few], many, curves[many], ranks)
    nearest = few if ranks < few else many
    if way is Way.RING:
        return curves[nearest]
    return _grown(curves[nearest], nearest, ranks, way, local)


def _on_a_line(few: int, fewer: Curve, many: int, more: Curve, ranks: int) -> Curve:
    """The logarithm of the time is a line in that of the number; beyond, of a slope from 0 to 1."""
    span = log(many / few)
    beyond = not few < ranks < many
    nearest, near = (few, fewer) if ranks < few else (many, more)

    def seconds(size: float) -> float:
        slope = log(more(size) / fewer(size)) / span
        if beyond:
            return near(size) * (ranks / nearest) ** min(max(slope, 0.0), 1.0)
        return fewer(size) * (ranks / few) ** slope

    return rising((size for one in (fewer, more) for size, _ in one.knots), seconds)


def _stretched(curve: Curve, wide: float, long: float) -> Curve:
    return Curve(tuple((size * wide, seconds * long) for size, seconds in curve.knots))


def _grown(curve: Curve, known: int, ranks: int, way: Way, local: int) -> Curve:
    """The curve of a known number of ranks, with a start and a rest that grow apart."""
    (starts, crossing), (once, before) = (_growth(way, n, local) for n in (ranks, known))
    start = curve.knots[0][1]
    return rising(
        (size for size, _ in curve.knots),
        lambda size: start * starts / once + (curve(size) - start) * crossing / before,
    )


def _growth(way: Way, ranks: int, local: int) -> tuple[float, float]:
    """Factors that the start, and what is above it, are in proportion to."""
    hosts = max(ranks / local, 2)
    if way is Way.DIRECT:
        return ranks - 1, 1 - 1 / hosts
    if way is Way.TREE:  # two hosts exchange their sums; an inner one of more sends two
        return log(2 * hosts), 0.5 if hosts == 2 else 1.0
    return log(2 * ranks), 1 - 1 / ranks
