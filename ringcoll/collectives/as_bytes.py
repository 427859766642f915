"""Collectives with a wire by the built-ins of `jax.lax`, which then send bytes."""

from collections.abc import Callable
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringcoll.runtime import built_in
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.run import UNROLL_UP_TO
from ringcoll.runtime.wire import Wire, decode, encode

#: A function from one message to floats.
Decode = Callable[[Array], Array]


def all_gather(x: Array, dim: int, ranks: Ranks, wire: Wire) -> Array:
    """All-gather: the shards of all ranks along `dim`, encoded once by their owners."""
    message = encode(wire, x)
    messages = built_in.all_gather(message, ranks.axes, axis_index_groups=ranks.groups)
    shards = jax.vmap(lambda each: decode(wire, each, x.shape, x.dtype))(messages)
    return _join(shards, dim)


def _exchange(x: Array, split: int, ranks: Ranks, wire: Wire) -> tuple[Array, Decode]:
    """All-to-all: the messages for this rank, `[n, bytes]`, and a function that decodes one.

    It decodes to float32 or wider.
    """
    blocks = jnp.split(x, ranks.size, split)
    if ranks.size > UNROLL_UP_TO:
        messages = jax.vmap(partial(encode, wire))(jnp.stack(blocks))
    else:  # TPUs would copy stacked blocks, and also their float32 values
        messages = jnp.stack([encode(wire, block) for block in blocks])
    arrived = built_in.all_to_all(
        messages, ranks.axes, 0, 0, axis_index_groups=ranks.groups, tiled=True
    )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return arrived, partial(decode, wire, shape=blocks[0].shape, dtype=wide)


def all_to_all(x: Array, split: int, concat: int, ranks: Ranks, wire: Wire) -> Array:
    """All-to-all: the blocks for this rank, end to end along `concat`."""
    arrived, decoded = _exchange(x, split, ranks, wire)
    return _join(jax.vmap(decoded)(arrived), concat).astype(x.dtype)


def reduce_scatter(
    x: Array, dim: int, ranks: Ranks, wire: Wire, widen: Callable[[Array], Array]
) -> Array:
    """Reduce-scatter: all ranks' blocks for this rank, widened and added."""
    arrived, decoded = _exchange(x, dim, ranks, wire)
    if ranks.size > UNROLL_UP_TO:
        return jnp.sum(widen(jax.vmap(decoded)(arrived)), 0)
    # With these additions, XLA:CPU decodes while it adds. A `sum` would read decoded values from
    # memory.
    return reduce(lax.add, (widen(decoded(each)) for each in arrived))


def _join(blocks: Array, dim: int) -> Array:
    """Blocks `[n, *block]`, end to end along `dim`."""
    shape = list(blocks.shape[1:])
    shape[dim] *= len(blocks)
    return jnp.moveaxis(blocks, 0, dim).reshape(shape)
