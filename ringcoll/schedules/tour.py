"""A tour: shards are gathered, and a partial result follows each shard and returns to its owner.

A tour runs two gathers of the same ranks in step. `out` brings the shards. `back`, run backward,
carries the partial results: every rank that a shard visits adds to the shard's partial result. On
a ring, `back` is the ring of the other direction. So the partial result of a shard visits the same
ranks as the shard, one round later, and one more hop brings it to the owner ("home"):

    n = 4, rank r       out brings    rank r adds to, and sends on
    time 1              r - 1         (its own)
    time 2              r - 2         r - 1
    time 3              r - 3         r - 1 is sent; r - 2
    time 4                            r - 2 is sent; r - 3
    time 5                            r - 3 is sent, and is at home

The backward pass of ring attention is a tour: keys and values travel with their gradients.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ringcoll.schedules.schedule import Move, Schedule, ScheduleError, digits


@dataclass(frozen=True)
class Tour:
    """Two gathers: `out` runs forward, and `back` runs backward, `delay` rounds later."""

    out: Schedule
    back: Schedule

    @cached_property
    def delay(self) -> int:
        """How many rounds of `out` start before the first round of `back`.

        A rank works on a shard that arrived in round t while round t + 1 is on the wire. So it can
        send what it adds for that shard from round t + 2 on.
        """
        there, home = _rounds_of(self.out), _rounds_of(self.back)
        last = max((there[key] + home[key] for key in there), default=-1)
        return max(last + 1 - len(self.back.rounds), 0)

    @property
    def rounds(self) -> int:
        """The number of rounds; in some of them both gathers send."""
        return max(len(self.out.rounds), len(self.back.rounds) + self.delay)

    @property
    def waiting(self) -> int:
        """The most partial results of other ranks that one rank holds at the same time."""
        there, home = _rounds_of(self.out), _rounds_of(self.back)
        change: defaultdict[int, int] = defaultdict(int)
        for key in there:
            change[there[key] + 1] += 1
            change[len(self.back.rounds) + 1 - home[key] + self.delay] -= 1
        held = most = 0
        for time in sorted(change):
            held += change[time]
            most = max(most, held)
        return most

    def check(self, offsets: Collection[int] | None = None) -> "Tour":
        """Prove both gathers, and that what is added for each shard comes home.

        (`delay` is the least with which a rank adds to a partial result before it sends it.)

        Args:
            offsets: the shards that must arrive; None for all.

        Raises:
            ScheduleError: something is wrong; the message has the round and the offset.
        """
        if (self.out.shape, self.out.lanes) != (self.back.shape, self.back.lanes):
            raise ScheduleError("a tour takes two gathers of one shape and number of lanes")
        self.out.check(offsets)
        self.back.check(offsets)
        if missing := sorted(_rounds_of(self.out).keys() - _rounds_of(self.back).keys()):
            raise ScheduleError(f"what is added for offset {missing[0][1]} never comes home")
        return self


@lru_cache(maxsize=512)
def tour(schedule: Schedule, offsets: frozenset[int] | None = None) -> Tour:
    """The tour of a gather. `back` is the gather in the other direction or the same gather.

    Of these two, the tour with fewer rounds is taken; if they tie, the one that holds less.

    Args:
        schedule: the gather.
        offsets: the shards that a rank needs besides its own; None for all.
    """
    ways = [way for way in (opposite_gather(schedule), schedule) if way is not None]
    if offsets is not None:
        schedule, ways = cut(schedule, offsets), [cut(way, offsets) for way in ways]
    visited = _rounds_of(schedule).keys()  # including those that are only forwarded
    tours = [Tour(schedule, back) for back in ways if visited <= _rounds_of(back).keys()]
    best = min(tours, key=lambda one: (one.rounds, one.waiting))
    return best.check(offsets)


def opposite_gather(schedule: Schedule) -> Schedule | None:
    """The gather whose shards take the same walk in the other direction; None if there is none.

    In each lane, a shard must walk from rank to rank, one rank a round. The walk must end one step
    along one axis from its start, as on a ring.
    """
    rounds: list[list[Move]] = [[] for _ in schedule.rounds]
    for lane in range(schedule.lanes):
        walk = [[m for m in moves if m.lane == lane] for moves in schedule.rounds]
        at = 0
        for moves in walk:
            if len(moves) != 1 or moves[0].offsets != (at,):
                return None
            (at,) = schedule.arrivals(moves[0])
        far = digits(at, schedule.shape)
        along = [axis for axis, digit in enumerate(far) if digit]
        if not walk or len(along) != 1:
            return None
        (axis,) = along
        ahead, n = far[axis], schedule.shape[axis]
        shift = ahead if 2 * ahead <= n else ahead - n
        rounds[0].append(Move(shift, (0,), axis, lane))
        for number, (move,) in enumerate(reversed(walk[1:]), 1):
            rounds[number].append(replace(move, shift=-move.shift, offsets=schedule.arrivals(move)))
    return replace(schedule, rounds=tuple(map(tuple, rounds)))


@lru_cache(maxsize=512)
def cut(schedule: Schedule, offsets: frozenset[int]) -> Schedule:
    """A gather of only the shards of these offsets. It sends nothing that no rank needs.

    >>> from ringcoll.schedules.tour import cut
    >>> len(cut(algorithms.ring(8), frozenset({1, 2})).rounds)
    2
    """
    needed = {(lane, offset) for lane in range(schedule.lanes) for offset in offsets}
    rounds = []
    for moves in reversed(schedule.rounds):
        kept = []
        for move in moves:
            pairs = zip(move.offsets, schedule.arrivals(move), strict=True)
            sent = tuple(o for o, arrived in pairs if (move.lane, arrived) in needed)
            if sent:
                kept.append(replace(move, offsets=sent))
        needed |= {(move.lane, offset) for move in kept for offset in move.offsets}
        if kept:
            rounds.append(tuple(kept))
    return replace(schedule, rounds=tuple(reversed(rounds)))


@lru_cache(maxsize=512)
def _rounds_of(schedule: Schedule) -> dict[tuple[int, int], int]:
    """By lane and offset, the round in which a shard arrives."""
    return {
        (move.lane, offset): number
        for number, move in schedule.numbered_moves()
        for offset in schedule.arrivals(move)
    }
