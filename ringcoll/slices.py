"""Slices of TPUs: which axes of their chips close into rings, and how ranks are laid on them.

The rules are those of Google's documents of v5e, v5p, v6e and tpu7x
(docs.cloud.google.com/tpu/docs); a slice may be set up otherwise.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

#: By the number of axes along which a kind of chip has links: the side at which axes close.
SIDES: Mapping[int, int] = MappingProxyType({2: 16, 3: 4})


def closed(axes: int, size: Sequence[int]) -> tuple[bool, ...]:
    """Which axes of a slice of chips are rings; the others are lines.

    Chips with two axes (v5e, v6e) close an axis of 16; those with three (v4, v5p, tpu7x) close
    every axis of a slice of whole cubes of 4 x 4 x 4, or none.

    Args:
        axes: along how many a chip has links: 2 or 3.
        size: the chips along each axis.
    """
    if axes == 2:
        return tuple(n == SIDES[2] for n in size)
    cubes = len(size) == 3 and all(n % SIDES[3] == 0 for n in size)
    return (cubes,) * len(size)


def rings(axes: int, shape: Sequence[int]) -> tuple[bool, ...]:
    """Which axes of ranks are rings of neighbours, on a slice of as many chips.

    An even number of ranks above two, on one axis, goes round a box of chips (as
    `overlap.mesh` lays it). Several axes are taken for those of the slice. (There `cost` and
    `overlap` agree where every axis is a ring. Where one is a line, `overlap.mesh` may lay an
    axis in boxes, and `overlap` counts the bytes of a message for every link that it passes.)

    Args:
        axes: as for `closed`.
        shape: the ranks along each axis.
    """
    if sum(n > 1 for n in shape) == 1:
        return tuple(n > 2 and n % 2 == 0 for n in shape)
    return closed(axes, shape)


def along(n: int, is_ring: bool) -> list[int]:
    """The places along an axis of n, in the order of ranks whose neighbours are near.

    On a line steps are at most two, forth on every second place and back on those left out.

        a line of 6   0 5 1 4 2 3
    """
    return list(range(n)) if is_ring else [*range(0, n, 2), *range(1, n, 2)[::-1]]
