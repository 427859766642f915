"""The shards and partial results that a rank holds while a schedule runs, and its messages."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ringcoll.schedules.schedule import Move, Schedule


class Key(NamedTuple):
    """The key under which a rank keeps a shard, or the partial result for one."""

    lane: int
    offset: int


class Slot(NamedTuple):
    """A shard that the engine asks for: whose it is, and which lane's share."""

    origin: Array
    lane: int


class Shard(NamedTuple):
    """A shard that has arrived: whose it is, and which lane's share."""

    value: Array
    origin: Array
    lane: int


class Contributions(NamedTuple):
    """Contributions, and the arrays that they were computed from, if work hides the wire."""

    values: Sequence[Array]
    of: Sequence[Array] = ()


def keys_sent(move: Move) -> list[Key]:
    """The keys of the shards that a move sends."""
    return [Key(move.lane, offset) for offset in move.offsets]


def keys_arrived(schedule: Schedule, move: Move) -> list[Key]:
    """The keys under which the receiver keeps what a move brings."""
    return [Key(move.lane, offset) for offset in schedule.arrivals(move)]


def message(held: Mapping[Key, Array], keys: Sequence[Key]) -> Array:
    """One message of several shards."""
    return stacked([held[key] for key in keys])


def stacked(arrays: Sequence[Array]) -> Array:
    """The arrays stacked, in the widest of their dtypes: partial results may be wider."""
    widest = max((x.dtype for x in arrays), key=lambda dtype: dtype.itemsize)
    return jnp.stack([x.astype(widest) for x in arrays])
