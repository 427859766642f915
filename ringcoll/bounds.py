"""Half-open bounds, of numbers and of versions: the first value is in, the last is not."""

from collections.abc import Callable
from typing import Any

from ringcoll.strict import shown

#: Of numbers; None is open.
Bounds = tuple[int | None, int | None]


def within(value: Any, bounds: tuple[Any, Any], order: Callable[[Any], Any]) -> bool:
    """Whether a value lies within bounds.

    Args:
        value: what is placed.
        bounds: as `checked` returns them.
        order: places it: `number` or `version` of `ringcoll.strict`.
    """
    first, end = bounds
    return (first is None or order(first) <= order(value)) and (
        end is None or order(value) < order(end)
    )


def checked(name: str, bounds: Any, order: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Bounds as a tuple.

    Args:
        name: of the field, for errors.
        bounds: a pair; None in it is open.
        order: as for `within`.

    Raises:
        ValueError: they are no pair, of other values, or cover nothing.
    """
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError(f"{name}: {shown(bounds)} is not a pair; write [first, end], null if open")
    try:
        places = [order(bound) for bound in bounds if bound is not None]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    first, end = bounds
    if len(places) == 2 and places[0] >= places[1]:
        raise ValueError(
            f"{name}: {first!s:.60} to {end!s:.60} covers nothing; the end is not in it"
        )
    return first, end
