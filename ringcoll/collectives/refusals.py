"""How ringcoll raises an error: with lax's exception type, the function called, and a cure."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

#: The exceptions that lax raises for a call. For a subclass, ringcoll raises one of these, because
#: a subclass may not take a text.
REFUSALS = (NameError, TypeError, IndexError, ValueError, NotImplementedError)


def kind_of(error: Exception) -> type[Exception]:
    """The exception type with which to raise an error of lax again."""
    return next(kind for kind in REFUSALS if isinstance(error, kind))


def bound_axes() -> str:
    """The cure for an axis that is not bound."""
    bound = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes))
    return f"the axes here are {bound}" if bound else "call it inside jax.shard_map"


def refused(kind: type[Exception], call: object, words: str, cure: str = "") -> Exception:
    """The exception to raise: its message has the call, what is wrong with it, and the cure.

    Args:
        kind: the type of the exception.
        call: a `Call`, or the text of one without "ringcoll.": a path that exists, and arguments.
        words: what is wrong.
        cure: what to write in its place.
    """
    words += f"; {cure}" if cure else ""
    error = kind(f"ringcoll.{call}: {words}")
    vars(error)["words"] = words
    return error


@contextmanager
def renamed(call: object) -> Iterator[None]:
    """Errors of our functions that are called inside become errors of this call."""
    try:
        yield
    except REFUSALS as error:
        if "words" not in vars(error):
            raise
        raise refused(kind_of(error), call, vars(error)["words"]) from error.__cause__
