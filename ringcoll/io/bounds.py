"""Half-open bounds, of numbers and of versions: the first value is included, the end is not."""

from collections.abc import Callable
from typing import Any

from ringcoll.io.strict_json import shown

#: Bounds of numbers; None is no bound.
Bounds = tuple[int | None, int | None]


def within(value: Any, bounds: tuple[Any, Any], order: Callable[[Any], Any]) -> bool:
    """Whether a value lies within bounds.

    Args:
        value: the value.
        bounds: as `checked` returns them.
        order: makes a value comparable: `number` or `version` of `ringcoll.io.strict_json`.
    """
    first, end = bounds
    return (first is None or order(first) <= order(value)) and (
        end is None or order(value) < order(end)
    )


def checked(name: str, bounds: Any, order: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Check bounds, and return them as a tuple.

    Args:
        name: the name of the field, for errors.
        bounds: a pair; None in it is no bound.
        order: as for `within`.

    Raises:
        ValueError: they are not a pair, `order` refuses a value, or no value lies within them.
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
            f"{name}: {first!s:.60} to {end!s:.60} is an empty range; the end is not included"
        )
    return first, end
