"""Count the cost of a collective: rounds, messages, shards on the wire, additions.

`price` counts on the schedule itself. If there is a physical ring or torus, it counts on its links
too. Nothing is looked up by the name of an algorithm, so a new one is priced as soon as it is
written. `ringcoll.costs` turns counts into seconds.

Everything is counted in *shards*. A shard is 1/n of the full vector: the operand of `all_gather`,
the result of `psum_scatter`, or one block of `all_to_all`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from math import ceil, prod
from typing import Any, TypeVar

from ringcoll.costs.routes import Load, Places, UnevenRounds, on_torus
from ringcoll.costs.wire import Wire
from ringcoll.schedules.phases import Carries, Phase, phases
from ringcoll.schedules.registry import TOUR, ScheduleLike, build
from ringcoll.schedules.schedule import Schedule, ScheduleError
from ringcoll.schedules.tour import tour

Counted = TypeVar("Counted")


@dataclass(frozen=True, slots=True)
class Price:
    """The cost for one rank, counted in shards (a lane's share of a shard is a fraction).

    `messages` are the messages that a rank sends. `startups` are those that start one after the
    other. On a switch, a rank has one port, so these are all of its messages. On a physical ring or
    torus, a port is an axis and a direction, and messages through different ports start at the same
    time. `hops` are the links that the farthest message of each round passes, summed over the
    rounds; on a switch it is 0.

    `sent` is what leaves a rank. `raw` is the part of it in messages without a partial sum; these
    keep the operand's width, whatever the dtype of the sums. `link` is the load of the busiest
    link and direction, summed over the rounds. `additions` is what a rank adds.

    `uneven` are the rounds on a ring or torus in which some messages go farther than others. Their
    time is less than that of their hops plus that of their bytes.
    """

    rounds: int = 0
    messages: int = 0
    startups: int = 0
    hops: int = 0
    sent: Fraction = Fraction(0)
    raw: Fraction = Fraction(0)
    link: Fraction = Fraction(0)
    additions: Fraction = Fraction(0)
    uneven: tuple[UnevenRounds, ...] = ()


def price(
    collective: str,
    algorithm: ScheduleLike,
    shape: Sequence[int],
    network: Sequence[int] | None = None,
    closed: Sequence[bool] | None = None,
    places: Places | None = None,
) -> Price:
    """The cost of a collective for one rank, in shards (1/n of the full vector).

    A psum (and pmean, pmax, pmin, pbroadcast) costs a reduce-scatter and an
    all-gather, or for its stages: in a stage over p ranks, each gathers whole vectors and adds
    p-1 of them to its own. A ragged_all_to_all costs the exchange of its blocks; the exchange of
    its offsets is not counted. A "tour" costs its shards, and its sums, of as many numbers. They
    travel at the same time and share ports, so their times add up. (On a ring both have the same
    busiest link: a sum takes the way of its shard, one round later.)

    Args:
        collective: one of `algorithms.COLLECTIVES`, or "tour".
        algorithm: a name, schedule or function, as `algorithms.build` takes it.
        shape: the sizes of the axes, major first.
        network: the shape of a physical ring or torus; None is a switch, to which each
            rank has one port. Stages are routed along their digits of the ranks.
        closed: which axes of the network are rings; the others are lines. None: all are rings.
        places: the place of each rank on the network, for each group of ranks that runs the
            collective at the same time; None: the ranks fill the network in order.

    Raises:
        ValueError: as `algorithms.build`; or the network has the wrong number of ranks.

    >>> paid = costs.price("all_gather", "bruck", (8,))
    >>> paid.rounds, paid.messages, paid.sent
    (3, 3, Fraction(7, 1))
    >>> paid = costs.price("all_gather", "bruck", (8,), network=(8,))
    >>> paid.startups, paid.hops  # 1 + 2 + 4 links
    (3, 7)
    """
    built = build(collective, algorithm, tuple(shape))
    run = phases(collective, built)
    alone = _count_each(run, lambda schedule: price_backward(schedule, network, closed, places))
    paid = _total(*(_phase_price(run[i], one, i == 0) for i, one in enumerate(alone)))
    return replace(paid, rounds=tour(built).rounds) if collective == TOUR else paid


def _count_each(run: Sequence[Phase], count: Callable[[Schedule], Counted]) -> list[Counted]:
    """A count for every phase. A schedule that two phases share is counted only once."""
    counted: list[Counted] = []
    for phase in run:
        before = zip(run, counted, strict=False)
        same = [value for other, value in before if other.schedule is phase.schedule]
        counted.append(same[0] if same else count(phase.schedule))
    return counted


def _phase_price(phase: Phase, alone: Price, is_first: bool) -> Price:
    """The price of a phase; `alone` is the price of its schedule run backward."""
    shards = phase.shards
    adds = phase.carries in (Carries.SUMS, Carries.VECTORS)
    raw = alone.raw if phase.carries is Carries.SUMS else alone.sent
    if adds and not is_first:  # sums of an earlier stage; in a tour, a rank adds before it sends
        raw = Fraction(0)
    return replace(
        alone,
        sent=shards * alone.sent,
        raw=shards * raw,
        link=shards * alone.link,
        additions=shards * adds * alone.additions,
        uneven=tuple(
            UnevenRounds(times, tuple((links, shards * load) for links, load in reach))
            for times, reach in alone.uneven
        ),
    )


def _total(*prices: Price) -> Price:
    """The price of several schedules that run one after the other."""
    added: dict[str, Any] = {
        one.name: sum((getattr(paid, one.name) for paid in prices), getattr(Price(), one.name))
        for one in fields(Price)
    }
    return Price(**added)


def wire_bytes(
    collective: str,
    algorithm: ScheduleLike,
    shape: Sequence[int],
    shard_elements: float,
    itemsize: int,
    accumulate_itemsize: int | None = None,
    wire: Wire | None = None,
) -> float:
    """The bytes that leave one rank.

    With a wider `accumulate_dtype`, messages of raw contributions keep the operand's dtype, and
    messages with a partial sum have the wider one. The gather after a reduce-scatter has the
    operand's dtype. With a wire, all messages hold codes and scales.

    Args:
        collective, algorithm, shape: as for `price`.
        shard_elements: elements in 1/n of the full vector.
        itemsize: bytes of an element of the operand.
        accumulate_itemsize: bytes of an element of a partial sum; None: the operand's.
        wire: what messages hold in place of elements. This assumes that each shard is one message,
            or that a lane's share of it has whole blocks.

    Raises:
        ValueError: as `price`.

    >>> costs.wire_bytes("psum", "ring", (4,), 100, itemsize=2)
    1200.0
    >>> costs.wire_bytes("psum", "ring", (4,), 100, itemsize=2, accumulate_itemsize=4)
    1600.0
    >>> costs.wire_bytes("psum", "direct", (4,), 1024, itemsize=2, wire=ringcoll.Wire("int8"))
    6336.0
    """
    paid = price(collective, algorithm, shape)
    if wire is not None:
        return float(paid.sent * wire.nbytes(ceil(shard_elements)))
    wide = itemsize if accumulate_itemsize is None else accumulate_itemsize
    return float((paid.raw * itemsize + (paid.sent - paid.raw) * wide) * shard_elements)


def price_backward(
    schedule: Schedule,
    network: Sequence[int] | None = None,
    closed: Sequence[bool] | None = None,
    places: Places | None = None,
) -> Price:
    """The cost for one rank of a schedule that runs backward, as a reduce-scatter.

    Forward it costs the same, but adds nothing and everything is raw. Backward, every message
    goes the opposite way.

    Args:
        schedule: a schedule of any kind.
        network: as for `price`: on a physical ring or torus, a shift of s loads s links.
        closed, places: as for `price`.

    Raises:
        ScheduleError: `network` does not have as many ranks as the schedule, or `closed` not as
            many axes as the network.
    """
    if network is not None and places is None and prod(network) != schedule.size:
        raise ScheduleError(f"network {tuple(network)} is not of {schedule.size} ranks")
    if network is not None and closed is not None and len(closed) != len(network):
        raise ScheduleError(f"closed {tuple(closed)} is not of the axes of {tuple(network)}")
    messages, shards = 0, 0
    added: set[tuple[int, int]] = set()
    raw = 0
    # Backward, a contribution is raw until something is added to it.
    for moves in reversed(schedule.rounds):
        for move in moves:
            messages, shards = messages + 1, shards + len(move.offsets)
            if added.isdisjoint((move.lane, a) for a in schedule.arrivals(move)):
                raw += len(move.offsets)
        added |= {(move.lane, o) for move in moves for o in move.offsets}
    sent = Fraction(shards, schedule.lanes)
    load = Load(messages, 0, sent)
    if network is not None:
        rings = None if closed is None else tuple(closed)
        load = on_torus(schedule, tuple(network), rings, places)
    return Price(
        rounds=len(schedule.rounds),
        messages=messages,
        startups=load.startups,
        hops=load.hops,
        sent=sent,
        raw=Fraction(raw, schedule.lanes),
        link=load.link,
        additions=sent,
        uneven=load.uneven,
    )
