"""Between which ranks a collective is: the names of axes, and groups along them."""

import operator
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

AxisName = Hashable | Sequence[Hashable]
#: As they may be given, and as they are kept.
Groups = Iterable[Iterable[int]] | None
Grouped = tuple[tuple[int, ...], ...]

_NO_GROUPS = "axis_index_groups is no list of lists of ranks"


def axes_of(axis_name: AxisName) -> tuple[Hashable, ...]:
    """Several axes as they were given, or the one."""
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def as_tuples(groups: Iterable[Iterable[int]]) -> Grouped:
    """Groups that are read once: they may be iterators.

    Raises:
        TypeError: they are no groups.
    """
    try:
        return tuple(map(tuple, groups))
    except TypeError as error:
        raise TypeError(f"{_NO_GROUPS}: {error}") from error


def check_groups(grouped: Grouped, n: int) -> None:
    """Refuse groups that are not all of n ranks, once each.

    Raises:
        TypeError: a rank is no whole number.
        ValueError: one is missing, or there twice, or a group has none.
    """
    try:
        are_all = are_all_ranks([rank for group in grouped for rank in group], n)
    except TypeError as error:
        raise TypeError(f"{_NO_GROUPS}: {error}") from error
    if not are_all:
        raise ValueError("axis_index_groups must cover all indices exactly once")
    if () in grouped:
        raise ValueError("axis_index_groups has a group of no ranks; leave it out")


def are_all_ranks(ranks: Collection[Any], n: int) -> bool:
    """Whether these are the ranks 0..n-1, once each.

    Raises:
        TypeError: one that equals a rank is no whole number, or one cannot be compared.
    """
    are_all = len(ranks) == n and set(ranks) == set(range(n))
    return are_all and all(operator.index(rank) >= 0 for rank in ranks)
