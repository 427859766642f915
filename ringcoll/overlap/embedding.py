"""Orders of a mesh or torus of chips in which the neighbours of a ring are neighbours."""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import prod

import numpy as np

from ringcoll.overlap.network import Place


def ring_order(size: Sequence[int], wrap: Sequence[bool]) -> list[Place]:
    """The places of a box in the order of a ring with the shortest steps.

    All steps are one hop where an axis of even size and another one are there, or the one
    axis is a ring; along a line they are at most two, forth on every second place and back
    on those left out.

        4 x 2   0 1 2 3      a line of 6   0 5 1 4 2 3
                7 6 5 4
    """
    long = [axis for axis, n in enumerate(size) if n > 1]
    if len(long) <= 1:
        n = prod(size)
        ring = bool(long) and wrap[long[0]]
        along = list(range(n)) if ring else [*range(0, n, 2), *range(1, n, 2)[::-1]]
        return [tuple(i if axis in long else 0 for axis in range(len(size))) for i in along]
    even = next((axis for axis in long if size[axis] % 2 == 0), None)
    if even is None:
        return list(_snake(size))
    # Rows along the even axis, columns along a path over all others: forth and back in all
    # columns but the first, and home along the first.
    rest = [1 if axis == even else n for axis, n in enumerate(size)]
    columns, rows = list(_snake(rest)), size[even]
    order = [(0, 0)]
    for row in range(rows):
        way = range(1, len(columns))
        order += [(row, column) for column in (way if row % 2 == 0 else reversed(way))]
    order += [(row, 0) for row in range(rows - 1, 0, -1)]
    return [(*columns[c][:even], row, *columns[c][even + 1 :]) for row, c in order]


def _snake(size: Sequence[int]) -> Iterator[Place]:
    """All places of a box, each beside the last."""
    if not size:
        yield ()
        return
    for i, before in enumerate(_snake(size[:-1])):
        last = range(size[-1])
        yield from ((*before, n) for n in (last if i % 2 == 0 else reversed(last)))


def embed(size: Sequence[int], wrap: Sequence[bool], shape: Sequence[int]) -> np.ndarray | None:
    """Places for the ranks of a logical mesh, each of its axes a ring of short steps.

    Each logical axis gets physical axes of its own.

    Returns:
        An array of shape `(*shape, len(size))`; None if the axes cannot be dealt out so.
    """
    dealt = _deal(size, tuple(a for a, n in enumerate(size) if n > 1), tuple(shape))
    if dealt is None:
        return None
    orders = []
    for axes in dealt:
        box = [n if axis in axes else 1 for axis, n in enumerate(size)]
        orders.append(ring_order(box, wrap))
    places = [np.sum(picked, axis=0) for picked in product(*orders)]
    return np.array(places, int).reshape(*shape, len(size))


def _deal(
    size: Sequence[int], axes: tuple[int, ...], shape: tuple[int, ...]
) -> list[tuple[int, ...]] | None:
    if not shape:
        return None if axes else []
    for count in range(len(axes) + 1):
        for chosen in combinations(axes, count):
            if prod(size[a] for a in chosen) == shape[0]:
                left = tuple(a for a in axes if a not in chosen)
                rest = _deal(size, left, shape[1:])
                if rest is not None:
                    return [chosen, *rest]
    return None
