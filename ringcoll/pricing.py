"""What a collective costs in counts: rounds, messages, shards on the wire, additions.

`price` reads the counts off the schedule, with the links of a physical ring or torus if
there is one; nothing is looked up by the name of an algorithm, so a new one is priced as
soon as it is written. `ringcoll.cost` makes seconds of them.

Everything is counted in *shards*: 1/n of the full vector, which is the operand of
`all_gather`, the result of `psum_scatter`, and one block of `all_to_all`.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from math import prod

import numpy as np

from ringcoll.algorithms import Algorithm, Stages, build
from ringcoll.schedule import Move, Round, Schedule, ScheduleError, product


@dataclass(frozen=True, slots=True)
class Price:
    """What one rank pays, counted in shards (a lane's share of a shard is a fraction).

    `messages` are those that a rank sends; `startups` as many of them as start one after
    the other: all on a switch, to which a rank has one port; on a physical ring or torus,
    in each round the most that leave by one port, which is an axis and a direction.
    `sent` is what leaves a rank; `raw` the part of it in messages without a partial sum,
    which travel in the operand's own width whatever sums are kept in; `link` the load of
    the busiest link and direction, summed over the rounds; `additions` what a rank adds.
    """

    rounds: int = 0
    messages: int = 0
    startups: int = 0
    sent: Fraction = Fraction(0)
    raw: Fraction = Fraction(0)
    link: Fraction = Fraction(0)
    additions: Fraction = Fraction(0)


def price(
    collective: str,
    algorithm: Algorithm,
    shape: Sequence[int],
    network: Sequence[int] | None = None,
) -> Price:
    """What one rank pays for a collective, in shards (1/n of the full vector).

    A psum (and pmean, pmax, pmin, pbroadcast) pays for a reduce-scatter and an
    all-gather, or for its stages: a stage over p ranks gathers whole vectors and adds
    p-1 of them to its own.

    Args:
        collective: one of `algorithms.COLLECTIVES`.
        algorithm: a name, schedule or function, as `algorithms.build` takes it.
        shape: the sizes of the axes, major first.
        network: the shape of a physical ring or torus; None is a switch, to which each
            rank has one port. Stages are routed along their digits of the ranks.

    Raises:
        ValueError: as `algorithms.build`; or the network is of another number of ranks.
    """
    made = build(collective, algorithm, tuple(shape))
    if isinstance(made, tuple):
        return _price_of_stages(made, network)
    backward = price_backward(made, network)
    forward = replace(backward, raw=backward.sent, additions=Fraction(0))
    if collective == "psum_scatter":
        return backward
    if collective in ("all_gather", "all_to_all"):
        return forward
    return _in_turn(backward, forward)


def _price_of_stages(stages: Stages, network: Sequence[int] | None) -> Price:
    n = prod(stage.size for stage in stages)  # a whole vector is n shards
    prices = []
    for i in range(len(stages)):
        one = price_backward(product(stages, [i]), network)  # along its digit of the ranks
        prices.append(
            replace(
                one,
                sent=n * one.sent,
                raw=n * one.sent if i == 0 else Fraction(0),  # later stages send sums
                link=n * one.link,
                additions=n * one.additions,
            )
        )
    return _in_turn(*prices)


def _in_turn(*prices: Price) -> Price:
    return Price(*(sum(column) for column in zip(*map(astuple, prices), strict=True)))


def wire_bytes(
    collective: str,
    algorithm: Algorithm,
    shape: Sequence[int],
    shard_elements: float,
    itemsize: int,
    accumulate_itemsize: int | None = None,
) -> float:
    """The bytes that leave one rank.

    With a wider `accumulate_dtype`, what has not been added to yet travels narrow, and a
    message with a partial sum in it wide; the gather after a reduce-scatter is narrow.

    Args:
        collective, algorithm, shape: as for `price`.
        shard_elements: elements in 1/n of the full vector.
        itemsize: bytes of an element of the operand.
        accumulate_itemsize: bytes of an element of a partial sum; as the operand's if None.

    Raises:
        ValueError: as `price`.
    """
    wide = itemsize if accumulate_itemsize is None else accumulate_itemsize
    paid = price(collective, algorithm, shape)
    return float((paid.raw * itemsize + (paid.sent - paid.raw) * wide) * shard_elements)


def price_backward(schedule: Schedule, network: Sequence[int] | None = None) -> Price:
    """What one rank pays for a schedule run backward, as a reduce-scatter.

    Forward it pays the same, but adds nothing and everything is raw: backward, every message
    is taken to go the way back.

    Args:
        schedule: of any kind.
        network: as for `price`: on a physical ring or torus a shift of s loads s links.

    Raises:
        ScheduleError: when `network` is not of as many ranks as the schedule.
    """
    if network is not None and prod(network) != schedule.size:
        raise ScheduleError(f"network {tuple(network)} is not of {schedule.size} ranks")
    moves_of_all = [move for _, move in schedule.numbered_moves()]
    sent = sum((_share(schedule, move) for move in moves_of_all), Fraction(0))
    added: set[tuple[int, int]] = set()
    raw = Fraction(0)
    for moves in reversed(schedule.rounds):  # backward: a slot is raw until added to
        for move in moves:
            if added.isdisjoint((move.lane, a) for a in schedule.arrivals(move)):
                raw += _share(schedule, move)
        added |= {(move.lane, o) for move in moves for o in move.offsets}
    startups, link = len(moves_of_all), sent  # of a switch
    if network is not None:
        routed = [_route(schedule, moves, tuple(network)) for moves in schedule.rounds]
        startups = sum(started for started, _ in routed)
        link = sum((load for _, load in routed), Fraction(0))
    return Price(
        rounds=len(schedule.rounds),
        messages=len(moves_of_all),
        startups=startups,
        sent=sent,
        raw=raw,
        link=link,
        additions=sent,
    )


def _share(schedule: Schedule, move: Move) -> Fraction:
    return Fraction(len(move.offsets), schedule.lanes)


def _route(schedule: Schedule, moves: Round, network: tuple[int, ...]) -> tuple[int, Fraction]:
    """One round on a torus: startups, and the load of the busiest link in shards."""
    ranks = range(schedule.size)
    here = np.stack(np.unravel_index(ranks, network))
    load = np.zeros((2, *here.shape), int)  # direction, axis, rank; in half lane shares
    starts = np.zeros((3, *here.shape), int)  # ahead, back, as far either way; axis, rank
    for move in moves:
        to = [schedule.step(rank, move.axis, move.shift) for rank in ranks]
        there = np.stack(np.unravel_index(to, network))
        at = here.copy()
        for axis, length in enumerate(network):  # one dimension after the other
            ahead = (there[axis] - here[axis]) % length
            back = -ahead % length
            way = np.select([ahead < back, ahead > back], [0, 1], 2)
            first = (ahead > 0) & (here[:axis] == there[:axis]).all(0)
            starts[way[first], axis, np.flatnonzero(first)] += 1
            for sign, hops in enumerate([ahead, back]):
                halves = np.select([way == sign, way == 2], [2, 1])  # a tie splits the load
                for hop in range(hops.max(initial=0, where=halves > 0)):
                    at[axis] = (here[axis] + (-hop if sign else hop)) % length
                    going = (hops > hop) & (halves > 0)
                    node = np.ravel_multi_index(tuple(at), network)[going]
                    np.add.at(load[sign, axis], node, halves[going] * len(move.offsets))
            at[axis] = there[axis]
    # Of ties, each message goes whole, by the port that fewer leave by.
    one_port = np.maximum(starts[:2].max(axis=0), -(-starts.sum(axis=0) // 2))
    return int(one_port.max()), Fraction(int(load.max()), 2 * schedule.lanes)
