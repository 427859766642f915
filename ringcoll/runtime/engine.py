"""Run a schedule: `gather` forward, `reduce` backward; `tour` does both in step.

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

`reduce` runs the list backward. A rank's contributions to a sum are produced one round ahead, while
the sums of the round before travel.

What makes programs fast is beside this file: `rolled` runs a long stretch of rounds as a loop,
`barriers` keep work and messages in order, `turns` computes one half while the other travels.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import jax
from jax import lax

from ringcoll.runtime import rolled
from ringcoll.runtime.barriers import NO_WORK, Order
from ringcoll.runtime.contributions import (
    Key,
    PlannedRound,
    Shard,
    Slot,
    message,
    planned,
    unstacked,
)
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.slicing import joined
from ringcoll.runtime.value_types import tree_varying
from ringcoll.schedules.schedule import AllToAllSchedule, Schedule, stretches
from ringcoll.schedules.tour import Tour

#: A stretch of more rounds than this is run as a loop, which keeps compile time and program
#: size independent of n. On CPU both forms are equally fast. Up to here both compile in less than a
#: second, and without a loop the compiler can overlap rounds.
UNROLL_UP_TO = 24

Carry = TypeVar("Carry")
Combine = Callable[[Any, Any], Any]
Visit = Callable[[Carry, list[Shard]], Carry]
Produce = Callable[[list[Slot]], Sequence[Any]]


def gather(
    schedule: Schedule,
    ranks: Ranks,
    own: Sequence[Any],
    visit: Visit[Carry],
    carry: Carry,
    order: Order = NO_WORK,
) -> Carry:
    """Bring the shard of every rank to every rank, and visit each as it arrives.

    Args:
        schedule: what is sent when.
        ranks: the ranks that run it, as the digits of the schedule.
        own: this rank's shard, a share for each lane: an array, or a pytree of arrays.
        visit: `(carry, shards) -> carry`, called with the shards of one round (first with
            this rank's own) while the shards of the next round travel.
        carry: the carry for the first visit; its shapes, dtypes and types must not change.
        order: how visits and messages are ordered, if visits do work that can hide messages.

    Returns:
        The carry that the last visit returned.
    """
    steps = planned(schedule)
    held = {Key(lane, 0): tree_varying(x, ranks.axes) for lane, x in enumerate(own)}
    latest = list(held)
    for start, stop in stretches(schedule, 0 if order.always_loops else UNROLL_UP_TO):
        step = steps[start]
        sent = [message(held, keys) for keys in step.sent]
        if stop - start > 1:
            name, run = f"rounds {start + 1} to {stop}", steps[start:stop]
            carry, arriving = rolled.gather(name, run, ranks, sent, visit, carry)
        else:
            arriving = ranks.hops(f"round {stop}", step.moves, sent)
            carry = visit(carry, _shards(held, latest, ranks))  # while they travel
        carry, arriving = order.barrier((carry, arriving))
        latest = [*chain(*steps[stop - 1].arrived)]
        held.update(zip(latest, unstacked(arriving), strict=True))
    return visit(carry, _shards(held, latest, ranks))


def reduce(
    schedule: Schedule,
    ranks: Ranks,
    produce: Produce,
    combine: Combine,
    order: Order = NO_WORK,
) -> list[Any]:
    """Combine, for every rank, the contributions of all ranks to its shard.

    This is the gather run backward: a partial result goes the path of its shard backward, and
    every rank on that path combines its own contribution with it.

    Args:
        schedule: the gather.
        ranks: the ranks that run it, as the digits of the schedule.
        produce: `slots -> contributions`, called with all slots that a round needs, while the
            messages of that round travel; each slot is asked for once.
        combine: `(received, mine) -> partial`, of arrays or of pytrees; it must be associative, at
            least approximately. It sets the dtype of partial results. Contributions travel in the
            dtype of `produce`.
        order: how work and messages are ordered, if `produce` does work that can hide messages.

    Returns:
        This rank's shard, a share for each lane.
    """
    steps, sums = planned(schedule, back=True), dict[Key, Any]()
    zero, count = order.zero(), len(steps)

    def contribute(keys: Iterable[Key]) -> None:
        missing = [key for key in dict.fromkeys(keys) if key not in sums]
        slots = [Slot(order.depend_on(ranks.origin(k.offset), zero), k.lane) for k in missing]
        values = produce(slots) if slots else []
        sums.update(
            zip(missing, (tree_varying(value, ranks.axes) for value in values), strict=True)
        )

    if steps:
        contribute(chain(*steps[0].sent))
        sums, zero = order.barrier((sums, zero))
    forward = stretches(schedule, 0 if order.always_loops else UNROLL_UP_TO)
    for start, stop in [(count - stop, count - start) for start, stop in reversed(forward)]:
        step, following = steps[start], steps[start + 1 : stop]
        received = ranks.hops(f"round {start + 1}", step.moves, _pop_messages(sums, step))
        keys, ahead = [*chain(*step.arrived)], steps[start + 1].sent if start + 1 < count else ()
        contribute([*keys, *chain(*ahead)])  # while they travel
        mine = order.barrier_if_single({key: sums[key] for key in keys})
        for key, value in zip(keys, unstacked(received), strict=True):
            mine[key] = combine(value, mine[key])
        sums, zero = order.barrier((sums | mine, zero))
        if following:
            name, sent = f"rounds {start + 2} to {stop}", _pop_messages(sums, following[0])
            last = rolled.reduce(name, following, ranks, sent, produce, combine, order, zero)
            sums.update(zip(chain(*following[-1].arrived), unstacked(last), strict=True))
    own = [Key(lane, 0) for lane in range(schedule.lanes)]
    contribute(own)
    return [sums[key] for key in own]


def tour(
    path: Tour,
    ranks: Ranks,
    own: Sequence[Any],
    visit: Callable[[Carry, list[Shard]], tuple[Carry, Sequence[Any]]],
    carry: Carry,
    order: Order = NO_WORK,
    *,
    halves_along: int | None = None,
) -> tuple[Carry, list[Any]]:
    """Gather shards, and bring the sum of all ranks' contributions for a shard to its owner.

    Args:
        path: the two gathers, which run in step.
        ranks, own, carry: as for `gather`.
        visit: `(carry, shards) -> (carry, contributions)`; a contribution for each shard.
        order: as for `gather`.
        halves_along: a dimension along which a rank's own shard is cut into halves: one is visited
            under the first message, and one under the last, which no other work would hide. A
            contribution has as many rows there. None: the own shard is whole.

    Returns:
        The carry of the last visit, and the sum for this rank's shard, a share for each lane.
    """
    held = {Key(lane, 0): tree_varying(x, ranks.axes) for lane, x in enumerate(own)}
    own_keys, latest, sums = [*held], list[Key](), dict[Key, Any]()
    outward, homeward = planned(path.out), planned(path.back, back=True)
    last = max(path.rounds, 1)
    of_own: list[list[Any]] = [[] for _ in own]
    for time in range(1, last + 1):
        out = outward[time - 1] if time <= len(outward) else None
        back = homeward[time - 1 - path.delay] if 0 < time - path.delay <= len(homeward) else None
        arriving, received = list[Any](), list[Any]()
        if out:
            sent = [message(held, keys) for keys in out.sent]
            arriving = ranks.hops(f"round {time}", out.moves, sent)
        if back:
            partial = _pop_messages(sums, back)
            received = ranks.hops(f"round {time}, home", back.moves, partial)
        shards = _shards(held, latest, ranks)
        if halves_along is not None and last > 1 and time in (1, last):
            of_rank = _shards(held, own_keys, ranks)
            shards += [half for x in of_rank for half in _half(x, halves_along, time == last)]
        elif time == 1:
            shards += _shards(held, own_keys, ranks)
        if shards:
            carry, contributions = visit(carry, shards)
            contributions = [tree_varying(x, ranks.axes) for x in contributions]
            sums |= zip(latest, contributions[: len(latest)], strict=True)
            for shard, x in zip(shards[len(latest) :], contributions[len(latest) :], strict=True):
                of_own[shard.lane].append(x)
        carry, arriving, received, sums, of_own = order.barrier(
            (carry, arriving, received, sums, of_own)
        )
        home = chain(*back.arrived) if back else ()
        for key, value in zip(home, unstacked(received), strict=True):
            sums[key] = added(value, sums[key]) if key in sums else value
        latest = [*chain(*out.arrived)] if out else []
        held |= zip(latest, unstacked(arriving), strict=True)
    totals = [joined(contributions, halves_along or 0) for contributions in of_own]
    pairs = zip((sums.get(key) for key in own_keys), totals, strict=True)
    return carry, [
        total if returned is None else added(returned, total) for returned, total in pairs
    ]


def _pop_messages(sums: dict[Key, Any], step: PlannedRound) -> list[Any]:
    """The messages of partial sums that a round sends; the rank does not keep these."""
    sent = [message(sums, keys) for keys in step.sent]
    for key in chain(*step.sent):
        del sums[key]
    return sent


def _half(shard: Shard, dim: int, is_second: bool) -> list[Shard]:
    """The first half of the rows of a shard; or the second one, or nothing if that is empty."""
    rows = jax.tree.leaves(shard.value)[0].shape[dim]
    middle = (rows + 1) // 2
    start, stop = (middle, rows) if is_second else (0, middle)
    if start == stop and is_second:
        return []
    value = jax.tree.map(lambda x: lax.slice_in_dim(x, start, stop, axis=dim), shard.value)
    return [shard._replace(value=value, first=start)]


def added(received: Any, mine: Any) -> Any:
    """The sum of two arrays, or of two pytrees of arrays."""
    return jax.tree.map(lax.add, received, mine)


def exchange(
    schedule: AllToAllSchedule,
    ranks: Ranks,
    blocks: Sequence[Any],
    visit: Visit[Carry],
    carry: Carry,
    order: Order = NO_WORK,
) -> Carry:
    """Carry every block to its rank, and visit each as it arrives.

    Args:
        schedule: which blocks are sent when.
        ranks, visit, carry, order: as for `gather`; offset d of a shard is that of the block from
            rank r - d. The first visit gets the block for this rank itself.
        blocks: this rank's blocks; number d is for rank r + d.

    Returns:
        The carry that the last visit returned.
    """
    steps = planned(schedule)
    held = {Key(0, d): tree_varying(block, ranks.axes) for d, block in enumerate(blocks)}
    last = {key: number for number, step in enumerate(steps) for key in chain(*step.sent)}
    latest = [key for key in held if key not in last]
    for number, step in enumerate(steps):
        sent = [message(held, keys) for keys in step.sent]
        arriving = ranks.hops(f"round {number + 1}", step.moves, sent)
        if latest:
            carry = visit(carry, _shards(held, latest, ranks))  # while they travel
        carry, arriving = order.barrier((carry, arriving))
        held.update(zip(chain(*step.sent), unstacked(arriving), strict=True))
        latest = [key for key in chain(*step.sent) if last[key] == number]
    return visit(carry, _shards(held, latest, ranks))


def _shards(held: Mapping[Key, Any], keys: Iterable[Key], ranks: Ranks) -> list[Shard]:
    """The shards under these keys, as a visit gets them."""
    return [Shard(held[k], ranks.origin(k.offset), k.lane, (k.offset,)) for k in keys]
