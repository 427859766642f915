"""The shards and partial results that a rank holds while a schedule runs, and its messages."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ringcoll.schedules.schedule import Round, Schedule


class Key(NamedTuple):
    """The key under which a rank keeps a shard, or the partial result for one."""

    lane: int
    offset: int


class Slot(NamedTuple):
    """A shard that the engine asks for: whose it is, and which lane's share."""

    origin: Array
    lane: int


class Shard(NamedTuple):
    """A shard that has arrived: whose it is, which lane's share, and its possible offsets.

    In a loop the offset differs from turn to turn; written out, there is one. `first` is the row of
    the share at which a part of it starts.
    """

    value: Array
    origin: Array
    lane: int
    offsets: tuple[int, ...]
    first: int = 0


class Contributions(NamedTuple):
    """Contributions, and the arrays that they were computed from, if work hides the wire."""

    values: Sequence[Array]
    of: Sequence[Array] = ()


class PlannedRound(NamedTuple):
    """A round as the engine runs it: its moves, and for each the keys of the shards that it moves.

    Attributes:
        moves: the round.
        sent: the keys under which the sender has them.
        arrived: the keys under which the receiver keeps them.
    """

    moves: Round
    sent: tuple[tuple[Key, ...], ...]
    arrived: tuple[tuple[Key, ...], ...]


@lru_cache(maxsize=512)
def planned(schedule: Schedule) -> tuple[PlannedRound, ...]:
    """The rounds of a schedule as the engine runs them."""
    return tuple(
        PlannedRound(
            moves,
            tuple(tuple(Key(m.lane, offset) for offset in m.offsets) for m in moves),
            tuple(tuple(Key(m.lane, offset) for offset in schedule.arrivals(m)) for m in moves),
        )
        for moves in schedule.rounds
    )


def message(held: Mapping[Key, Array], keys: Sequence[Any]) -> Array:
    """The shards under these keys, stacked; under the keys of several messages, a stack of these.

    In the widest of their dtypes: a partial sum may be wider than a raw contribution.
    """
    shards = [held[key] if isinstance(key, Key) else message(held, key) for key in keys]
    widest = max((x.dtype for x in shards), key=lambda dtype: dtype.itemsize)
    return jnp.stack([x.astype(widest) for x in shards])
