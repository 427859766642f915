"""Half-open bounds, of numbers and of versions: the first value is in, the last is not."""

import re
from collections.abc import Callable
from typing import Any

#: Of numbers; None is open.
Bounds = tuple[int | None, int | None]


def within(value: Any, bounds: tuple[Any, Any], order: Callable[[Any], Any]) -> bool:
    """Whether a value lies within bounds.

    Args:
        value: what is placed.
        bounds: as `checked` returns them.
        order: places it: `number` or `version`.
    """
    first, end = bounds
    return (first is None or order(first) <= order(value)) and (
        end is None or order(value) < order(end)
    )


def number(value: Any) -> int:
    """The number itself.

    Raises:
        ValueError: it is no whole number from 0.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is neither null nor a whole number from 0")
    return value


def version(value: Any) -> tuple[int, ...]:
    """Its numbers: 0.12 and 0.12.0 are the same, and 0.12.1rc1 is 0.12.1.

    Raises:
        ValueError: it is no version.
    """
    numbers = r"(\d+(?:\.\d+)*?)(?:\.0)*"
    found = re.fullmatch(numbers + r"(?:(?:a|b|rc|\.dev|\.post|\+).*)?", str(value))
    if not found or not isinstance(value, str):
        raise ValueError(f"{value!r} is neither null nor a version such as '0.12'")
    return tuple(map(int, found[1].split(".")))


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
        raise ValueError(f"{name}: {bounds!r} is not a pair; write [first, end], null if open")
    try:
        places = [order(bound) for bound in bounds if bound is not None]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    first, end = bounds
    if len(places) == 2 and places[0] >= places[1]:
        raise ValueError(f"{name}: {first} to {end} covers nothing; the end is not in it")
    return first, end
