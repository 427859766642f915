"""What goes into a drawn call on every rank, and what must come out: exact, from NumPy."""

from collections.abc import Mapping
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.collectives.references import REFERENCES, TRANSPOSES, Reference
from benchmarks.measuring.data import exact, largest
from benchmarks.soak.random_calls import RandomCall

#: How many a `vmap` maps over.
BATCH = 2

#: What data are for.
_FORTH, _BACK = 3, 4

Arrays = list[np.ndarray]
References = Mapping[str, Reference]


def operands(call: RandomCall) -> Arrays:
    """The leaves, of all ranks; their batch where the call has it."""
    at = call.batch
    shapes = [s if at is None else (*s[:at], BATCH, *s[at:]) for s in call.shapes]
    return [_values(call, shape, call.dtype, (_FORTH, i)) for i, shape in enumerate(shapes)]


def results(call: RandomCall, xs: Arrays, references: References = REFERENCES) -> Arrays:
    """What all ranks get of the leaves; a batch comes first."""
    return [_mapped(call, references[call.name], x, call.batch, 0) for x in xs]


def cotangents(call: RandomCall, ys: Arrays) -> Arrays:
    """Of the results, if they are pulled back."""
    if not call.pulls_back:
        return []
    return [_values(call, y.shape[1:], y.dtype, (_BACK, i)) for i, y in enumerate(ys)]


def pulled_back(call: RandomCall, cts: Arrays, transposes: References = TRANSPOSES) -> Arrays:
    """What all ranks get of the cotangents, of the shapes of the operands."""
    return [_mapped(call, transposes[call.name], ct, 0, call.batch) for ct in cts]


def _values(
    call: RandomCall, shape: tuple[int, ...], dtype: Any, what: tuple[int, int]
) -> np.ndarray:
    """Integers of either sign, as great as their sum (or mean) allows."""
    kind = np.dtype(dtype)
    if jnp.issubdtype(kind, jnp.complexfloating):  # twice what is exact is so too
        return _values(call, shape, np.float32, what).astype(kind) * kind.type(1 + 2j)
    ranks, n = prod(call.place.shape), call.teams().shape[1]
    most = 1 if kind.kind == "b" else min(n, largest(kind))
    if _is_wide(call, kind, what[0]):  # exact in that; in its own dtype no sum may overflow
        most = -(-largest(kind) * n // int(float(jnp.finfo(kind).max)))
    if call.name == "pmean":  # of multiples of n, and such as a float32 can hold
        most = max(n * n, largest(kind) >> 16)
        if what[0] == _BACK:  # each is divided first, perhaps by a product with 1/n: of n alone
            most = largest(kind)
    seed = [call.seed, *what, call.number]
    values = exact((ranks, *shape), kind, most, seed)
    if call.name == "pmean":
        values = values * kind.type(n)
    if kind.kind == "b" or jnp.issubdtype(kind, jnp.unsignedinteger):
        return values
    turned = np.random.default_rng([*seed, 1]).integers(2, size=values.shape, dtype=bool)
    return np.where(turned & (values != 0), -values, values)  # no -0.0, whose sum has either sign


def _is_wide(call: RandomCall, kind: np.dtype, what: int) -> bool:
    """Whether sums may need more digits than the dtype has: then all are made in a wider one.

    (A mean is divided, too. What becomes of a cotangent is summed by JAX itself in part, but for
    that of an all_gather to ranks that differ.)
    """
    wide = call.how.get("accumulate_dtype")
    forth = what == _FORTH and call.name in ("psum", "psum_scatter")
    back = what == _BACK and call.name == "all_gather" and call.what.get("to") != "invarying"
    return bool(wide and np.dtype(wide).itemsize > kind.itemsize and (forth or back))


def _mapped(
    call: RandomCall, reference: Reference, x: np.ndarray, at: int | None, to: int | None
) -> np.ndarray:
    """The reference of each of the batch, that is at one dimension and comes to another."""
    if call.batch is None or at is None or to is None:
        return _by_teams(call, reference, x)
    each = (_by_teams(call, reference, np.take(x, i, 1 + at)) for i in range(BATCH))
    return np.stack(list(each), 1 + to)


def _by_teams(call: RandomCall, reference: Reference, x: np.ndarray) -> np.ndarray:
    """The reference of each team's ranks, each back in its place."""
    teams = call.teams()
    of_each = [reference(x[team], **call.what) for team in teams]
    out = np.empty((len(x), *of_each[0].shape[1:]), of_each[0].dtype)
    for team, result in zip(teams, of_each, strict=True):
        out[team] = result
    return out
