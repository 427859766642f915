"""The rows of a ragged array: which rows its slices have, and where they are written.

A rank has slices for each rank, or from each rank: `offsets` and `sizes` are `[n, slices]`. The
rows of all slices for one rank travel end to end in a block of `bound` rows. If there are fewer
rows, the last rows of the block are unused. If there are more, the rows that do not fit are *lost*.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.runtime.value_types import explicit_spec

_NONE = np.int32(np.iinfo(np.int32).min)


def _starts(sizes: Array) -> Array:
    """Where each slice starts in the block of its rank: `[n, slices]`."""
    return lax.cumsum(sizes, 1) - sizes


def numbers(offsets: Array, sizes: Array, bound: int) -> Array:
    """The numbers of the rows in each block: `[n, bound]`; unused rows have any number."""
    starts = _starts(sizes)
    places = jnp.arange(bound, dtype=jnp.int32)
    # The number of a row minus its place in the block changes by this at the start of each slice.
    steps = jnp.diff(offsets - starts, axis=1, prepend=0)  # [n, slices]
    begun = places[None, :, None] >= starts[:, None, :]  # [n, bound, slices]
    return places[None] + _total(jnp.where(begun, steps[:, None], 0), 2)


def take(x: Array, offsets: Array, sizes: Array, bound: int) -> Array:
    """The rows of the slices, in a block for each rank, end to end: `[n bound, ...]`."""
    rows = numbers(offsets, sizes, bound).reshape(-1)
    return x.at[rows].get(mode="clip", out_sharding=_sharding(x))


def blank(blocks: Array, sizes: Array, bound: int) -> Array:
    """The blocks with zeros in unused rows, which would otherwise affect the scales of a wire."""
    return select(_used(sizes, bound).reshape(-1), blocks, jnp.zeros_like(blocks))


def _used(sizes: Array, bound: int) -> Array:
    """Which rows of each block are used by a slice: `[n, bound]`."""
    return jnp.arange(bound, dtype=jnp.int32)[None] < _total(sizes, 1)[:, None]


def within(offsets: Array, sizes: Array, count: int) -> Array:
    """Which of `count` rows are in each slice: `[slices of all ranks, count]`."""
    row, at = jnp.arange(count, dtype=jnp.int32)[None], offsets.reshape(-1, 1)
    return (row >= at) & (row < at + sizes.reshape(-1, 1))


def select(mask: Array, x: Array, y: Array) -> Array:
    """The rows of x where the mask is true, and the rows of y elsewhere."""
    return jnp.where(lax.broadcast_in_dim(mask, x.shape, (0,), out_sharding=_sharding(x)), x, y)


def _sharding(x: Array) -> Any:
    """The sharding over explicit axes of an array with rows like those of x; None if none."""
    return jax.typeof(x).sharding if explicit_spec(x) else None


def _total(x: Array, axis: int) -> Array:
    return jnp.sum(x, axis, dtype=jnp.int32)


def put(blocks: Array, output: Array, offsets: Array, sizes: Array, bound: int) -> Array:
    """`output`, with rows replaced by the rows of the blocks.

    A lost row becomes NaN, or the largest or smallest integer.
    """
    rows, is_written = _sources(output, offsets, sizes, bound)
    arrived = blocks.at[rows].get(mode="fill", out_sharding=_sharding(blocks))
    return select(is_written, arrived, output)


def add(blocks: Array, output: Array, offsets: Array, sizes: Array, bound: int) -> Array:
    """`output`, with the rows of the blocks added to it; slices may overlap.

    A lost row becomes NaN if no slices overlap.
    """

    def once(blocks: Array, output: Array) -> Array:
        rows, is_written = _sources(output, offsets, sizes, bound)
        arrived = blocks.at[rows].get(mode="fill", out_sharding=_sharding(blocks))
        return select(is_written, output + arrived, output)

    def often(blocks: Array, output: Array) -> Array:
        rows = jnp.where(_used(sizes, bound), numbers(offsets, sizes, bound), len(output))
        return output.at[rows.reshape(-1)].add(blocks, mode="drop", out_sharding=_sharding(output))

    # A gather is faster than a scatter, and gives the same result if no row occurs twice.
    overlap = jnp.max(_total(within(offsets, sizes, len(output)), 0)) > 1
    return lax.cond(overlap, often, once, blocks, output)


def _sources(output: Array, offsets: Array, sizes: Array, bound: int) -> tuple[Array, Array]:
    """For every row of the output: the number of the block row to put there, and whether one is.

    A lost row has a number beyond those of all block rows.
    """
    n, starts = len(offsets), _starts(sizes)
    first = jnp.arange(n, dtype=jnp.int32)[:, None] * np.int32(bound) + starts - offsets
    held = jnp.clip(sizes, 0, jnp.maximum(bound - starts, 0))
    in_block, in_slice = within(offsets, held, len(output)), within(offsets, sizes, len(output))
    beyond = jnp.where(in_block, first.reshape(-1, 1), np.int32(n * bound))
    best = jnp.max(jnp.where(in_slice, beyond, _NONE), 0)
    is_written = best > _NONE
    return jnp.where(is_written, jnp.arange(len(output), dtype=jnp.int32) + best, 0), is_written
