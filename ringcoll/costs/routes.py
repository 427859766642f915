"""Where the messages of a schedule go: over a ring or torus, link by link.

On a torus, a message goes along one axis after the other, the shorter way. If both ways are equally
short, the whole message goes one way. (The routes of TPUs are set up before a program runs, one
dimension after the other: Zu et al., "Resiliency at Scale: Managing Google's TPUv4 Machine Learning
Supercomputer", NSDI 2024. So a message has one route. `python -m benchmarks referee` compares these
prices with SimGrid's torus, which does the same.) We assume that this one way is forward, to higher
places.

If the moves of two rounds have equal shifts and equal numbers of offsets, the rounds load a network
in the same way. Each such kind of round is routed once, so a ring of 65,536 ranks takes only
milliseconds.
"""

from collections import Counter
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ringcoll.costs.slices import along
from ringcoll.schedules.schedule import Schedule, ScheduleError

#: The kind of a round: the shift, the axis and the number of offsets of each move. Rounds of one
#: kind load a network in the same way.
RoundKind = tuple[tuple[int, int, int], ...]
#: The place of each rank on a network, for each group of ranks.
Places = tuple[tuple[tuple[int, ...], ...], ...]
#: The most messages of a round that are routed; more would take gigabytes.
MOST_MESSAGES = 2**22
#: The most distances of a round that are looked at. If there are more, these are spread evenly.
MOST_DISTANCES = 16


class UnevenRounds(NamedTuple):
    """A kind of round whose messages pass different numbers of links; there are `times` of them.

    The bytes of near messages travel while far ones still pass their links. `reach` has pairs: a
    number of links, and the shards on the busiest link from messages that pass at least that many.
    """

    times: int
    reach: tuple[tuple[int, Fraction], ...]


class Load(NamedTuple):
    """Messages that start one after the other, links passed, and shards on the busiest link.

    Some of the rounds that it sums up may be uneven.
    """

    startups: int
    hops: int
    link: Fraction
    uneven: tuple[UnevenRounds, ...] = ()


def on_torus(
    schedule: Schedule,
    network: tuple[int, ...],
    closed: tuple[bool, ...] | None = None,
    places: Places | None = None,
) -> Load:
    """The load of a schedule on a physical ring, torus or grid, summed over its rounds.

    Args:
        schedule: a schedule of any kind.
        network: the sizes of the network's axes.
        closed: which of them are rings; None: all. The others are lines, on which
            `slices.along` places the ranks.
        places: the place of each rank, for each group of ranks that runs the schedule at the same
            time; None: there is one group, which fills the network in order.

    Startups of a round are the most messages that leave a rank through one port (an axis and a
    direction); messages through other ports start at the same time. Hops of a round are the links
    that its farthest message passes. All messages of a round start before their bytes travel.

    Raises:
        ScheduleError: it cannot be routed: see `MOST_MESSAGES`.
    """
    rings = closed or (True,) * len(network)
    startups, hops, shards, uneven = 0, 0, 0, []
    for kind, times in _kinds(schedule).items():
        starts, reach = _round_on_torus(schedule, kind, network, rings, places)
        (_, most), (farthest, _) = reach[0], reach[-1]
        startups, hops, shards = (
            total + times * one
            for total, one in zip((startups, hops, shards), (starts, farthest, most), strict=True)
        )
        if len(reach) > 1:
            loads = tuple((links, Fraction(load, schedule.lanes)) for links, load in reach)
            uneven.append(UnevenRounds(times, loads))
    return Load(startups, hops, Fraction(shards, schedule.lanes), tuple(uneven))


def _kinds(schedule: Schedule) -> Counter[RoundKind]:
    """The kinds of rounds of a schedule, and how many rounds each has."""
    return Counter(
        tuple((move.shift, move.axis, len(move.offsets)) for move in moves)
        for moves in schedule.rounds
    )


