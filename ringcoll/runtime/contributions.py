"""What a rank holds and is asked for while a schedule runs, and the messages made of it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ringcoll.schedules.schedule import Move, Schedule


class Key(NamedTuple):
    """Under what a rank keeps a shard, or the partial result of one."""

    lane: int
    offset: int


class Slot(NamedTuple):
    """A shard that is asked for: of which rank, and which lane's share of it."""

    origin: Array
    lane: int


class Shard(NamedTuple):
    """A shard that has come: of which rank, and which lane's share of it."""

    value: Array
    origin: Array
    lane: int


class Contributions(NamedTuple):
    """Contributions, and of which arrays they were made just before, if work hides the wire."""

    values: Sequence[Array]
    of: Sequence[Array] = ()


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
