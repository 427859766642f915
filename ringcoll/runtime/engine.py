"""Running a schedule: forward it gathers, backward it reduces.

`gather` hands every shard that arrives to a visitor; `reduce` asks a producer for every
partial sum just before it is needed. What is done with a shard (put in its place,
multiplied, accumulated) is theirs; when it is sent and to whom is read off the schedule.

The rounds are written out one after the other, sends first, so that what is done with
the last arrivals can run while the next are on the wire. A long stretch in which every
move only forwards what it brought the round before (a ring) becomes a `lax.scan`
instead, and so does a shorter one of a `reduce` if the order of its work asks for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from ringcoll.runtime.barriers import Order
from ringcoll.runtime.contributions import (
    Contributions,
    Key,
    Shard,
    Slot,
    keys_arrived,
    keys_sent,
    message,
    stacked,
)
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.value_types import varying
from ringcoll.schedules.schedule import AllToAllSchedule, Round, Schedule, stretches

#: A stretch of more rounds than this is run as a loop, which keeps compile time and program
#: size independent of n. Both run as fast on CPU; up to here both compile in under a second,
#: and the written-out form leaves the compiler free to overlap (`python -m benchmarks loop`).
UNROLL_UP_TO = 24

_ANY = Order()
Carry = TypeVar("Carry")
Combine = Callable[[Array, Array], Array]
Visit = Callable[[Carry, list[Shard]], Carry]
Produce = Callable[[Any, list[Slot]], Contributions]


def gather(
    schedule: Schedule,
    ranks: Ranks,
    own: Sequence[Array],
    visit: Visit[Carry],
    carry: Carry,
    *,
    order: Order = _ANY,
) -> Carry:
    """Bring the shard of every rank to every rank, and visit them as they come.

    Args:
        schedule: what is sent when.
        ranks: by whom, cut into the digits of the schedule.
        own: this rank's shard, a share for each lane.
        visit: `(carry, shards) -> carry`, called with what one round brought (first of
            all this rank's own) while the next round is on the wire.
        carry: what the first visit gets; its shapes, dtypes and types must not change.
        order: that of visits, if they take work under which the wire can hide. By a compiler:
            a round is sent when the visit of the round before is done, or all of one might be
            done, then all of the other. Else what is sent comes just after, but in a loop.

    Returns:
        What the last visit returned.
    """
    held = {Key(lane, 0): varying(x, ranks.axes) for lane, x in enumerate(own)}
    came = list(held)
    before: list[Array] = []  # what the round sent that brought what came: kept until it is put

    def shards() -> list[Shard]:
        origins = [order.in_turn(ranks.origin(key.offset), before) for key in came]
        return [Shard(held[k], at, k.lane) for k, at in zip(came, origins, strict=True)]

    count = len(schedule.rounds)
    if order.gathers_in_pairs and count % 2 and stretches(schedule, 0) == [(0, count)]:
        moves = schedule.rounds[0]
        if came == [key for move in moves for key in keys_sent(move)]:
            own, turns = [message(held, keys_sent(move)) for move in moves], (0, count + 1)
            return _gather_loop(schedule, ranks, turns, own, visit, carry, held, order, 2)[0]
    for start, stop in stretches(schedule, 0 if order.gathers_in_one_loop else UNROLL_UP_TO):
        moves = schedule.rounds[start]
        messages = [message(held, keys_sent(m)) for m in moves]
        first = start  # of the loop, in which each round sends what the round before brought
        all_sent = [key for move in moves for key in keys_sent(move)]
        if stop - start == 1 or not order.gathers_in_one_loop or came != all_sent:
            first += 1
            sent = [order.late(x) for x in messages]
            arriving = ranks.hops(f"round {first}", moves, sent)
            carry = visit(carry, shards())
        if stop - start > 1:
            last, stretch = messages if first == start else arriving, (first, stop)
            carry, arriving = _gather_loop(schedule, ranks, stretch, last, visit, carry, held)
        before = messages
        carry, arriving = order.tied((carry, arriving))
        came = []
        for move, stack in zip(schedule.rounds[stop - 1], arriving, strict=True):
            arrived = keys_arrived(schedule, move)
            came += arrived
            held.update(zip(arrived, stack, strict=True))
    return visit(carry, shards())


def _gather_loop(
    schedule: Schedule,
    ranks: Ranks,
    stretch: tuple[int, int],
    last: list[Array],
    visit: Visit[Carry],
    carry: Carry,
    held: dict[Key, Array],
    order: Order = _ANY,
    unroll: int = 1,
) -> tuple[Carry, list[Array]]:
    """Rounds of a stretch: visit what came last, and forward it. The first round sends `last`.

    Returns the carry and what the last round brought; what an earlier one brought is put
    into `held` if it is sent once more.
    """
    start, stop = stretch
    moves = schedule.rounds[start]
    again = {k for later in schedule.rounds[stop:] for m in later for k in keys_sent(m)}
    came = [k for r in schedule.rounds[start:stop] for m in r for k in keys_sent(m)]
    keep = not again.isdisjoint(came)

    def body(state: tuple[Carry, list[Array]], i: Array) -> tuple[Any, Any]:
        carry, last = state
        arriving = ranks.hops(f"rounds {start + 1} to {stop}", moves, last)
        shards = [
            Shard(x[j], ranks.origin(offset, m.axis, i * m.shift), lane)
            for m, x in zip(moves, last, strict=True)
            for j, (lane, offset) in enumerate(keys_sent(m))
        ]
        return order.tied((visit(carry, shards), arriving)), last if keep else None

    (carry, arriving), stacks = lax.scan(
        body, (carry, last), jnp.arange(stop - start, dtype=jnp.int32), unroll=unroll
    )
    if keep:  # a later round sends them once more
        for i, moves in enumerate(schedule.rounds[start:stop]):
            for move, stack in zip(moves, stacks, strict=True):
                held.update(zip(keys_sent(move), stack[i], strict=True))
    return carry, arriving


def reduce(
    schedule: Schedule,
    ranks: Ranks,
    produce: Produce,
    combine: Combine,
    operands: Any = (),
    *,
    order: Order = _ANY,
) -> list[Array]:
    """Combine, for every rank, what all ranks contribute to its shard.

    The gather run backward: a partial result returns the way the shard would have come, and
    every rank on the way combines its own contribution with it.

    Args:
        schedule: the gather.
        ranks: by whom, cut into the digits of the schedule.
        produce: `(operands, slots) -> Made`, called just before contributions are needed,
            with all that a round needs; each is asked for once.
        combine: `(received, mine) -> partial`, associative as far as the caller cares.
            What has not been combined yet travels as it was produced.
        operands: what all contributions are produced from.
        order: that of producing, if it takes work under which the wire can hide. Every round
            ties the operands to its sums, so that the work of two is not merged: what waits
            for the wire is not hidden. If no compiler orders them, the next work waits until
            what is sent is there, but in a loop.

    Returns:
        This rank's shard, a share for each lane.
    """
    sums = _Sums(schedule, ranks, produce, combine, operands, order)
    for start, stop in reversed(stretches(schedule, UNROLL_UP_TO if order.may_unroll else 0)):
        sums.send_back(stop - 1)
        if stop - start > 1:
            last = [key for move in schedule.rounds[start] for key in keys_sent(move)]
            # The ends of `two_ended` add to one shard there; a loop would carry a sum of each.
            ends_meet = len(set(last)) < len(last)
            looped = start + 1 if ends_meet else start
            number = len(schedule.rounds) - stop + 2
            sums.loop(number, schedule.rounds[looped : stop - 1][::-1])
            if ends_meet:
                sums.send_back(start)
    mine = [Key(lane, 0) for lane in range(schedule.lanes)]
    sums.want(mine)
    kept = sums.made_of if schedule.rounds else ()
    return [order.after(sums.partial[key], kept) for key in mine]


@dataclass
class _Sums:
    """The partial results of one rank while a `reduce` runs."""

    schedule: Schedule
    ranks: Ranks
    produce: Produce
    combine: Combine
    operands: Any
    order: Order
    partial: dict[Key, Array] = field(default_factory=dict)
    sent: list[Array] = field(default_factory=list)
    made_of: Sequence[Array] = ()  # of which the last contributions were made

    def want(self, keys: Sequence[Key]) -> bool:
        """Produce this rank's contributions to those of which there are none yet, if any."""
        missing = [k for k in dict.fromkeys(keys) if k not in self.partial]
        if not missing:
            return False
        before = [*self.sent, *self.made_of]
        origins = [self.order.in_turn(self.ranks.origin(k.offset), before) for k in missing]
        slots = [Slot(at, key.lane) for at, key in zip(origins, missing, strict=True)]
        values, self.made_of = self.produce(self.operands, slots)
        for key, value in zip(missing, values, strict=True):
            self.partial[key] = varying(value, self.ranks.axes)
        return True

    def send_back(self, number: int) -> None:
        """The round of this number, backward."""
        moves = self.schedule.rounds[number]
        arrived = [keys_arrived(self.schedule, m) for m in moves]
        if self.want([k for keys in arrived for k in keys]):  # these first products are tied too
            self.partial, self.operands = self.order.tied((self.partial, self.operands))
        self.sent = [message(self.partial, keys) for keys in arrived]
        messages = [self.order.late(x, steps=3) for x in self.sent]  # a factor is cut first
        name = f"round {len(self.schedule.rounds) - number}"
        received = self.ranks.hops(name, moves, messages, back=True)
        keys = [k for m in moves for k in keys_sent(m)]
        self.want(keys)
        mine = self._apart({k: self.partial[k] for k in keys})
        for move, stack in zip(moves, received, strict=True):
            for key, value in zip(keys_sent(move), stack, strict=True):
                mine[key] = self.combine(value, mine[key])
        if number:  # after round 0, the last one backward, nothing is produced
            mine, self.operands = self.order.tied((mine, self.operands))
        self.partial.update(mine)

    def loop(self, first: int, rounds: Sequence[Round]) -> None:
        """Rounds of a stretch, backward, without its last; as they are run, from this number on.

        (What that sends is no partial result yet, and may be narrower than what a loop carries.)
        """
        moves, name = rounds[0], f"rounds {first} to {first + len(rounds) - 1}"
        sent = [keys_sent(move) for move in moves]
        every = [key for moves in rounds for m in moves for key in keys_sent(m)]
        stacks = None
        if not self.partial.keys().isdisjoint(every):  # left by the rounds of another axis
            self.want(every)
            stacks = [
                stacked([message(self.partial, keys_sent(a_round[m])) for a_round in rounds])
                for m in range(len(moves))
            ]

        def body(state: Any, step: tuple[Array, Any]) -> tuple[Any, None]:
            (moving, operands), (i, mine) = state, step
            received = self.ranks.hops(name, moves, moving, back=True)
            if mine is None:
                slots = [
                    Slot(self.ranks.origin(offset, m.axis, -i * m.shift), lane)
                    for m, keys in zip(moves, sent, strict=True)
                    for lane, offset in keys
                ]
                values = iter(self.produce(operands, slots).values)
                mine = [jnp.stack([next(values) for _ in keys]) for keys in sent]
                mine = [varying(x, self.ranks.axes) for x in mine]
            mine = self._apart(mine)
            summed = [self.combine(r, x) for r, x in zip(received, mine, strict=True)]
            # The next products wait for these sums, or compilers would merge them.
            return self.order.tied((summed, operands)), None

        moving = [message(self.partial, keys_arrived(self.schedule, m)) for m in moves]
        steps = jnp.arange(len(rounds), dtype=jnp.int32), stacks
        (moving, self.operands), _ = lax.scan(body, (moving, self.operands), steps)
        for move, stack in zip(rounds[-1], moving, strict=True):
            self.partial.update(zip(keys_sent(move), stack, strict=True))

    def _apart(self, mine: Any) -> Any:
        """A lone product would be fused with its addition, and so wait for the wire."""
        return self.order.tied(mine) if len(mine) == 1 else mine


def all_to_all(schedule: AllToAllSchedule, ranks: Ranks, blocks: Sequence[Array]) -> list[Array]:
    """Carry every block to its rank.

    Args:
        schedule: which blocks go when.
        ranks: between whom, cut into the digits of the schedule.
        blocks: this rank's blocks; number d is for rank r + d.

    Returns:
        The blocks for this rank; number d is from rank r - d.
    """
    held = {Key(0, d): varying(block, ranks.axes) for d, block in enumerate(blocks)}
    for number, moves in enumerate(schedule.rounds, 1):
        messages = [message(held, keys_sent(m)) for m in moves]
        arriving = ranks.hops(f"round {number}", moves, messages)
        for move, stack in zip(moves, arriving, strict=True):
            held.update(zip(keys_sent(move), stack, strict=True))
    return [held[Key(0, d)] for d in range(schedule.size)]
