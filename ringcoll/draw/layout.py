"""Where a picture shows the ranks: on a circle, or on the grid of their torus."""

from dataclasses import dataclass
from math import ceil, cos, pi, prod, sin, sqrt

Point = tuple[float, float]


def long_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes that have more than one rank."""
    return tuple(n for n in shape if n > 1) or (1,)


def cell_places(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The column and row of each rank's cell.

    One axis is cut into a few rows. Of two axes, the longer is horizontal. Of three, the planes
    are side by side.
    """
    axes = long_axes(shape)
    if len(axes) == 1:
        n = axes[0]
        columns = n if n <= 5 else ceil(n / 2) if n <= 8 else ceil(sqrt(n))
        return [(rank % columns, rank // columns) for rank in range(n)]
    if len(axes) == 2 and axes[0] > axes[1]:
        return [(i, j) for i in range(axes[0]) for j in range(axes[1])]
    *planes, rows, columns = axes
    return [
        (plane * columns + column, row)
        for plane in range(prod(planes))
        for row in range(rows)
        for column in range(columns)
    ]


@dataclass(frozen=True)
class PictureLayout:
    """The centres of the boxes of all ranks; all boxes have one size."""

    shape: tuple[int, ...]
    box: Point
    gap: float
    centres: tuple[Point, ...]


def plane_size(shape: tuple[int, ...]) -> tuple[int, int]:
    """The number of columns and of rows of a plane of the grid."""
    axes = long_axes(shape)
    return (axes[0], axes[1]) if len(axes) == 2 and axes[0] > axes[1] else (axes[-1], axes[-2])


def place_ranks(shape: tuple[int, ...], box: Point, gap: float) -> PictureLayout:
    """Place ranks of a shape so that there is room for messages.

    Args:
        shape: the sizes of the axes.
        box: width and height of a rank.
        gap: the free space between two boxes.
    """
    width, height = box
    axes = long_axes(shape)
    if len(axes) > 1:
        centres = [
            (column * (width + gap) + column // plane_size(shape)[0] * gap, row * (height + gap))
            for column, row in cell_places(shape)
        ]
        return PictureLayout(shape, box, gap, tuple(centres))
    n = axes[0]
    first = pi if n == 2 else -pi / 2  # two side by side, more from the top on
    unit = [(cos(first + 2 * pi * r / n), sin(first + 2 * pi * r / n)) for r in range(n)]
    # The least radius at which every two boxes are that far apart, horizontally or vertically.
    least = (
        min((width + gap) / max(abs(ax - bx), 1e-9), (height + gap) / max(abs(ay - by), 1e-9))
        for i, (ax, ay) in enumerate(unit)
        for bx, by in unit[:i]
    )
    radius = max(least, default=0.0)
    return PictureLayout(shape, box, gap, tuple((x * radius, y * radius) for x, y in unit))
