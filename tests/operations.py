"""The operations of a traced program, counted."""

from collections.abc import Iterator
from typing import Any


def parts_of(equation: Any) -> Iterator[Any]:
    """The programs inside an operation."""
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else [value]:
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield inner


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """All operations of a program and of the programs inside it, and how often each runs."""
    for equation in jaxpr.eqns:
        yield equation, times
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for part in parts_of(equation):
            yield from equations(part, times * turns)


def count(jaxpr: Any, name: str) -> int:
    """How many operations of this name a program has; in a loop, once."""
    return sum(equation.primitive.name == name for equation, _ in equations(jaxpr))


def hops(jaxpr: Any) -> int:
    """How often a program sends; each turn of a loop counts."""
    return sum(n for e, n in equations(jaxpr) if e.primitive.name == "ringcoll_ppermute")
