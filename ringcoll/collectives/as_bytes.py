"""Collectives with a wire by the built-ins of `jax.lax`: what they send is bytes."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from ringcoll.runtime import built_in
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.wire import Wire, decode, encode


def gathered(x: Array, dim: int, ranks: Ranks, wire: Wire) -> Array:
    """All-gather: the shards of all ranks along `dim`, encoded once by their owners."""
    message = encode(wire, x)
    messages = built_in.all_gather(message, ranks.axes, axis_index_groups=ranks.groups)
    shards = jax.vmap(lambda each: decode(wire, each, x.shape, x.dtype))(messages)
    return _joined(shards, dim)


def exchanged(x: Array, split: int, ranks: Ranks, wire: Wire) -> Array:
    """All-to-all: the blocks for this rank, `[n, *block]`, in float32 at least."""
    blocks = jnp.stack(jnp.split(x, ranks.size, split))
    messages = jax.vmap(partial(encode, wire))(blocks)
    arrived = built_in.all_to_all(
        messages, ranks.axes, 0, 0, axis_index_groups=ranks.groups, tiled=True
    )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jax.vmap(lambda each: decode(wire, each, blocks.shape[1:], wide))(arrived)


def swapped(x: Array, split: int, concat: int, ranks: Ranks, wire: Wire) -> Array:
    """All-to-all: the blocks for this rank, end to end along `concat`."""
    return _joined(exchanged(x, split, ranks, wire), concat).astype(x.dtype)


def scattered(
    x: Array, dim: int, ranks: Ranks, wire: Wire, widen: Callable[[Array], Array]
) -> Array:
    """Reduce-scatter: all ranks' blocks for this rank, widened and added."""
    return jnp.sum(widen(exchanged(x, dim, ranks, wire)), 0)


def _joined(blocks: Array, dim: int) -> Array:
    """Blocks `[n, *block]`, end to end along `dim`."""
    shape = list(blocks.shape[1:])
    shape[dim] *= len(blocks)
    return jnp.moveaxis(blocks, 0, dim).reshape(shape)
