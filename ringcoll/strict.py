"""Files of JSON, read strictly: what is wrong with a value is said in a line that can be read."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

#: JAX's, of which a row names beginnings. A test holds them against JAX, which is not asked here.
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

#: More bytes, and ranks, than there can be.
_MOST = 2**63
#: Numbers, and what may follow; possessive (++), so that a long text takes no time.
_VERSION = re.compile(r"([0-9]{1,9}+(?:\.[0-9]{1,9}+)*+)(?:(?:a|b|rc|\.dev|\.post|\+).*)?")
#: Lists and objects within each other; a table has three.
_DEEPEST = 16
#: Characters of a value that are shown.
_LONGEST = 120


def parsed(text: str) -> Any:
    """What a JSON text holds.

    Raises:
        ValueError: it is no JSON, with the line; NaN or Infinity; a name is there twice; lists or
            objects are nested deeper than any of ours.
    """
    too_deep = ValueError(f"lists and objects are nested more than {_DEEPEST} deep")
    try:
        made = json.loads(text, object_pairs_hook=_named_once, parse_constant=_no_number)
    except RecursionError:
        raise too_deep from None
    level = [made]  # and not by recursion, which has an end too
    for _ in range(_DEEPEST):
        level = [inner for one in level for inner in _within(one)]
    if level:
        raise too_deep
    return made


def _within(value: Any) -> Iterable[Any]:
    """What a list or an object holds."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def shown(value: Any) -> str:
    """It as Python writes it, cut to what a line can hold."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which the second of a name would be taken in silence."""
    made = dict(pairs)
    if len(made) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"field: {shown(twice)} is there twice")
    return made


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def number(value: Any) -> int:
    """It, a whole number from 0."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{shown(value)} is neither null nor a whole number from 0")
    if value > _MOST:
        raise ValueError(f"{shown(value)} is more than there can be; null is open")
    return value


def version(value: Any) -> tuple[int, ...]:
    """Its numbers: 0.12 and 0.12.0 are the same, and 0.12.1rc1 is 0.12.1."""
    found = _VERSION.fullmatch(value) if isinstance(value, str) else None
    if not found:
        raise ValueError(f"{shown(value)} is neither null nor a version such as '0.12'")
    numbers = [int(number) for number in found[1].split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def check_string(name: str, value: Any) -> None:
    """Refuse what is no string."""
    if not isinstance(value, str):
        raise ValueError(f"{name}: {shown(value)} is not a string")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse what is not among the choices."""
    if value not in choices:
        raise ValueError(f"{name}: there is no {shown(value)}; choose from {', '.join(choices)}")


def check_dtype(name: str, value: Any) -> None:
    """Refuse what is no beginning of the name of a dtype: it would match none, in silence."""
    check_string(name, value)
    if not any(known.startswith(value) for known in DTYPES):
        raise ValueError(
            f"{name}: {shown(value)} begins no dtype of JAX; there are {', '.join(DTYPES)}"
        )


def check_fields(given: Any, kind: type, what: str) -> None:
    """Refuse what has not the fields of a dataclass."""
    if not isinstance(given, dict):
        raise ValueError(f"{what} is {shown(given)}, not an object of fields")
    known = {field.name: field for field in fields(kind)}
    for name in given:
        check_choice("field", name, tuple(known))
    for name, field in known.items():
        if name not in given and field.default is MISSING:
            raise ValueError(f"{name}: is missing")
