"""What travels: a rank's shard in parts, one for each lane of a schedule, and their messages.

While a schedule runs, a rank holds parts, or partial sums for them, under keys `(lane, offset)`:
the share of a lane of the shard of the rank that is `offset` behind.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ringcoll.runtime.slicing import start_of
from ringcoll.schedules.schedule import Round, Schedule
from ringcoll.schedules.tour import Tour

#: Under which a rank holds a part: its lane, and the offset of its shard.
Key = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """The rows of a shard that one lane carries, or some of them; they have arrived or are wanted.

    Attributes:
        origin: the rank whose shard it is.
        lane: the lane.
        rows: the first of the rows in the shard, and their number. They are along `Layout.cut`.
        offsets: the offsets that the shard may have. In a loop it differs from turn to turn.
        value: the rows: an array, or a pytree of arrays. None if they are wanted.
    """

    origin: Array
    lane: int = field(metadata={"static": True})
    rows: tuple[int, int] = field(metadata={"static": True})
    offsets: tuple[int, ...] = field(default=(), metadata={"static": True})
    value: Any = None


jax.tree_util.register_dataclass(Part)


@lru_cache(maxsize=1024)
def shares(length: int, lanes: int) -> tuple[tuple[int, int], ...]:
    """The rows of each lane, the first and the number: lanes divide a length evenly."""
    stops = [lane * length // lanes for lane in range(lanes + 1)]
    return tuple((start, stop - start) for start, stop in pairwise(stops))


@dataclass(frozen=True)
class Layout:
    """Where the parts of all shards are in one array.

    Attributes:
        dim: the dimension along which shards are end to end.
        size: the length of a shard along that dimension.
        cut: the dimension along which lanes divide a shard.
        rows: the rows of each lane along that: see `shares`.
    """

    dim: int
    size: int
    cut: int
    rows: tuple[tuple[int, int], ...]

    def start(self, part: Part, whole: Array) -> list[Any]:
        """Where a part starts in an array of all shards, for each dimension."""
        first, _ = part.rows
        # All starts are of one dtype, so it depends on both.
        longest, ahead = max(whole.shape[self.dim], first), first if self.cut == self.dim else 0
        at = start_of(part.origin, self.size, ahead, longest)
        start: list[Any] = [at.dtype.type(0)] * whole.ndim
        start[self.cut] = at.dtype.type(first)
        start[self.dim] = at  # last: if both are one dimension, it has `first` too
        return start


class PlannedRound(NamedTuple):
    """A round as it runs: its moves, and for each move the keys of its parts.

    Attributes:
        moves: the moves of the round.
        sent: the keys under which the sender has the parts (or sums) of each move.
        arrived: the keys under which the receiver keeps them.
    """

    moves: Round = ()
    sent: tuple[tuple[Key, ...], ...] = ()
    arrived: tuple[tuple[Key, ...], ...] = ()


@lru_cache(maxsize=512)
def planned(schedule: Schedule, *, back: bool = False) -> tuple[PlannedRound, ...]:
    """The rounds of a schedule as they run; with `back`, from the last to the first.

    Backward, what arrived is sent, in the other direction.
    """
    rounds = []
    for moves in schedule.rounds:
        sent = tuple(tuple((m.lane, offset) for offset in m.offsets) for m in moves)
        arrived = tuple(tuple((m.lane, o) for o in schedule.arrivals(m)) for m in moves)
        if back:
            moves = tuple(replace(move, shift=-move.shift) for move in moves)
            sent, arrived = arrived, sent
        rounds.append(PlannedRound(moves, sent, arrived))
    return tuple(rounds[::-1] if back else rounds)


@lru_cache(maxsize=512)
def toured(path: Tour) -> tuple[tuple[PlannedRound, PlannedRound], ...]:
    """The rounds of a tour: what goes out, and what comes home at the same time."""
    nothing = PlannedRound()
    home = [*[nothing] * path.delay, *planned(path.back, back=True)]
    both = zip_longest(planned(path.out), home, fillvalue=nothing)
    return tuple(both) or ((nothing, nothing),)


def message(held: Mapping[Key, Any], keys: Sequence[Key]) -> Any:
    """What is held under these keys, stacked: arrays, or pytrees whose arrays are stacked.

    They have the widest of their dtypes: a partial sum may be wider than a raw contribution.
    """
    # A single one is stacked too. Without that, libtpu 0.0.52 starts some permutes later: 45 of 343
    # us are exposed in place of 0 of 298, for [2048, 2048] @ [2048, 40960] on v5e:4x2.
    values, stacked = [held[key] for key in keys], []
    for xs in zip(*map(jax.tree.leaves, values), strict=True):
        widest = max((x.dtype for x in xs), key=attrgetter("itemsize"))
        stacked.append(jnp.stack([x.astype(widest) for x in xs]))
    return jax.tree.unflatten(jax.tree.structure(values[0]), stacked)


def opened(messages: Sequence[Any], keys: Sequence[Sequence[Key]]) -> Iterator[tuple[Key, Any]]:
    """What messages bring, and the keys to keep it under."""
    for each, of_each in zip(messages, keys, strict=True):
        leaves, structure = jax.tree.flatten(each)
        # To iterate over a stacked array is to take it apart.
        for key, values in zip(of_each, zip(*leaves, strict=True), strict=True):
            yield key, jax.tree.unflatten(structure, values)
