"""Run a schedule: `gather` forward, `reduce` backward; `tour` does both in step.

A ring that multiplies each shard while the next one travels is nine lines:

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
the loop did with a shard is now a function `visit(carry, parts)`:

    held = arrived = {0: x}                         # by offset: r holds the shard of r - offset
    for moves in schedule.rounds:
        arriving = send(moves, held)                # the next shards travel
        carry = visit(carry, arrived)               # while these are multiplied
        held, arrived = held | arriving, arriving
    return visit(carry, arrived)

`reduce` runs the list backward. A rank's contributions to a sum are produced one round ahead, while
the sums of the round before travel.

What makes programs fast is beside this file: `looped` runs a long stretch of rounds as a loop, or
computes one half while the other travels; `barriers` keep work and messages in order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import jax
from jax import Array, lax

from ringcoll.runtime import looped
from ringcoll.runtime.barriers import NO_WORK, Order
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.parts import Key, Layout, Part, message, opened, planned, toured
from ringcoll.runtime.slicing import joined, split
from ringcoll.runtime.value_types import tree_varying
from ringcoll.runtime.wire import Wire, decode, encode
from ringcoll.schedules.schedule import AllToAllSchedule, Schedule, stretches
from ringcoll.schedules.tour import Tour

#: A stretch of more rounds than this is run as a loop, which keeps compile time and program
#: size independent of n. On CPU both forms are equally fast. Up to here both compile in less than a
#: second, and without a loop the compiler can overlap rounds.
UNROLL_UP_TO = 24

Carry = TypeVar("Carry")
Combine = Callable[[Any, Any], Any]
Visit = Callable[[Carry, list[Part]], Carry]
Produce = Callable[[list[Part]], Sequence[Any]]


def gather(
    schedule: Schedule,
    ranks: Ranks,
    layout: Layout,
    x: Any,
    visit: Visit[Carry],
    carry: Carry,
    order: Order = NO_WORK,
    wire: Wire | None = None,
) -> Carry:
    """Bring the shard of every rank to every rank, and visit each as it arrives.

    Args:
        schedule: what is sent when.
        ranks: the ranks that run it, as the digits of the schedule.
        layout: how the lanes of the schedule divide a shard.
        x: this rank's shard: an array, or a pytree of arrays.
        visit: `(carry, parts) -> carry`, called with the parts of one round (first with this
            rank's own) while those of the next round travel.
        carry: the carry for the first visit; its shapes, dtypes and types must not change.
        order: how visits and messages are ordered, if visits do work that can hide messages.
        wire: what messages hold in place of floats. A shard is encoded once, by its owner.

    Returns:
        The carry that the last visit returned.
    """
    steps, own = planned(schedule), split(x, layout.cut, [count for _, count in layout.rows])
    if wire:
        own, visit = _encoded_once(wire, own, visit)
    held = {(lane, 0): tree_varying(share, ranks.axes) for lane, share in enumerate(own)}
    latest = [*held]
    for start, stop in stretches(schedule, 0 if order.always_loops else UNROLL_UP_TO):
        step = steps[start]
        sent = [message(held, keys) for keys in step.sent]
        if stop - start > 1:
            name, run = f"rounds {start + 1} to {stop}", steps[start:stop]
            carry, arriving = looped.gather(name, run, ranks, layout, sent, visit, carry)
        else:
            arriving = ranks.hops(f"round {stop}", step.moves, sent)
            carry = visit(carry, _parts(held, latest, ranks, layout))  # while they travel
        carry, arriving = order.barrier((carry, arriving))
        latest = [*chain(*steps[stop - 1].arrived)]
        held |= opened(arriving, steps[stop - 1].arrived)
    return visit(carry, _parts(held, latest, ranks, layout))


def reduce(
    schedule: Schedule,
    ranks: Ranks,
    layout: Layout,
    produce: Produce,
    combine: Combine,
    order: Order = NO_WORK,
) -> list[Any]:
    """Combine, for every rank, the contributions of all ranks to its shard.

    This is the gather run backward: a partial result goes the path of its shard backward, and
    every rank on that path combines its own contribution with it.

    Args:
        schedule: the gather.
        ranks, layout: as for `gather`.
        produce: `parts -> contributions`, called with all parts that a round needs, while the
            messages of that round travel; each part is asked for once.
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
        # The zero of the latest round: so the work waits for the sums of that round.
        wanted = [
            Part(order.depend_on(ranks.origin(offset), zero), lane, layout.rows[lane])
            for lane, offset in missing
        ]
        values = produce(wanted) if wanted else ()
        sums.update(zip(missing, tree_varying([*values], ranks.axes), strict=True))

    if steps:
        contribute(chain(*steps[0].sent))
        sums, zero = order.barrier((sums, zero))
    forward = stretches(schedule, 0 if order.always_loops else UNROLL_UP_TO)
    # The stretches of the gather, from the last; the first round of each is written out.
    for start, stop in [(count - stop, count - start) for start, stop in reversed(forward)]:
        step, following = steps[start], steps[start + 1 : stop]
        received = ranks.hops(f"round {start + 1}", step.moves, _pop_messages(sums, step.sent))
        keys, ahead = [*chain(*step.arrived)], steps[start + 1].sent if start + 1 < count else ()
        contribute([*keys, *chain(*ahead)])  # while they travel
        mine = order.barrier_if_single({key: sums[key] for key in keys})
        for key, value in opened(received, step.arrived):
            mine[key] = combine(value, mine[key])
        sums, zero = order.barrier((sums | mine, zero))
        if following:
            name, sent = f"rounds {start + 2} to {stop}", _pop_messages(sums, following[0].sent)
            work = layout, produce, combine, order
            last = looped.reduce(name, following, ranks, sent, *work, zero)
            sums |= opened(last, following[-1].arrived)
    own = [(lane, 0) for lane in range(schedule.lanes)]
    contribute(own)  # if nothing arrived, as on one rank
    return [sums[key] for key in own]


def tour(
    path: Tour,
    ranks: Ranks,
    layout: Layout,
    x: Any,
    visit: Callable[[Carry, list[Part]], tuple[Carry, Sequence[Any]]],
    carry: Carry,
    order: Order = NO_WORK,
    *,
    halved: bool = False,
) -> tuple[Carry, list[Any]]:
    """Gather shards, and bring the sum of all ranks' contributions for a shard to its owner.

    Args:
        path: the two gathers, which run in step.
        ranks, layout, x, carry: as for `gather`.
        visit: `(carry, parts) -> (carry, contributions)`; a contribution for each part.
        order: as for `gather`.
        halved: whether a rank's own shard is cut into halves: one is visited under the first
            message, and one under the last, which no other work would hide.

    Returns:
        The carry of the last visit, and the sum for this rank's shard, a share for each lane.
    """
    steps = toured(path)
    shares = split(x, layout.cut, [count for _, count in layout.rows])
    held = {(lane, 0): tree_varying(share, ranks.axes) for lane, share in enumerate(shares)}
    own = _parts(held, [*held], ranks, layout)
    visits: list[list[Part]] = [own, *[[]] * (len(steps) - 1)]  # of this rank's own shard
    if halved and len(steps) > 1:
        visits[0], visits[-1] = _halves(own, layout.dim)
    latest, sums = list[Key](), dict[Key, Any]()
    mine: list[list[Any]] = [[] for _ in own]
    for time, ((out, home), of_own) in enumerate(zip(steps, visits, strict=True), 1):
        sent = [message(held, keys) for keys in out.sent]
        arriving = ranks.hops(f"round {time}", out.moves, sent)
        returning = ranks.hops(f"round {time}, home", home.moves, _pop_messages(sums, home.sent))
        if parts := _parts(held, latest, ranks, layout) + of_own:  # while they travel
            carry, contributions = visit(carry, parts)
            contributions = tree_varying([*contributions], ranks.axes)
            sums |= zip(latest, contributions, strict=False)  # those of its own shard are last
            for part, x in zip(of_own, contributions[len(latest) :], strict=True):
                mine[part.lane].append(x)
        carry, arriving, returning, sums, mine = order.barrier(
            (carry, arriving, returning, sums, mine)
        )
        for key, value in opened(returning, home.arrived):
            sums[key] = added(value, sums[key]) if key in sums else value
        latest = [*chain(*out.arrived)]
        held |= opened(arriving, out.arrived)
    totals = [joined(contributions, layout.dim) for contributions in mine]
    pairs = zip((sums.get(key) for key in ((part.lane, 0) for part in own)), totals, strict=True)
    return carry, [
        total if returned is None else added(returned, total) for returned, total in pairs
    ]


def exchange(
    schedule: AllToAllSchedule,
    ranks: Ranks,
    layout: Layout,
    blocks: Sequence[Any],
    visit: Visit[Carry],
    carry: Carry,
    wire: Wire | None = None,
) -> Carry:
    """Carry every block to its rank, and visit each as it arrives.

    Args:
        schedule: which blocks are sent when.
        ranks, visit, carry, wire: as for `gather`; offset d of a part is that of the block
            from rank r - d. The first visit gets the block for this rank itself.
        layout: where the blocks are that arrive.
        blocks: this rank's blocks; number d is for rank r + d.

    Returns:
        The carry that the last visit returned.
    """
    steps = planned(schedule)
    if wire:
        blocks, visit = _encoded_once(wire, blocks, visit)
    held = {(0, d): tree_varying(block, ranks.axes) for d, block in enumerate(blocks)}
    last = {key: number for number, step in enumerate(steps) for key in chain(*step.sent)}
    latest = [key for key in held if key not in last]
    for number, step in enumerate(steps):
        sent = [message(held, keys) for keys in step.sent]
        arriving = ranks.hops(f"round {number + 1}", step.moves, sent)
        if latest:
            carry = visit(carry, _parts(held, latest, ranks, layout))  # while they travel
        held |= opened(arriving, step.sent)  # a block keeps its key on the way
        latest = [key for key in chain(*step.sent) if last[key] == number]
    return visit(carry, _parts(held, latest, ranks, layout))


def added(received: Any, mine: Any) -> Any:
    """The sum of two arrays, or of two pytrees of arrays."""
    return jax.tree.map(lax.add, received, mine)


def _parts(held: Mapping[Key, Any], keys: Iterable[Key], ranks: Ranks, layout: Layout):
    """What is held under these keys, as a visit gets it."""
    return [
        Part(ranks.origin(offset), lane, layout.rows[lane], (offset,), held[lane, offset])
        for lane, offset in keys
    ]


def _pop_messages(sums: dict[Key, Any], sent: Sequence[Sequence[Key]]) -> list[Any]:
    """The messages of partial sums that a round sends; the rank does not keep these."""
    messages = [message(sums, keys) for keys in sent]
    for key in chain(*sent):
        del sums[key]
    return messages


def _halves(parts: Sequence[Part], dim: int) -> tuple[list[Part], list[Part]]:
    """The first halves of the rows of some parts, and the second ones that are not empty."""
    first, second = list[Part](), list[Part]()
    for part in parts:
        start, count = part.rows
        middle = (count + 1) // 2
        of_first, of_second = split(part.value, dim, (middle, count - middle))
        first.append(replace(part, value=of_first, rows=(start, middle)))
        if middle < count:
            rest = (start + middle, count - middle)
            second.append(replace(part, value=of_second, rows=rest))
    return first, second


def _encoded_once(
    wire: Wire, own: Sequence[Array], visit: Visit[Carry]
) -> tuple[list[Array], Visit[Carry]]:
    """This rank's shares (or blocks) and a visit, for messages that are encoded by their owner.

    The visit gets decoded parts, also of the rank's own shard, so that all ranks use the same
    values.
    """
    # Without a barrier, XLA:CPU computes x again to decode it here, and may round differently.
    # Codes may be computed again: the same x gives the same codes.
    codes = [encode(wire, lax.optimization_barrier(x)) for x in own]

    def decoded(part: Part) -> Part:
        like = own[part.lane]
        return replace(part, value=decode(wire, part.value, like.shape, like.dtype))

    return codes, lambda carry, parts: visit(carry, [*map(decoded, parts)])
