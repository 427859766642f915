"""Order the chips of a mesh or torus so that neighbours on a ring are physical neighbours."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import numpy as np

from ringcoll.costs.slices import along

Coords = tuple[int, ...]


def ring_order(size: Sequence[int], wrap: Sequence[bool]) -> list[Coords]:
    """The places of a box in the order of a ring with the shortest steps.

    All steps are one hop if the box has two or more axes and one of them has even size, or if its
    only axis is a ring. Along a line, steps are at most two hops: the ring goes forward over every
    second place, and back over the others.

        4 x 2   0 1 2 3      a line of 6   0 5 1 4 2 3
                7 6 5 4
    """
    long = [axis for axis, n in enumerate(size) if n > 1]
    if len(long) <= 1:
        n = prod(size)
        line = along(n, bool(long) and wrap[long[0]])
        return [tuple(i if axis in long else 0 for axis in range(len(size))) for i in line]
    even = next((axis for axis in long if size[axis] % 2 == 0), None)
    if even is None:
        return list(_snake(size))
    # Rows are along the even axis, columns along a path over all other axes. The order goes back
    # and forth over all columns but the first, and returns along the first.
    rest = [1 if axis == even else n for axis, n in enumerate(size)]
    columns, rows = list(_snake(rest)), size[even]
    order = [(0, 0)]
    for row in range(rows):
        way = range(1, len(columns))
        order += [(row, column) for column in (way if row % 2 == 0 else reversed(way))]
    order += [(row, 0) for row in range(rows - 1, 0, -1)]
    return [(*columns[c][:even], row, *columns[c][even + 1 :]) for row, c in order]


def _snake(size: Sequence[int]) -> Iterator[Coords]:
    """All places of a box in an order in which each is a neighbour of the one before."""
    if not size:
        yield ()
        return
    for i, before in enumerate(_snake(size[:-1])):
        last = range(size[-1])
        yield from ((*before, n) for n in (last if i % 2 == 0 else reversed(last)))


def embed(size: Sequence[int], wrap: Sequence[bool], shape: Sequence[int]) -> np.ndarray | None:
    """Places for the ranks of a logical mesh, so that each axis is a ring of short steps.

    The last logical axis is a box of chips, the one before it a box of these boxes, and so on. The
    last axis usually sends most, so it gets the shortest steps; the axis before it gets the
    shortest steps that are left.

        4 x 4 as (2, 8)   0 1 2 3
                          7 6 5 4
                          8 9 a b
                          f e d c

    Returns:
        An array of shape `(*shape, len(size))`; None if the chips cannot be cut into such boxes.
    """
    best: list[np.ndarray] | None = None
    least: list[tuple[int, int]] = []
    for boxes in _cuts(tuple(size), tuple(shape)):
        stride, rings, costs = np.ones(len(size), int), [], []
        for box in boxes:  # the last axis first
            closed = [w and b * s == n for w, b, s, n in zip(wrap, box, stride, size, strict=True)]
            rings.append(np.array(ring_order(box, closed), int) * stride)
            costs.append(_steps(rings[-1], size, wrap))
            stride = stride * box
        if best is None or costs < least:
            best, least = rings, costs
    if best is None:
        return None
    places = [np.sum(picked, axis=0) for picked in product(*reversed(best))]
    return np.array(places, int).reshape(*shape, len(size))


def _cuts(size: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """All ways to cut `size` into a box for each axis of a mesh, the last axis first."""
    if not shape:
        if prod(size) == 1:
            yield []
        return
    parts = [[part for part in range(1, n + 1) if n % part == 0] for n in size]
    for box in product(*parts):
        if prod(box) == shape[-1]:
            left = tuple(n // part for n, part in zip(size, box, strict=True))
            yield from ([box, *rest] for rest in _cuts(left, shape[:-1]))


def _steps(ring: np.ndarray, size: Sequence[int], wrap: Sequence[bool]) -> tuple[int, int]:
    """The hops of the longest step of a ring, and of all steps together."""
    away = np.abs(np.roll(ring, -1, axis=0) - ring)
    hops = np.where(wrap, np.minimum(away, np.array(size) - away), away).sum(axis=1)
    return int(hops.max()), int(hops.sum())
