"""A collective algorithm as plain data: rounds of moves, and their proof.

An all-gather on n ranks is a list of rounds. A round is a few moves that happen at the
same time. A move is `(shift, offsets)`: *every rank r sends to rank r + shift the shards it
holds from the ranks r - offset*. Each rank starts with offset 0, its own shard:

    ring, n = 4         (+1, [0])               (+1, [1])      (+1, [2])
    two-ended, n = 4    (+1, [0])  (-1, [0])    (+1, [1])
    Bruck, n = 4        (+1, [0])               (+2, [0, 1])

Every rank does the same thing, so one short list describes the whole machine. Ranks
are added modulo n or, on a schedule of several axes, digit by digit: a schedule of
shape (4, 2) numbers its ranks row-major and adds each digit modulo its axis. (Shape
(2, 2, 2) therefore adds as XOR does: recursive doubling is a torus of twos.)

Run forward, the list is an all-gather. Run backward with the shifts negated, it is a
reduce-scatter: the partial sum of the shard at `offset + shift` returns to `offset`.
This file knows nothing of JAX; `ringcoll.runtime.run` executes what is written here.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import count
from math import prod
from typing import Any, TypeVar

import numpy as np

RankOrArray = TypeVar("RankOrArray", int, np.ndarray)
_WHOLE = (int, np.integer)
_NOT_WHOLE = "not a whole number; pass an int (n // 2, not n / 2)"


class ScheduleError(ValueError):
    """A schedule is wrong; the message says where."""


class SizeError(ScheduleError):
    """An algorithm has no schedule for this number of ranks."""


@dataclass(frozen=True, slots=True)
class Move:
    """Every rank r sends to rank r + shift, along one axis, the shards it holds from r - offset."""

    shift: int
    offsets: tuple[int, ...]
    axis: int = 0
    lane: int = 0


Round = tuple[Move, ...]


def digits(rank: int, shape: Sequence[int]) -> list[int]:
    """The position of a rank along each axis of a shape."""
    return [rank // prod(shape[axis + 1 :]) % n for axis, n in enumerate(shape)]


def _hashable(move: Any) -> Move:
    """A move with its offsets as a tuple."""
    if not isinstance(move, Move):
        raise ScheduleError(
            f"a round holds {move!r}, which is no Move; write Move(shift, offsets): Move(1, (0,))"
        )
    offsets = _as_tuple(f"{move!r}: offsets", move.offsets)
    return move if offsets is move.offsets else replace(move, offsets=offsets)


def _as_tuple(what: str, given: Any) -> tuple[Any, ...]:
    """A sequence as a tuple, because a list cannot be hashed."""
    try:
        return tuple(given)
    except TypeError as error:
        raise ScheduleError(f"{what} must be a tuple: ({given!r},)") from error


@dataclass(frozen=True)
class Schedule:
    """Rounds of moves on ranks of `shape`, in `lanes` lanes that carry equal shares.

    A lane is a schedule that carries its share of every shard. The lanes run in step, so the
    moves of one round can use different links. `ringcoll.algorithms` says what a schedule cannot
    express.
    """

    shape: tuple[int, ...]
    rounds: tuple[Round, ...]
    lanes: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _as_tuple("shape", self.shape))
        rounds = (
            _as_tuple("a round of moves", moves) for moves in _as_tuple("rounds", self.rounds)
        )
        object.__setattr__(self, "rounds", tuple(tuple(map(_hashable, moves)) for moves in rounds))
        if wrong := [x for x in (*self.shape, self.lanes) if not isinstance(x, _WHOLE)]:
            raise ScheduleError(
                f"shape {self.shape}, lanes {self.lanes}: {wrong[0]!r} is {_NOT_WHOLE}"
            )
        if min(self.shape, default=0) < 1:
            raise ScheduleError(f"shape {self.shape}: give every axis one rank or more")

    @cached_property  # many loops use it
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.shape)

    def step(self, rank: RankOrArray, axis: int, shift: int) -> RankOrArray:
        """The rank that is `shift` ahead along `axis`; an array of ranks gives an array."""
        stride = prod(self.shape[axis + 1 :])
        digit = rank // stride % self.shape[axis]
        return rank + ((digit + shift) % self.shape[axis] - digit) * stride

    def arrivals(self, move: Move) -> tuple[int, ...]:
        """The offsets of the shards that `move` brings, as the receiver counts them."""
        return tuple(self.step(o, move.axis, move.shift) for o in move.offsets)

    def numbered_moves(self) -> Iterator[tuple[int, Move]]:
        """Every move with the number of its round, from 1."""
        for number, moves in enumerate(self.rounds, 1):
            for move in moves:
                yield number, move

    def whole(self) -> "Schedule":
        """Lane 0 alone: it carries whole shards, for those that cannot be cut."""
        lane = [tuple(m for m in moves if m.lane == 0) for moves in self.rounds]
        return replace(self, rounds=tuple(filter(None, lane)), lanes=1)

    def check(self, offsets: Collection[int] | None = None) -> "Schedule":
        """Prove that it is an all-gather (and backward a reduce-scatter), or say what is wrong.

        Every move sends only what a rank holds when the round starts. Each offset arrives at most
        once in each lane. At the end a rank holds all the offsets that must arrive.

        Args:
            offsets: the offsets that must arrive; None for all.

        Raises:
            ScheduleError: something is wrong; the message has the round, the offset and the lane.
        """
        self._check_moves()
        # By lane, then by offset: the round in which it arrived. A lane without moves takes no
        # memory.
        arrival_round: defaultdict[int, dict[int, int]] = defaultdict(lambda: {0: 0})
        for number, move in self.numbered_moves():
            of_lane = arrival_round[move.lane]
            for sent, arrived in zip(move.offsets, self.arrivals(move), strict=True):
                if of_lane.get(sent, number) == number:  # it did not arrive before
                    raise ScheduleError(
                        f"round {number}: rank r sends the shard of offset {sent} before holding "
                        f"it{self._in_lane(move.lane)}; bring it in an earlier round"
                    )
                if arrived in of_lane:
                    raise ScheduleError(
                        f"round {number}: offset {arrived} arrives twice{self._in_lane(move.lane)}"
                        f"; leave offset {sent} out of this move of shift {move.shift}"
                    )
                of_lane[arrived] = number
        for lane in self._lanes_to_look_at():
            wanted = count() if offsets is None else offsets
            if len(arrival_round[lane]) < self.size:
                missing = next(
                    (offset for offset in wanted if offset not in arrival_round[lane]), None
                )
                if missing is not None:
                    raise ScheduleError(
                        f"offset {missing} never arrives{self._in_lane(lane)}; add a move whose "
                        f"offset + shift is {missing}"
                    )
        return self

    def _lanes_to_look_at(self) -> range:
        """All lanes; of more lanes than moves, the first ones: one of them has no moves."""
        return range(min(self.lanes, 1 + sum(map(len, self.rounds))))

    def _check_moves(self) -> None:
        """Refuse a move with a number that is out of range."""
        if self.lanes < 1:
            raise ScheduleError(f"lanes={self.lanes}: pass 1 or more")
        for number, move in self.numbered_moves():
            where = f"round {number}: "
            numbers = (move.shift, move.axis, move.lane, *move.offsets)
            if wrong := [x for x in numbers if not isinstance(x, _WHOLE)]:
                raise ScheduleError(where + f"{wrong[0]!r} is {_NOT_WHOLE}")
            if not 0 <= move.axis < len(self.shape):
                raise ScheduleError(
                    where + f"axis {move.axis}, but the shape is {self.shape}; count axes from 0"
                )
            if not 0 <= move.lane < self.lanes:
                raise ScheduleError(
                    where + f"lane {move.lane}, but lanes={self.lanes}; count lanes from 0"
                )
            if move.shift % self.shape[move.axis] == 0:
                n = self.shape[move.axis]
                raise ScheduleError(
                    where + f"shift {move.shift} sends to oneself; pass no multiple of {n}"
                )
            if not move.offsets:
                words = f"a move of shift {move.shift} sends nothing; give it an offset, or drop it"
                raise ScheduleError(where + words)
            for offset in move.offsets:
                if not 0 <= offset < self.size:
                    raise ScheduleError(
                        where + f"offset {offset} is not in 0..{self.size - 1}; take it modulo n"
                    )

    def _in_lane(self, lane: int) -> str:
        return f" (lane {lane})" if self.lanes > 1 else ""


class AllToAllSchedule(Schedule):
    """The same data, read as an all-to-all: slot d of rank r is the block for rank r + d.

    A move sends the slots in `offsets`. A block keeps its slot on the way, and the shifts on its
    way must add up to the number of its slot.
    """

    def check(self, offsets: Collection[int] | None = None) -> "AllToAllSchedule":
        """Prove that every block ends at its rank, or say which does not.

        All blocks must arrive: `offsets` is not used.

        Raises:
            ScheduleError: a block ends elsewhere; the message has the slot and where it ends.
        """
        self._check_moves()
        went: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by lane, then by slot
        for number, moves in enumerate(self.rounds, 1):
            sent: set[tuple[int, int]] = set()
            for move in moves:
                for slot in move.offsets:
                    if (move.lane, slot) in sent:
                        raise ScheduleError(
                            f"round {number}: the block for rank r + {slot} is sent twice"
                            f"{self._in_lane(move.lane)}; leave it out of one of the moves"
                        )
                    sent.add((move.lane, slot))
                    so_far = went[move.lane].get(slot, 0)
                    went[move.lane][slot] = self.step(so_far, move.axis, move.shift)
        for lane in self._lanes_to_look_at():
            for slot in range(self.size):  # stops at the first slot that no move sends
                if slot != (end := went[lane].get(slot, 0)):
                    raise ScheduleError(
                        f"the block for rank r + {slot} ends at r + {end}{self._in_lane(lane)}; "
                        f"the shifts of the moves that send {slot} must add up to {slot}"
                    )
        return self


Kind = TypeVar("Kind", bound=Schedule)


def in_lanes(*schedules: Kind) -> Kind:
    """Run schedules at the same time, each as a lane. All have one shape, and one lane each.

    Raises:
        ScheduleError: they differ in shape, or one has several lanes.
    """
    if {(s.shape, s.lanes) for s in schedules} != {(schedules[0].shape, 1)}:
        raise ScheduleError("in_lanes takes schedules of one lane; make all for the same ranks")
    depth = max(len(s.rounds) for s in schedules)
    rounds = []
    for number in range(depth):
        moves: list[Move] = []
        for lane, schedule in enumerate(schedules):
            if number < len(schedule.rounds):
                moves += (replace(move, lane=lane) for move in schedule.rounds[number])
        rounds.append(tuple(moves))
    return type(schedules[0])(schedules[0].shape, tuple(rounds), len(schedules))


def product(schedules: Sequence[Kind], order: Iterable[int] | None = None) -> Kind:
    """A schedule over several axes: gather along the first, then gather the result along the next.

    Args:
        schedules: one for each axis (or run of axes), major first; all have as many lanes.
        order: the indices of those that run, in the order in which they run; None for all.

    Raises:
        ScheduleError: they differ in their number of lanes.
    """
    factors = range(len(schedules)) if order is None else tuple(order)
    if len({schedules[factor].lanes for factor in factors}) > 1:
        raise ScheduleError("product takes schedules with equal lanes; give all as many lanes")
    shape = tuple(p for s in schedules for p in s.shape)
    kind, lanes = type(schedules[0]), schedules[factors[0]].lanes
    moving = kind is AllToAllSchedule  # every rank starts with all slots
    held = list(range(prod(shape))) if moving else [0]
    rounds: list[Round] = []
    for factor in factors:
        schedule = schedules[factor]
        first_axis = sum(len(s.shape) for s in schedules[:factor])
        stride = prod(p for s in schedules[factor + 1 :] for p in s.shape)
        rest = [h for h in held if h // stride % schedule.size == 0]  # its digit here is 0
        for moves in schedule.rounds:
            wider = []
            for move in moves:
                offsets = tuple(h + o * stride for o in move.offsets for h in rest)
                wider.append(replace(move, offsets=offsets, axis=first_axis + move.axis))
            rounds.append(tuple(wider))
        if not moving:
            held = [h + o * stride for o in range(schedule.size) for h in rest]
    return kind(shape, tuple(rounds), lanes)


@lru_cache(maxsize=512)
def stretches(schedule: Schedule, unroll_up_to: int) -> list[tuple[int, int]]:
    """Cut the rounds into runs (start, stop): single rounds, and long runs that only forward.

    In a run of more than `unroll_up_to` rounds, every move sends exactly the shards that the same
    move brought in the round before (the rank's own, in the first round), and no later round sends
    any of them again.
    """
    runs, start, rounds = [], 0, schedule.rounds
    while start < len(rounds):
        stop = start
        while stop < len(rounds) and _forwards(schedule, stop):
            stop += 1
        of_run, later = (
            {(m.lane, o) for moves in some for m in moves for o in m.offsets}
            for some in (rounds[start:stop], rounds[stop:])
        )
        # A program with a loop has the code of two rounds: one is before the loop or after it.
        is_long = stop - start > max(unroll_up_to, 2) and of_run.isdisjoint(later)
        stop = max(stop, start + 1)
        runs += [(start, stop)] if is_long else [(i, i + 1) for i in range(start, stop)]
        start = stop
    return runs


def _forwards(schedule: Schedule, number: int) -> bool:
    """Whether the moves of a round send what they brought before; in the first, a lane's own."""
    moves = schedule.rounds[number]
    if number == 0:
        return [(move.lane, move.offsets) for move in moves] == [
            (lane, (0,)) for lane in range(schedule.lanes)
        ]
    before = schedule.rounds[number - 1]
    return moves == tuple(replace(m, offsets=schedule.arrivals(m)) for m in before)
