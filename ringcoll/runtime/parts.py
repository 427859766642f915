"""What travels: a rank's shard in parts, one for each lane of a schedule, and their messages.

While a schedule runs, a rank holds parts, or partial sums for them, under keys `(lane, offset)`:
the share of a lane of the shard of the rank that is `offset` behind.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ringcoll.runtime.slicing import split, start_of
from ringcoll.schedules.schedule import Round, Schedule
from ringcoll.schedules.tour import Tour

#: Under which a rank holds a part: its lane, and the offset of its shard.
Key = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows of a shard that one lane carries, or some of them; they have arrived or are wanted.

    Attributes:
        origin: the rank whose shard it is.
        lane: the lane.
        offsets: the offsets that the shard may have. In a loop it differs from turn to turn.
        first: the first of the rows in the shard. Rows are along `Layout.cut_dim`.
        rows: the number of rows.
        value: the rows: an array, or a pytree of arrays. None if they are wanted.
    """

    origin: Array
    lane: int = field(metadata={"static": True})
    offsets: tuple[int, ...] = field(default=(), metadata={"static": True})
    first: int = field(metadata={"static": True})
    rows: int = field(metadata={"static": True})
    value: Any = None


jax.tree_util.register_dataclass(Part)


@dataclass(frozen=True)
class Layout:
    """Where the parts of all shards are in one array.

    Attributes:
        dim: the dimension along which shards are end to end.
        size: the length of a shard along that dimension.
        lanes: the number of lanes.
        cut: the dimension along which lanes divide a shard, and its length there; None for `dim`.
    """

    dim: int
    size: int
    lanes: int = 1
    cut: tuple[int, int] | None = None

    @property
    def cut_dim(self) -> int:
        """The dimension along which lanes divide a shard."""
        return self.dim if self.cut is None else self.cut[0]

    def share(self, lane: int) -> tuple[int, int]:
        """Where the share of a lane starts, and its length; lengths differ by one at most."""
        length = self.size if self.cut is None else self.cut[1]
        start, stop = (i * length // self.lanes for i in (lane, lane + 1))
        return start, stop - start

    def by_lane(self, x: Any) -> list[Any]:
        """The shares of all lanes of a shard."""
        return split(x, self.cut_dim, [self.share(lane)[1] for lane in range(self.lanes)])

    def part(
        self, origin: Array, lane: int, offsets: tuple[int, ...] = (), value: Any = None
    ) -> Part:
        """The part of a lane."""
        first, rows = self.share(lane)
        return Part(origin=origin, lane=lane, offsets=offsets, first=first, rows=rows, value=value)

    def start(self, part: Part, whole: Array) -> list[Any]:
        """Where a part starts in an array of all shards, for each dimension."""
        first = part.first if self.cut_dim == self.dim else 0
        # All starts are of one dtype, so it depends on part.first too.
        longest = max(whole.shape[self.dim], part.first)
        at = start_of(part.origin, self.size, first, longest)
        start: list[Any] = [at.dtype.type(0)] * whole.ndim
        start[self.cut_dim] = at.dtype.type(part.first)
        start[self.dim] = at  # last: if both are one dimension, it has part.first too
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
    """What is held under these keys, as one message: alone, or stacked.

    Each is an array, or a pytree of arrays. Stacked, they have the widest of their dtypes: a
    partial sum may be wider than a raw contribution.
    """
    values, stacked = [held[key] for key in keys], []
    if len(values) == 1:
        return values[0]
    for xs in zip(*map(jax.tree.leaves, values), strict=True):
        widest = max((x.dtype for x in xs), key=attrgetter("itemsize"))
        stacked.append(jnp.stack([x.astype(widest) for x in xs]))
    return jax.tree.unflatten(jax.tree.structure(values[0]), stacked)


def opened(messages: Sequence[Any], keys: Sequence[Sequence[Key]]) -> Iterator[tuple[Key, Any]]:
    """What messages bring, and the keys to keep it under."""
    for each, of_each in zip(messages, keys, strict=True):
        if len(of_each) == 1:
            yield of_each[0], each
            continue
        leaves, structure = jax.tree.flatten(each)
        # To iterate over a stacked array is to take it apart.
        for key, values in zip(of_each, zip(*leaves, strict=True), strict=True):
            yield key, jax.tree.unflatten(structure, values)