def _messages(schedule: Schedule, kind: RoundKind, ranks: np.ndarray) -> tuple[np.ndarray, ...]:
    """The messages of these ranks in a round: sources, targets, and numbers of shards."""
    if len(kind) * len(ranks) > MOST_MESSAGES:
        raise ScheduleError(
            f"{len(ranks)} ranks that send {len(kind)} messages each in a round are too many to "
            "be routed; price them on a switch, or on a network of the schedule's own shape"
        )
    to = [schedule.step(ranks, axis, shift) for shift, axis, _ in kind]
    shards = [number for *_, number in kind]
    return (
        np.tile(ranks, len(kind)),
        np.concatenate([ranks[:0], *to]),
        np.repeat(shards, len(ranks)),
    )


def _round_on_torus(
    schedule: Schedule,
    kind: RoundKind,
    network: tuple[int, ...],
    closed: tuple[bool, ...],
    places: Places | None,
) -> tuple[int, list[tuple[int, int]]]:
    """Startups; and `UnevenRounds.reach`, with the load of the busiest link in lane shares."""
    # On a torus of its own shape, what one rank sends is what all send.
    alike = schedule.shape == network and all(closed) and places is None
    ranks = np.arange(1 if alike else schedule.size)
    source, target, shards = _messages(schedule, kind, ranks)
    if places is None:
        here, there = (_places(r, network, closed) for r in (source, target))
    else:
        at = np.array(places)  # [groups, ranks, axes]
        here, there = (np.concatenate(at[:, r]).T for r in (source, target))
        ranks = np.arange(schedule.size * len(at))
        source = np.concatenate([source + schedule.size * group for group in range(len(at))])
        shards = np.tile(shards, len(at))
    ways, far = [], np.zeros(len(source), int)
    starts = np.zeros((2, len(network), len(ranks)), int)  # ahead, back
    for axis, length in enumerate(network):  # one dimension after the other
        ahead = (there[axis] - here[axis]) % length
        back = -ahead % length
        longer = ahead - back if closed[axis] else here[axis] - there[axis]
        way = (longer > 0).astype(int)
        far += np.where(way == 1, back, ahead)
        first = (ahead > 0) & (here[:axis] == there[:axis]).all(0)
        np.add.at(starts, (way[first], axis, source[first]), 1)
        ways += [(axis, sign, hops * (way == sign)) for sign, hops in enumerate([ahead, back])]
    reach: list[tuple[int, int]] = []
    for links in _some(np.unique(far).tolist()):
        those = far >= links
        at, loads = here[:, those].copy(), [0]
        for axis, sign, hops in ways:
            passed, load = hops[those], shards[those]
            if alike:  # a link is passed by as many messages as one message passes links
                loads.append(int(passed @ load))
            else:
                at[axis] = (here[axis, those] - sign * passed) % network[axis]
                loads.append(_busiest_link(network, axis, at, passed, load))
                at[axis] = there[axis, those]
        if reach and reach[-1][1] == max(loads):  # the near messages add no load
            reach.pop()
        reach.append((links, max(loads)))
    return int(starts.max()), reach or [(0, 0)]


def _some(numbers: list[int]) -> list[int]:
    """At most `MOST_DISTANCES` of the numbers, spread evenly, with the first and the last."""
    step = max(-(-(len(numbers) - 1) // (MOST_DISTANCES - 1)), 1)
    return [*numbers[:-1:step], *numbers[-1:]]


def _places(ranks: np.ndarray, network: tuple[int, ...], closed: tuple[bool, ...]) -> np.ndarray:
    """The places of ranks, with a row for each axis."""
    numbers = np.unravel_index(ranks, network)
    laid = [np.array(along(n, is_ring)) for n, is_ring in zip(network, closed, strict=True)]
    return np.array([places[number] for places, number in zip(laid, numbers, strict=True)])


def _busiest_link(
    network: tuple[int, ...], axis: int, at: np.ndarray, hops: np.ndarray, load: np.ndarray
) -> int:
    """The load of the busiest link along an axis; messages start at `at` and pass `hops` links."""
    # Twice as long, so that messages which pass the end of the axis are not cut.
    twice = [2 * n if i == axis else n for i, n in enumerate(network)]
    change = np.zeros(twice, int)
    np.add.at(change, tuple(at), load)
    end = at.copy()
    end[axis] += hops
    np.add.at(change, tuple(end), -load)
    once, again = np.split(change.cumsum(axis), 2, axis)
    return int((once + again).max())
