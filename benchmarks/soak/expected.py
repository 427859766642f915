"""The operands of a random call on all ranks, and its exact results by NumPy."""

from collections.abc import Mapping
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.collectives.references import REFERENCES, TRANSPOSES, Reference
from benchmarks.measuring.data import exact, largest
from benchmarks.soak.random_calls import RandomCall

#: The size of the dimension that a `vmap` maps over.
BATCH = 2

#: Seeds of operands and of cotangents.
_FORWARD, _BACKWARD = 3, 4

Arrays = list[np.ndarray]
References = Mapping[str, Reference]


def operands(call: RandomCall) -> Arrays:
    """The leaves of all ranks, with the call's batch dimension, if it has one."""
    at = call.batch
    shapes = [s if at is None else (*s[:at], BATCH, *s[at:]) for s in call.shapes]
    return [_values(call, shape, call.dtype, (_FORWARD, i)) for i, shape in enumerate(shapes)]


def results(call: RandomCall, xs: Arrays, references: References = REFERENCES) -> Arrays:
    """The results of all ranks; a batch dimension comes first."""
    return [_map_batch(call, references[call.name], x, call.batch, 0) for x in xs]


def cotangents(call: RandomCall, ys: Arrays) -> Arrays:
    """The cotangents of the results; an empty list if the call has no gradient."""
    if not call.pulls_back:
        return []
    return [_values(call, y.shape[1:], y.dtype, (_BACKWARD, i)) for i, y in enumerate(ys)]


def gradients(call: RandomCall, cts: Arrays, transposes: References = TRANSPOSES) -> Arrays:
    """The gradients of all ranks, with the shapes of the operands."""
    return [_map_batch(call, transposes[call.name], ct, 0, call.batch) for ct in cts]


def _values(
    call: RandomCall, shape: tuple[int, ...], dtype: Any, what: tuple[int, int]
) -> np.ndarray:
    """Integers of both signs, as large as an exact sum (or mean) allows."""
    kind = np.dtype(dtype)
    if jnp.issubdtype(kind, jnp.complexfloating):  # twice an exact number is exact
        return _values(call, shape, np.float32, what).astype(kind) * kind.type(1 + 2j)
    ranks, n = prod(call.setting.shape), call.teams().shape[1]
    most = 1 if kind.kind == "b" else min(n, largest(kind))
    if _is_wide(call, kind, what[0]):  # exact in the wide dtype; no overflow in the narrow one
        most = -(-largest(kind) * n // int(float(jnp.finfo(kind).max)))
    if call.name == "pmean":  # multiples of n that float32 can hold
        most = max(n * n, largest(kind) >> 16)
        if what[0] == _BACKWARD:  # JAX divides first, perhaps times 1/n, so take only n itself
            most = largest(kind)
    seed = [call.seed, *what, call.number]
    values = exact((ranks, *shape), kind, most, seed)
    if call.name == "pmean":
        values = values * kind.type(n)
    if kind.kind == "b" or jnp.issubdtype(kind, jnp.unsignedinteger):
        return values
    turned = np.random.default_rng([*seed, 1]).integers(2, size=values.shape, dtype=bool)
    # Without -0.0: the signs of its sums differ.
    return np.where(turned & (values != 0), -values, values)


def _is_wide(call: RandomCall, kind: np.dtype, what: int) -> bool:
    """Whether a call sums in a wider dtype than its own, so that sums may need more digits.

    (A mean also divides, so it does not count. Of all gradients, only that of an all_gather with
    `to="varying"` is a sum by ringcoll.)
    """
    wide = call.options.get("accumulate_dtype")
    forth = what == _FORWARD and call.name in ("psum", "psum_scatter")
    back = what == _BACKWARD and call.name == "all_gather" and call.what.get("to") != "invarying"
    return bool(wide and np.dtype(wide).itemsize > kind.itemsize and (forth or back))


def _map_batch(
    call: RandomCall, reference: Reference, x: np.ndarray, at: int | None, to: int | None
) -> np.ndarray:
    """The reference for each element of a batch, which moves from dimension `at` to `to`."""
    if call.batch is None or at is None or to is None:
        return _by_teams(call, reference, x)
    each = (_by_teams(call, reference, np.take(x, i, 1 + at)) for i in range(BATCH))
    return np.stack(list(each), 1 + to)


def _by_teams(call: RandomCall, reference: Reference, x: np.ndarray) -> np.ndarray:
    """The reference for each team of ranks, with results in the order of all ranks."""
    teams = call.teams()
    of_each = [reference(x[team], **call.what) for team in teams]
    out = np.empty((len(x), *of_each[0].shape[1:]), of_each[0].dtype)
    for team, result in zip(teams, of_each, strict=True):
        out[team] = result
    return out
