"""Run a schedule: forward it gathers, backward it reduces; a tour does both in step.

A ring that multiplies each shard while the next one travels is ten lines:

    def all_gather_matmul(x, w):  # inside jax.shard_map
        n, r = lax.axis_size("x"), lax.axis_index("x")
        right = [(i, (i + 1) % n) for i in range(n)]
        parts = []
        for _ in range(n):
            arriving = lax.ppermute(x, "x", right)  # the next shard travels
            parts.append(x @ w)  # while this one is multiplied
            x = arriving  # after t hops it is rank r - t's
        return jnp.stack(parts)[(r - jnp.arange(n)) % n].reshape(-1, w.shape[1])

`gather` is that loop for any list of rounds. The list says what a round sends, and to whom; what
the loop did with a shard is now a function `visit(carry, shards)`:

    held = arrived = {0: x}                         # by offset: r holds the shard of r - offset
    for moves in schedule.rounds:
        arriving = send(moves, held)                # the next shards travel
        carry = visit(carry, arrived)               # while these are multiplied
        held, arrived = held | arriving, arriving
    return visit(carry, arrived)

`reduce` runs the list backward, and calls `produce` for every contribution just before it is sent.

The program has the rounds one after the other. A long stretch in which every move only forwards
what it received in the round before (a ring) becomes a `lax.scan` instead. `reduce` also rolls
short stretches into a `scan` if `order` requires it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringcoll.runtime.contributions import (
    Contributions,
    Key,
    PlannedRound,
    Shard,
    Slot,
    message,
    planned,
    unstacked,
)
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.order import Order
from ringcoll.runtime.slicing import concatenated
from ringcoll.runtime.value_types import varying
from ringcoll.runtime.wire import Wire, decode, encode
from ringcoll.schedules.schedule import AllToAllSchedule, Schedule, stretches
from ringcoll.schedules.tour import Tour

#: A stretch of more rounds than this is run as a loop, which keeps compile time and program
#: size independent of n. On CPU both forms are equally fast. Up to here both compile in less than a
#: second, and without a loop the compiler can overlap rounds.
UNROLL_UP_TO = 24

_ANY = Order()
Carry = TypeVar("Carry")
Combine = Callable[[Array, Array], Array]
Visit = Callable[[Carry, list[Shard]], Carry]
Produce = Callable[[Any, list[Slot]], Contributions]


def gather(
    schedule: Schedule,
    ranks: Ranks,
    own: Sequence[Any],
    visit: Visit[Carry],
    carry: Carry,
    *,
    order: Order = _ANY,
    wire: Wire | None = None,
) -> Carry:
    """Bring the shard of every rank to every rank, and visit each as it arrives.

    Args:
        schedule: what is sent when.
        ranks: the ranks that run it, as the digits of the schedule.
        own: this rank's shard, a share for each lane: an array, or a pytree of arrays.
        visit: `(carry, shards) -> carry`, called with the shards of one round (first with
            this rank's own) while the shards of the next round travel.
        carry: the carry for the first visit; its shapes, dtypes and types must not change.
        order: how visits and messages are ordered, if visits do work that can hide messages. With
            `Beforehand`, barriers let a round start only when the visit before it is done;
            otherwise a compiler might put all visits after all rounds. With `WhenReady`, messages
            are delayed a little, but not in a loop.
        wire: how shards are encoded: once, by their owners. Visits get decoded shards, also for
            this rank's own shard, so that all ranks use the same values.

    Returns:
        The carry that the last visit returned.
    """
    if wire:
        visit = _decoding(wire, own, visit)
        # Without a barrier, XLA:CPU computes x again to decode it here, and may round differently.
        # Codes may be computed again: the same x gives the same codes.
        own = [encode(wire, lax.optimization_barrier(x)) for x in own]
    typed = partial(varying, axes=ranks.axes)
    held = {Key(lane, 0): jax.tree.map(typed, x) for lane, x in enumerate(own)}
    latest = list(held)
    before: list[Array] = []  # the messages of the round before, kept until their visit

    def shards() -> list[Shard]:
        origins = [order.after(ranks.origin(key.offset), before) for key in latest]
        pairs = zip(latest, origins, strict=True)
        return [Shard(held[k], at, k.lane, (k.offset,)) for k, at in pairs]

    steps = planned(schedule)
    for start, stop in stretches(schedule, 0 if order.gathers_in_one_loop else UNROLL_UP_TO):
        step = steps[start]
        sent = [message(held, keys) for keys in step.sent]
        first = start  # of the loop; its rounds forward the arrivals of the round before
        if stop - start == 1 or not order.gathers_in_one_loop or latest != list(chain(*step.sent)):
            first += 1
            late = jax.tree.map(order.late, sent)
            arriving = ranks.hops(f"round {first}", step.moves, late)
            carry = visit(carry, shards())
        if stop - start > 1:
            last, stretch = sent if first == start else arriving, (first, stop)
            carry, arriving = _gather_loop(steps, ranks, stretch, last, visit, carry, held)
        before = jax.tree.leaves(sent)
        carry, arriving = order.tied((carry, arriving))
        latest = list(chain(*steps[stop - 1].arrived))
        held.update(zip(latest, unstacked(arriving), strict=True))
    return visit(carry, shards())


def _decoding(wire: Wire, own: Sequence[Array], visit: Visit[Carry]) -> Visit[Carry]:
    """`visit` for encoded shards. A lane's shares have the same shape on all ranks."""

    def decoding(carry: Carry, shards: list[Shard]) -> Carry:
        like = [own[shard.lane] for shard in shards]
        values = [
            decode(wire, s.value, x.shape, x.dtype) for s, x in zip(shards, like, strict=True)
        ]
        return visit(carry, [s._replace(value=x) for s, x in zip(shards, values, strict=True)])

    return decoding


def _gather_loop(
    steps: Sequence[PlannedRound],
    ranks: Ranks,
    stretch: tuple[int, int],
    last: list[Any],
    visit: Visit[Carry],
    carry: Carry,
    held: dict[Key, Any],
) -> tuple[Carry, list[Any]]:
    """Run a stretch as a loop: visit the latest arrivals and forward them. It first sends `last`.

    It returns the carry and the arrivals of the last round. Arrivals of earlier rounds are put into
    `held` if they are sent again after the stretch.
    """
    start, stop = stretch
    step = steps[start]
    again = {key for later in steps[stop:] for key in chain(*later.sent)}
    keep = any(not again.isdisjoint(chain(*looped.sent)) for looped in steps[start:stop])
    turns = zip(*(chain(*looped.sent) for looped in steps[start:stop]), strict=True)
    possible = {keys[0]: tuple(key.offset for key in keys) for keys in turns}

    def body(state: tuple[Carry, list[Any]], i: Array) -> tuple[Any, Any]:
        carry, last = state
        arriving = ranks.hops(f"rounds {start + 1} to {stop}", step.moves, last)
        shards = [
            Shard(x, ranks.origin(offset, m.axis, i * m.shift), lane, possible[lane, offset])
            for m, xs, keys in zip(step.moves, last, step.sent, strict=True)
            for x, (lane, offset) in zip(unstacked([xs]), keys, strict=True)
        ]
        return (visit(carry, shards), arriving), last if keep else None

    rounds = jnp.arange(stop - start, dtype=jnp.int32)
    (carry, arriving), stacks = lax.scan(body, (carry, last), rounds)
    if keep:  # a round after the stretch sends them again
        for i, looped in enumerate(steps[start:stop]):
            for keys, stack in zip(looped.sent, stacks, strict=True):
                own_turn = jax.tree.map(lambda x, turn=i: x[turn], stack)
                held.update(zip(keys, unstacked([own_turn]), strict=True))
    return carry, arriving


def reduce(
    schedule: Schedule,
    ranks: Ranks,
    produce: Produce,
    combine: Combine,
    operands: Any = (),
    *,
    order: Order = _ANY,
    wire: Wire | None = None,
) -> list[Any]:
    """Combine, for every rank, the contributions of all ranks to its shard.

    This is the gather run backward: a partial result goes the path of its shard backward, and
    every rank on that path combines its own contribution with it.

    Args:
        schedule: the gather.
        ranks: the ranks that run it, as the digits of the schedule.
        produce: `(operands, slots) -> Contributions`, called with all slots of a round just before
            the round needs their contributions; each slot is asked for once.
        combine: `(received, mine) -> partial`, of arrays or of pytrees; it must be associative, at
            least approximately. It sets the dtype of partial results. Contributions travel in the
            dtype of `produce`.
        operands: the first argument of `produce`.
        order: how work and messages are ordered, if `produce` does work that can hide messages.
            With `Beforehand`, every round ties the operands to its sums, so that the work of two
            rounds is not merged: merged work would wait for the messages. With `WhenReady`, the
            next work waits until the message is ready to be sent, but not in a loop.
        wire: how every message is encoded: raw contributions once, partial sums at each hop.
            `combine` gets received values in float32, or wider if the message was wider.

    Returns:
        This rank's shard, a share for each lane.
    """
    steps = planned(schedule)
    sums = _Sums(steps, ranks, produce, combine, operands, order, wire)
    for start, stop in reversed(stretches(schedule, UNROLL_UP_TO if order.may_unroll else 0)):
        sums.send_back(stop - 1)
        if stop - start > 1:
            last = list(chain(*steps[start].sent))
            # Both directions of `two_ended` add to one shard there; a loop would carry two sums.
            ends_meet = len(set(last)) < len(last)
            looped = start + 1 if ends_meet else start
            sums.loop(len(steps) - stop + 2, steps[looped : stop - 1][::-1])
            if ends_meet:
                sums.send_back(start)
    mine = [Key(lane, 0) for lane in range(schedule.lanes)]
    sums.want(mine)
    factors = sums.factors if steps else ()
    return [jax.tree.map(lambda x: order.after(x, factors), sums.partial[key]) for key in mine]


@dataclass
class _Sums:
    """The partial results of one rank while a `reduce` runs."""

    steps: Sequence[PlannedRound]
    ranks: Ranks
    produce: Produce
    combine: Combine
    operands: Any
    order: Order
    wire: Wire | None = None
    partial: dict[Key, Any] = field(default_factory=dict)
    sent: list[Array] = field(default_factory=list)
    factors: Sequence[Array] = ()  # the arrays from which the last contributions were computed

    def want(self, keys: Sequence[Key]) -> bool:
        """Produce the missing contributions to these keys; return whether any was missing."""
        missing = [k for k in dict.fromkeys(keys) if k not in self.partial]
        if not missing:
            return False
        slots = [Slot(self.ranks.origin(key.offset), key.lane) for key in missing]
        if before := [*self.sent, *self.factors]:
            slots = [slot._replace(origin=self.order.after(slot.origin, before)) for slot in slots]
        values, self.factors = self.produce(self.operands, slots)
        for key, value in zip(missing, values, strict=True):
            self.partial[key] = jax.tree.map(partial(varying, axes=self.ranks.axes), value)
        return True

    def send_back(self, number: int) -> None:
        """Run the round of this number backward."""
        step = self.steps[number]
        if self.want([*chain(*step.arrived)]):  # the first products are tied too
            self.partial, self.operands = self.order.tied((self.partial, self.operands))
        sent = [message(self.partial, keys) for keys in step.arrived]
        self.sent = jax.tree.leaves(sent)
        # Three steps, because a factor is cut before it is multiplied.
        late = jax.tree.map(lambda x: self.order.late(x, steps=3), sent)
        name = f"round {len(self.steps) - number}"
        received = self.ranks.hops(name, step.moves, late, back=True, wire=self.wire)
        keys = [*chain(*step.sent)]
        # What a lane sends first is computed under the messages of the round before.
        ahead = [*chain(*self.steps[number - 1].arrived)] if number else []
        begun = {key.lane for key in (*self.partial, *keys)}
        ahead = [key for key in ahead if key.lane not in begun]
        self.want([*keys, *ahead])
        mine = self._apart({k: self.partial[k] for k in keys})
        early = {key: self.partial[key] for key in ahead}
        if early:
            received, mine, early = self.order.tied((received, mine, early))
        for key, value in zip(keys, unstacked(received), strict=True):
            mine[key] = self.combine(value, mine[key])
        mine |= early
        if number:  # round 0 is the last one backward; after it nothing is produced
            mine, self.operands = self.order.tied((mine, self.operands))
        self.partial.update(mine)

    def loop(self, first: int, steps: Sequence[PlannedRound]) -> None:
        """Run a stretch as a loop. `steps` are in backward order; the first one has number `first`.

        The round before the stretch sent raw contributions, which may be narrower than the sums.
        """
        (moves, sent, arrived), name = steps[0], f"rounds {first} to {first + len(steps) - 1}"
        every = [key for step in steps for key in chain(*step.sent)]
        stacks = None
        if not self.partial.keys().isdisjoint(every):  # sums from rounds along a different axis
            self.want(every)
            of_moves = zip(*(step.sent for step in steps), strict=True)
            stacks = [message(self.partial, of_move) for of_move in of_moves]

        def body(state: Any, step: tuple[Array, Any]) -> tuple[Any, None]:
            (moving, operands), (i, mine) = state, step
            received = self.ranks.hops(name, moves, moving, back=True, wire=self.wire)
            if mine is None:
                slots = [
                    Slot(self.ranks.origin(offset, m.axis, -i * m.shift), lane)
                    for m, keys in zip(moves, sent, strict=True)
                    for lane, offset in keys
                ]
                values = self.produce(operands, slots).values
                produced = dict(zip(chain(*sent), values, strict=True))
                mine = [message(produced, keys) for keys in sent]
                mine = jax.tree.map(partial(varying, axes=self.ranks.axes), mine)
            mine = self._apart(mine)
            summed = [self.combine(r, x) for r, x in zip(received, mine, strict=True)]
            # The next products wait for these sums; otherwise compilers would merge the products.
            return self.order.tied((summed, operands)), None

        moving = [message(self.partial, keys) for keys in arrived]
        turns = jnp.arange(len(steps), dtype=jnp.int32), stacks
        (moving, self.operands), _ = lax.scan(body, (moving, self.operands), turns)
        self.partial.update(zip(chain(*steps[-1].sent), unstacked(moving), strict=True))

    def _apart(self, mine: Any) -> Any:
        """Keep a single product from being fused with its addition, which waits for a message."""
        return self.order.tied(mine) if len(mine) == 1 else mine


def tour(
    path: Tour,
    ranks: Ranks,
    own: Sequence[Array],
    visit: Callable[[Carry, list[Shard]], tuple[Carry, Sequence[Array]]],
    carry: Carry,
    *,
    order: Order = _ANY,
    halves: bool = False,
) -> tuple[Carry, list[Array]]:
    """Gather shards, and bring the sum of all ranks' contributions for a shard to its owner.

    Args:
        path: the two gathers, which run in step.
        ranks, own, carry: as for `gather`.
        visit: `(carry, shards) -> (carry, contributions)`; for each shard, a contribution with as
            many rows.
        order: as for `gather`.
        halves: whether a rank visits its own shard in two halves of its rows: one under the first
            message, and one under the last, which no other work would hide.

    Returns:
        The carry of the last visit, and the sum for this rank's shard, a share for each lane.
    """
    own = [varying(x, ranks.axes) for x in own]
    held = {Key(lane, 0): x for lane, x in enumerate(own)}
    latest, sums = list[Key](), dict[Key, Array]()
    outward, homeward = planned(path.out), planned(path.back)[::-1]
    last = max(path.rounds, 1)
    of_own: list[list[Array]] = [[] for _ in own]
    for time in range(1, last + 1):
        out = outward[time - 1] if time <= len(outward) else None
        back = homeward[time - 1 - path.delay] if 0 < time - path.delay <= len(homeward) else None
        arriving: list[Array] = []
        received: list[Array] = []
        if out:
            sent = [message(held, keys) for keys in out.sent]
            arriving = ranks.hops(f"round {time}", out.moves, sent)
        if back:
            partial = [message(sums, keys) for keys in back.arrived]
            received = ranks.hops(f"round {time}, home", back.moves, partial, back=True)
            for key in chain(*back.arrived):
                del sums[key]
        shards = [Shard(held[k], ranks.origin(k.offset), k.lane, (k.offset,)) for k in latest]
        if time == 1 or (halves and time == last):
            shards += _own_shards(own, ranks, time == last if halves and last > 1 else None)
        if shards:
            carry, contributions = visit(carry, shards)
            contributions = [varying(x, ranks.axes) for x in contributions]
            sums |= zip(latest, contributions[: len(latest)], strict=True)
            for shard, x in zip(shards[len(latest) :], contributions[len(latest) :], strict=True):
                of_own[shard.lane].append(x)
        carry, arriving, received, sums, of_own = order.tied(
            (carry, arriving, received, sums, of_own)
        )
        for key, value in zip(chain(*back.sent) if back else (), chain(*received), strict=True):
            sums[key] = lax.add(value, sums[key]) if key in sums else value
        latest = list(chain(*out.arrived)) if out else []
        held |= zip(latest, chain(*arriving), strict=True)
    totals = [concatenated(contributions, 0) for contributions in of_own]
    for lane, total in enumerate(totals):
        if Key(lane, 0) in sums:
            totals[lane] = lax.add(sums[Key(lane, 0)], total)
    return carry, totals


def _own_shards(own: Sequence[Array], ranks: Ranks, second: bool | None) -> list[Shard]:
    """The first or second half of this rank's shares; with None, the whole shares."""
    shards = []
    for lane, x in enumerate(own):
        middle = len(x) if second is None else (len(x) + 1) // 2
        first, stop = (middle, len(x)) if second else (0, middle)
        if first < stop or not (first or second):
            shards.append(Shard(x[first:stop], ranks.origin(0), lane, (0,), first))
    return shards


def all_to_all(
    schedule: AllToAllSchedule, ranks: Ranks, blocks: Sequence[Array], *, wire: Wire | None = None
) -> list[Array]:
    """Carry every block to its rank.

    Args:
        schedule: which blocks are sent when.
        ranks: the ranks that run it, as the digits of the schedule.
        blocks: this rank's blocks; number d is for rank r + d.
        wire: how blocks are encoded: once, by the rank that has them. The rank that they are for
            decodes them. A rank also encodes and decodes the block for itself.

    Returns:
        The blocks for this rank; number d is from rank r - d.
    """
    first = blocks[0]
    if wire:
        blocks = [encode(wire, block) for block in blocks]
    held = {Key(0, d): varying(block, ranks.axes) for d, block in enumerate(blocks)}
    for number, step in enumerate(planned(schedule), 1):
        sent = [message(held, keys) for keys in step.sent]
        arriving = ranks.hops(f"round {number}", step.moves, sent)
        held.update(zip(chain(*step.sent), chain(*arriving), strict=True))
    arrived = [held[Key(0, d)] for d in range(schedule.size)]
    return [decode(wire, x, first.shape, first.dtype) for x in arrived] if wire else arrived
