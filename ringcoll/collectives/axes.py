"""The ranks that take part in a collective: the names of axes, and groups of ranks."""

import math
import operator
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

from jax import lax

AxisName = Hashable | Sequence[Hashable]
#: Groups as a caller may give them.
Groups = Iterable[Iterable[int]] | None
Grouped = tuple[tuple[int, ...], ...]

_NO_GROUPS = (
    "axis_index_groups is not a list of lists of ranks: {}; pass one such as [[0, 1], [2, 3]]"
)


def axes_of(axis_name: AxisName) -> tuple[Hashable, ...]:
    """The axes as a tuple, in the order given; a single name is one axis.

    Raises:
        TypeError: a name is not hashable.
        ValueError: an axis is named twice: lax may abort the process instead of raising.
    """
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if len(set(axes)) < len(axes):  # unhashable ones raise a TypeError, as in lax
        raise ValueError("repeated axis in axis_name; name each axis once")
    return axes


def as_tuples(groups: Groups) -> Grouped | None:
    """Groups as tuples. They are read only once, because they may be iterators.

    Raises:
        TypeError: they are not a list of lists.
    """
    try:
        return None if groups is None else tuple(map(tuple, groups))
    except TypeError as error:
        raise TypeError(_NO_GROUPS.format(error)) from error


def rank_count(axis_name: AxisName) -> int:
    """How many ranks there are over one axis or several."""
    return math.prod(map(lax.axis_size, axes_of(axis_name)))


def check_ranks(axes: Sequence[Hashable], grouped: Grouped | None) -> None:
    """Refuse an axis that is not bound or is given by its position, and groups that differ."""
    for axis in axes:
        if isinstance(axis, int):
            raise ValueError(
                f"{axis} is not a name; axes by position are lax's own; name an axis of the mesh"
            )
    n = rank_count(axes)  # refuses an axis that is not bound
    if grouped is None:
        return
    check_groups(grouped, n)
    if len(set(map(len, grouped))) > 1:
        raise ValueError("axis_index_groups are of several sizes; pass groups of one size")


def check_groups(grouped: Grouped, n: int) -> None:
    """Refuse groups that do not have each of n ranks exactly once.

    Raises:
        TypeError: a rank is not a whole number.
        ValueError: a rank is missing or occurs twice, or a group is empty.
    """
    try:
        are_all = are_all_ranks([rank for group in grouped for rank in group], n)
    except TypeError as error:
        raise TypeError(_NO_GROUPS.format(error)) from error
    if not are_all:
        raise ValueError(
            "axis_index_groups must cover all indices exactly once; name every rank of the axis in "
            "exactly one group"
        )
    if () in grouped:
        raise ValueError("axis_index_groups has a group of no ranks; leave it out")


def are_all_ranks(ranks: Collection[Any], n: int) -> bool:
    """Whether these are the ranks 0 to n-1, each once.

    Raises:
        TypeError: one equals a rank but is not an integer (1.0), or one cannot be compared.
    """
    are_all = len(ranks) == n and set(ranks) == set(range(n))
    return are_all and all(operator.index(rank) >= 0 for rank in ranks)
