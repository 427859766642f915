"""What a rank holds while a schedule runs, and the messages that are made of it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ringcoll.schedule import Move, Schedule


class Key(NamedTuple):
    """Under what a rank keeps a shard, or the partial result of one."""

    lane: int
    offset: int


def keys_sent(move: Move) -> list[Key]:
    """What a move sends."""
    return [Key(move.lane, offset) for offset in move.offsets]


def keys_arrived(schedule: Schedule, move: Move) -> list[Key]:
    """The keys under which the receiver keeps what a move brings."""
    return [Key(move.lane, offset) for offset in schedule.arrivals(move)]


def message(held: Mapping[Key, Array], keys: Sequence[Key]) -> Array:
    """One message of several shards."""
    return stacked([held[key] for key in keys])


def stacked(arrays: Sequence[Array]) -> Array:
    """Stacked, in the widest of their dtypes: some may be partial results."""
    widest = max((x.dtype for x in arrays), key=lambda dtype: dtype.itemsize)
    return jnp.stack([x.astype(widest) for x in arrays])
