"""The shards and partial results that a rank holds while a schedule runs, and the messages."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ringcoll.schedules.schedule import Round, Schedule


class Key(NamedTuple):
    """The key under which a rank keeps a shard, or the partial result for one."""

    lane: int
    offset: int


class Slot(NamedTuple):
    """A shard that the engine asks for: its owner, and the lane whose share it is."""

    origin: Array
    lane: int


class Shard(NamedTuple):
    """A shard that has arrived: its owner, the lane whose share it is, and its possible offsets.

    In a loop the offset differs from turn to turn; otherwise there is one. If it is a part of a
    share, `first` is the row of the share at which the part starts.
    """

    value: Any
    origin: Array
    lane: int
    offsets: tuple[int, ...]
    first: int = 0


class PlannedRound(NamedTuple):
    """A round as the engine runs it: its moves, and for each move the keys of its shards.

    Attributes:
        moves: the moves of the round.
        sent: the keys under which the sender has the shards (or sums) of each move.
        arrived: the keys under which the receiver keeps them.
    """

    moves: Round
    sent: tuple[tuple[Key, ...], ...]
    arrived: tuple[tuple[Key, ...], ...]


@lru_cache(maxsize=512)
def planned(schedule: Schedule, *, back: bool = False) -> tuple[PlannedRound, ...]:
    """The rounds of a schedule as the engine runs them; with `back`, from the last to the first.

    Backward, what arrived is sent, in the other direction.
    """
    rounds = []
    for moves in schedule.rounds:
        sent = tuple(tuple(Key(m.lane, offset) for offset in m.offsets) for m in moves)
        arrived = tuple(tuple(Key(m.lane, o) for o in schedule.arrivals(m)) for m in moves)
        if back:
            moves = tuple(replace(move, shift=-move.shift) for move in moves)
            sent, arrived = arrived, sent
        rounds.append(PlannedRound(moves, sent, arrived))
    return tuple(rounds[::-1] if back else rounds)


def message(held: Mapping[Key, Any], keys: Sequence[Key]) -> Any:
    """The shards under these keys, stacked: arrays, or pytrees whose arrays are stacked.

    The result has the widest of their dtypes: a partial sum may be wider than a raw contribution.
    """
    shards, stacked = [held[key] for key in keys], []
    for xs in zip(*map(jax.tree.leaves, shards), strict=True):
        widest = max((x.dtype for x in xs), key=attrgetter("itemsize"))
        stacked.append(jnp.stack([x.astype(widest) for x in xs]))
    return jax.tree.unflatten(jax.tree.structure(shards[0]), stacked)


def unstacked(messages: Iterable[Any]) -> Iterator[Any]:
    """The shards of messages, one after the other."""
    for each in messages:
        leaves, structure = jax.tree.flatten(each)
        yield from (jax.tree.unflatten(structure, shard) for shard in zip(*leaves, strict=True))
