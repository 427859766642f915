"""How ringcoll raises an error: with lax's exception type, the function called, and a cure."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

#: The exceptions that lax raises for a call. For a subclass, ringcoll raises one of these, because
#: a subclass may not take a text.
REFUSALS = (NameError, TypeError, IndexError, ValueError, NotImplementedError)

#: The cure for an error, by its words. {n} is the number of ranks, {bound} says which axes there
#: are.
_CURES = (
    (r"unbound axis name", "{bound}"),
    (r"repeated axis", "name each axis once"),
    (r"^unhashable type", "pass a name, or a tuple of names"),
    (r"must match shard|equal x.shape", "make that dimension {n}, or pass tiled=True"),
    (r"divisible", "pad that dimension to a multiple of {n}"),
    (r"out of bounds", "count dimensions from 0, or from the last with -1"),
    (r"axis_index_groups must cover", "name every rank of the axis in exactly one group"),
    (r"must be unique", "let every rank send once and receive once at most"),
    (r"must be a list or a tuple", "pass a list of pairs (source, target)"),
    (r"is not a rank", "there are {n} ranks: count from 0, or from the last with -1"),
    (r"not a list of lists of ranks", "pass one such as [[0, 1], [2, 3]]"),
    (r"does not represent a permutation", "name each of 0..n-1 exactly once"),
    (r"unexpected `to`", "pass to='varying' unless out_specs need another"),
    (r"device-varying", "make the operand vary first: jax.lax.pcast(x, axis, to='varying')"),
    (r"not supported in vmap", "use a mesh axis"),
    (r"not a valid JAX type", "pass an array"),
)


def kind_of(error: Exception) -> type[Exception]:
    """The exception type with which to raise an error of lax again."""
    return next(kind for kind in REFUSALS if isinstance(error, kind))


def cure_of(words: str) -> str:
    """The cure for an error with these words; "" if none is known."""
    cure = next((cure for pattern, cure in _CURES if re.search(pattern, words)), "")
    bound = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes))
    cure = cure.replace(
        "{bound}", f"the axes here are {bound}" if bound else "call it inside jax.shard_map"
    )
    return "" if words.endswith(cure) else cure  # an error of ours, in an algorithm of the user's


def refused(kind: type[Exception], call: str, words: str, cure: str = "") -> Exception:
    """The exception to raise: its message has the call, what is wrong with it, and the cure."""
    error = kind(f"ringcoll.{call}: {words}" + (f"; {cure}" if cure else ""))
    vars(error)["refused"] = words, cure
    return error


@contextmanager
def renamed(refusal: Callable[[type[Exception], str, str], Exception]) -> Iterator[None]:
    """Errors of our functions that are called inside become those of the function called first.

    `refusal` makes them from their type, words and cure.
    """
    try:
        yield
    except REFUSALS as error:
        if "refused" not in vars(error):
            raise
        raise refusal(kind_of(error), *vars(error)["refused"]) from error.__cause__
