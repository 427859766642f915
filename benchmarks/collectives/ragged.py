"""A ragged all-to-all of one operand: slices are end to end in the operand and in the result.

Its one argument is `sizes`: `[n, k n]` numbers of rows. Each rank has k slices for each rank.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax as jax_lax

Sizes = Sequence[Sequence[int]]


def numbers(sizes: Sizes) -> tuple[np.ndarray, ...]:
    """The offsets and sizes of all ranks: `[n, k n]` each, in the order of the arguments."""
    sends = np.array(sizes, np.int32)
    gets = _turned(sends)
    at, to = (np.cumsum(x, 1, dtype=np.int32) - x for x in (sends, gets))
    return at, sends, _turned(to), gets


def _turned(of_senders: np.ndarray) -> np.ndarray:
    """Numbers of slices by sender, reordered so that each row has the slices for one receiver."""
    n = len(of_senders)
    return of_senders.reshape(n, n, -1).swapaxes(0, 1).reshape(n, -1)


def rows(sizes: Sizes) -> tuple[int, int, int]:
    """The most rows that a rank sends, that a rank gets, and that a rank has for one other rank."""
    _, sends, _, gets = numbers(sizes)
    for_one = sends.reshape(len(sends), len(sends), -1).sum(2)
    return int(sends.sum(1).max()), int(gets.sum(1).max()), int(for_one.max())


def call(
    library: Any,
    x: Array,
    axis_name: Any,
    sizes: Sizes,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> Array:
    """The rows of x, sent by `library`; rows of the result that no rank writes are zeros."""
    place = jax_lax.axis_index(axis_name)
    if axis_index_groups is not None:
        flat = [(rank, i) for group in axis_index_groups for i, rank in enumerate(group)]
        place = jnp.array([i for _, i in sorted(flat)])[place]
        options["axis_index_groups"] = axis_index_groups
    mine = (jnp.asarray(table)[place] for table in numbers(sizes))
    output = jnp.zeros((rows(sizes)[1], *x.shape[1:]), x.dtype)
    return library.ragged_all_to_all(x, output, *mine, axis_name=axis_name, **options)


def reference(x: np.ndarray, sizes: Sizes) -> np.ndarray:
    """The results of all ranks: `[n, ...]`."""
    out = np.zeros((len(x), rows(sizes)[1], *x.shape[2:]), x.dtype)
    return moved(x, out, *numbers(sizes))


def transpose(ct: np.ndarray, sizes: Sizes) -> np.ndarray:
    """The gradients of the operands of all ranks: the cotangents' rows, sent back."""
    at, sends, to, gets = numbers(sizes)
    back = np.zeros((len(ct), rows(sizes)[0], *ct.shape[2:]), ct.dtype)
    return moved(ct, back, _turned(to), gets, _turned(at), sends)


def moved(
    operand: np.ndarray,
    output: np.ndarray,
    input_offsets: np.ndarray,
    send_sizes: np.ndarray,
    output_offsets: np.ndarray,
    recv_sizes: np.ndarray,
) -> np.ndarray:
    """The output of every rank, with the slices for it from all operands written into it."""
    result, slices = output.copy(), send_sizes.shape[1] // len(operand)
    for source, number in np.ndindex(send_sizes.shape):
        target, size = number // slices, send_sizes[source, number]
        at, to = input_offsets[source, number], output_offsets[source, number]
        result[target, to : to + size] = operand[source, at : at + size]
    return result
