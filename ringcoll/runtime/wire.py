"""What a hop carries in place of floats: codes of one byte, and a scale for each block of them.

`encode` makes one array of bytes from a message, and `decode` makes the message again. A sum is
encoded at every hop, a shard that is gathered once; `Wire` describes the codes. Codes and scales
are one array, because every message costs a start. This also keeps the decoding after the hop: a
compiler cannot move it before the hop, because the bytes of one array are both codes and scales.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.costs.wire import SCALE, Wire
from ringcoll.runtime.contributions import Shard
from ringcoll.runtime.value_types import device_kind

T = TypeVar("T")
ShardVisit = Callable[[Any, list[Shard]], Any]

_TINY = np.float32(np.finfo(np.float32).tiny)
#: A scale is multiplied by this, so that the largest code times the scale does not overflow.
_LESS = 1 - 2**-22
#: The lanes of a TPU's registers.
_LANES = 128


def _grid(shape: Sequence[int], wire: Wire) -> tuple[int, int, int]:
    """How a message is cut: the number of blocks in a column, the values of a block, the columns.

    A block down a column needs no move of data on a TPU: neither to find its largest value, nor
    to multiply all values by the scale, nor to write the codes in the layout of the message.
    """
    *rows, columns = shape or (1,)
    if not prod(shape) or columns % _LANES or prod(rows) % wire.block:
        rows, columns = [prod(shape)], 1
    return *wire.blocks(prod(rows)), columns


def encode(wire: Wire, x: Array) -> Array:
    """The bytes of a message of floats: `[blocks * (values + 4), columns]`, uint8."""
    blocks, size, columns = _grid(x.shape, wire)
    flat = _in_memory(x).reshape(-1, columns)  # [values, columns]
    if missing := blocks * size - len(flat):
        flat = jnp.pad(flat, ((0, missing), (0, 0)))
    values = flat.reshape(blocks, size, columns)
    # Take the maximum and the minimum, because XLA:CPU would write all magnitudes to memory before
    # it takes their maximum. With an unnecessary initial value, it would read bfloat16 wrongly (jax
    # 0.12.0.1).
    initial = None if size else 0
    most, least = (f(values, 1, keepdims=True, initial=initial) for f in (jnp.max, jnp.min))
    largest = jnp.maximum(most, -least).astype(jnp.float32)
    values = values.astype(jnp.float32)
    is_finite = largest <= jnp.finfo(jnp.float32).max  # false for NaN too
    # No scale is subnormal, because platforms flush those to zero.
    scale = jnp.maximum(largest * np.float32(_LESS / wire.codes.largest), _TINY)
    # Without a scale, 1 is inf, -1 is -inf, and 0 is NaN.
    signs = jnp.where(jnp.isinf(values), jnp.sign(values), 0)
    values = jnp.where(is_finite, values * (1 / scale), signs)
    scale = jnp.where(is_finite, scale, jnp.inf)
    codes = lax.bitcast_convert_type(_rounded(wire, values), jnp.uint8)
    bits = lax.bitcast_convert_type(scale[:, 0], jnp.uint32)  # [blocks, columns]
    # Byte by byte: with 4 as the last dimension, an array would use 4 of 128 lanes of a TPU.
    parts = [(bits >> np.uint32(8 * i)).astype(jnp.uint8) for i in range(SCALE)]
    parts = _in_memory([codes.reshape(-1, columns), *parts])
    return _in_memory(lax.concatenate(parts, 0))


def decode(wire: Wire, message: Array, shape: Sequence[int], dtype: Any) -> Array:
    """The floats of a message of this shape, in this dtype."""
    blocks, size, columns = _grid(shape, wire)
    codes, rest = message[: blocks * size], message[blocks * size :]
    parts = rest.reshape(SCALE, blocks, columns).astype(jnp.uint32)
    bits = sum((part << np.uint32(8 * i) for i, part in enumerate(parts[1:], 1)), parts[0])
    scale = lax.bitcast_convert_type(bits, jnp.float32)[:, None]
    values = lax.bitcast_convert_type(codes.reshape(blocks, size, columns), wire.dtype)
    flat = (values.astype(jnp.float32) * scale).astype(dtype).reshape(-1, columns)
    return _in_memory(flat[: prod(shape) // columns].reshape(shape))


def encoded_once(
    wire: Wire, own: Sequence[Array], visit: ShardVisit
) -> tuple[list[Array], ShardVisit]:
    """This rank's shards (or blocks) and a visit, for messages that are encoded by their owner.

    The visit gets decoded shards, also for the rank's own shard, so that all ranks use the same
    values. The shards of a lane have one shape on all ranks.
    """
    # Without a barrier, XLA:CPU computes x again to decode it here, and may round differently.
    # Codes may be computed again: the same x gives the same codes.
    codes = [encode(wire, lax.optimization_barrier(x)) for x in own]

    def decoded(shard: Shard) -> Shard:
        like = own[shard.lane]
        return shard._replace(value=decode(wire, shard.value, like.shape, like.dtype))

    return codes, lambda carry, shards: visit(carry, [decoded(shard) for shard in shards])


def _in_memory(x: T) -> T:
    """Arrays; on a CPU written to memory before they are used.

    XLA:CPU would fuse codes with their concatenation, and compute for each value in which of its
    parts it is. It would fuse the decoding with each use of what was decoded, and put the scale
    together from its bytes for each value. Either takes about nine times as long.
    """
    return lax.optimization_barrier(x) if device_kind() == "cpu" else x


def _rounded(wire: Wire, values: Array) -> Array:
    """The codes nearest to the values."""
    largest = np.float32(wire.codes.largest)
    values = jnp.clip(values, -largest, largest)
    dtype = jnp.dtype(wire.dtype)
    if dtype == jnp.int8:
        values = jnp.round(values)
    return values.astype(dtype)
