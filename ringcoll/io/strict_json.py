"""Read JSON strictly: an error names in one readable line the value that is wrong, and why."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

#: Bounds of numbers; None is no bound.
Bounds = tuple[int | None, int | None]
#: The names of JAX's dtypes. A row of a table has a prefix of such names. This module does not
#: import JAX, so a test compares the list with JAX.
DTYPES = (
    *("bool", "int1", "int2", "int4", "int8", "int16", "int32", "int64"),
    *("uint1", "uint2", "uint4", "uint8", "uint16", "uint32", "uint64"),
    *(
        "float4_e2m1fn",
        "float6_e2m3fn",
        "float6_e3m2fn",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
    ),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
)
#: Numbers, perhaps with a suffix.
_VERSION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})*)(?:(?:a|b|rc|\.dev|\.post|\+).*)?")
#: Characters of a value that are shown.
_LONGEST = 120


def parsed(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON (the error has the line), it has NaN or Infinity, an object has
            a name twice, or lists and objects are nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_named_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None


def shown(value: Any) -> str:
    """A value as Python writes it, cut to fit in a line."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number in JSON")


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. A name that is given twice is refused: `json` silently keeps the last one."""
    named = dict(pairs)
    if len(named) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"field: {shown(twice)} is given twice")
    return named


def number(value: Any) -> int:
    """The value, which must be a whole number from 0."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{shown(value)} is neither null nor a whole number from 0")
    return value


def version(value: Any) -> tuple[int, ...]:
    """The numbers of a version: 0.12 and 0.12.0 are the same, and 0.12.1rc1 is 0.12.1."""
    found = _VERSION.fullmatch(value) if isinstance(value, str) else None
    if not found:
        raise ValueError(f"{shown(value)} is neither null nor a version such as '0.12'")
    numbers = [int(number) for number in found[1].split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def within(value: Any, bounds: tuple[Any, Any], order: Callable[[Any], Any]) -> bool:
    """Whether a value lies within half-open bounds: the first is included, the last is not.

    Args:
        value: the value.
        bounds: as `checked` returns them.
        order: makes a value comparable: `number` or `version`.
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


def check_string(name: str, value: Any) -> None:
    """Refuse a value that is not a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name}: {shown(value)} is not a string")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}: there is no {shown(value)}; choose from {', '.join(choices)}")


def check_dtype(name: str, value: Any) -> None:
    """Refuse a prefix that no dtype's name begins with: it would silently match nothing."""
    check_string(name, value)
    if not any(known.startswith(value) for known in DTYPES):
        raise ValueError(
            f"{name}: {shown(value)} matches no dtype of JAX; choose from {', '.join(DTYPES)}"
        )


def check_fields(given: Any, kind: type, what: str) -> None:
    """Refuse an object whose fields are not those of a dataclass."""
    if not isinstance(given, dict):
        raise ValueError(f"{what} is {shown(given)}, not an object of fields")
    known = {field.name: field for field in fields(kind)}
    for name in given:
        check_choice("field", name, tuple(known))
    for name, field in known.items():
        if name not in given and field.default is MISSING:
            raise ValueError(f"{name}: is missing")
