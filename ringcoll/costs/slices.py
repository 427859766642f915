"""Slices of TPUs: which axes of their chips close into rings, and where ranks are placed on them.

The rules are from Google's documentation of v5e, v5p, v6e and tpu7x
(docs.cloud.google.com/tpu/docs). A slice may be set up differently.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

#: The length from which an axis closes into a ring, by the number of axes along which a chip has
#: links.
SIDES: Mapping[int, int] = MappingProxyType({2: 16, 3: 4})


def closed(axes: int, size: Sequence[int]) -> tuple[bool, ...]:
    """Which axes of a slice of chips are rings; the others are lines.

    With two axes (v5e, v6e), an axis of 16 chips is a ring. With three (v4, v5p, tpu7x), all axes
    are rings if the slice consists of whole cubes of 4 x 4 x 4; otherwise none is.

    Args:
        axes: the number of axes along which a chip has links: 2 or 3.
        size: the number of chips along each axis.
    """
    if axes == 2:
        return tuple(n == SIDES[2] for n in size)
    long = [n for n in size if n > 1]
    cubes = len(long) == 3 and all(n % SIDES[3] == 0 for n in long)
    return tuple(cubes and n > 1 for n in size)


def rings(axes: int, shape: Sequence[int]) -> tuple[bool, ...]:
    """Which axes of ranks are rings of neighbours, on a slice with as many chips as ranks.

    A single axis with an even number of ranks above two is a ring around a box of chips, as
    `ringcoll.mesh` places it. Several axes are assumed to be the axes of the slice.

    Args:
        axes: as for `closed`.
        shape: the number of ranks along each axis.
    """
    if sum(n > 1 for n in shape) == 1:
        return tuple(n > 2 and n % 2 == 0 for n in shape)
    return closed(axes, shape)


def along(n: int, is_ring: bool) -> list[int]:
    """The places of n ranks along an axis, such that each rank is near the next.

    On a line, ranks go forward over every second place and back over the others, so no step is
    longer than two.

        ranks on a line of 6   0 5 1 4 2 3
    """
    return list(range(n)) if is_ring else [*range(0, n, 2), *range(1, n, 2)[::-1]]
