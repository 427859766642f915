"""Slices of arrays: where a shard is, how to read its slice, and how to write it.

A slice starts at an int32. A dimension of 2**31 or more elements needs an int64, which JAX makes
only if it is told to. So slices of a dimension that may be so long are made by the functions of
this file.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from itertools import accumulate
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array, lax

from ringcoll.runtime.hop import multiply_add
from ringcoll.runtime.value_types import device_kind, empty, sharded_dims, varying_like

F = TypeVar("F", bound=Callable[..., Array])

#: A dimension of this length may need starts that an int32 cannot hold.
LONG = 2**31


def start_of(origin: Array, size: int, first: int, length: int) -> Array:
    """origin * size + first, the start of a slice in a dimension of this length."""
    if length < LONG:
        return multiply_add(origin, size, first)
    if "TPU" in (device_kind() or ""):
        raise NotImplementedError(
            f"a TPU cannot slice at an int64, as a dimension of {length} elements needs; "
            "pass algorithm='lax', or an array whose dimensions are shorter than 2**31"
        )
    with jax.enable_x64(True):
        return multiply_add(lax.convert_element_type(origin, np.int64), size, first)


def _with_long_starts(function: F) -> F:
    @wraps(function)
    def sliced(x: Array, *args: Any, **kwargs: Any) -> Array:
        is_long = any(isinstance(length, int) and length >= LONG for length in x.shape)
        with jax.enable_x64(True) if is_long else nullcontext():  # a length may be symbolic
            return function(x, *args, **kwargs)

    return sliced  # type: ignore[return-value]  # it has the same arguments


dynamic_slice = _with_long_starts(lax.dynamic_slice)
dynamic_slice_in_dim = _with_long_starts(lax.dynamic_slice_in_dim)
dynamic_update_slice = _with_long_starts(lax.dynamic_update_slice)
dynamic_update_slice_in_dim = _with_long_starts(lax.dynamic_update_slice_in_dim)


def concatenated(pieces: Sequence[Array], dim: int) -> Array:
    """The pieces end to end, as one operand: one large product is faster than two small ones."""
    return lax.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0]


def joined(
    trees: Sequence[Any], dim: int, join: Callable[[Sequence[Array], int], Array] = concatenated
) -> Any:
    """The arrays of pytrees, end to end."""
    return jax.tree.map(lambda *xs: join(xs, dim % xs[0].ndim), *trees)


def split(tree: Any, dim: int, lengths: Sequence[int]) -> list[Any]:
    """The arrays of a pytree, cut into parts of these lengths."""
    if len(lengths) == 1:
        return [tree]
    stops = list(accumulate(lengths))

    def cut(length: int, stop: int) -> Any:
        return jax.tree.map(lambda x: lax.slice_in_dim(x, stop - length, stop, axis=dim), tree)

    return list(map(cut, lengths, stops))


def end_to_end(pieces: Sequence[Array], dim: int) -> Array:
    """As `concatenated`, but each piece is written into one buffer when it is computed."""
    if len(pieces) == 1:
        return pieces[0]
    size, start = sum(piece.shape[dim] for piece in pieces), 0
    shape = (*pieces[0].shape[:dim], size, *pieces[0].shape[dim + 1 :])
    buffer = empty(shape, pieces[0], (), pieces[0])
    for piece in pieces:
        buffer = dynamic_update_slice_in_dim(
            buffer, piece, start, dim, allow_negative_indices=False
        )
        start += piece.shape[dim]
    return buffer


def placed(whole: Array, y: Array, dim: int, places: list[tuple[Any, int]]) -> Array:
    """`whole`, with consecutive parts of y along `dim` written into these places."""
    # No index here is negative. Negative ones are allowed because JAX then gives each place its own
    # index operations, and these decide when permutes start. XLA's scheduler works from the last
    # instruction to the first. If it has to choose between a matmul and the start of a permute, it
    # takes the one that makes more other operations ready (`kCreatesMoreReadyNodes` in its
    # latency_hiding_scheduler.cc). That is a matmul with its own index, so both permutes of a round
    # start before its two matmuls. If a later round uses the same index, there is a tie, and one
    # permute of each round starts between the matmuls, and is exposed. Along the last dimension,
    # these operations would hide from the compiler that an index is a multiple of a tile's width,
    # and matmuls would write more slowly.
    # On CPUs they gain nothing. With jax 0.10 they would round some sums differently in one process
    # than in several.
    may_be_negative = dim < whole.ndim - 1 and device_kind() != "cpu"
    start, whole = 0, whole if sharded_dims(whole) else varying_like(whole, y)
    for at, width in places:
        part = lax.slice_in_dim(y, start, start + width, axis=dim)
        whole = dynamic_update_slice_in_dim(
            whole, part, at, dim, allow_negative_indices=may_be_negative
        )
        start += width
    return whole
