"""A machine of n ranks: each rank holds data and sends what the rounds say.

It shares no code with schedules, not even the arithmetic of ranks, and it does not track which
offsets have arrived. At the end, what the ranks hold shows whether the schedule is right.
"""

from fractions import Fraction
from itertools import product as pairs

import numpy as np


class Fault(Exception):
    """The machine followed the schedule, and the schedule was wrong."""


def plus(shape, rank, offset, sign=1):
    start, by = (np.array(np.unravel_index(number, shape)) for number in (rank, offset))
    return int(np.ravel_multi_index(start + sign * by, shape, "wrap"))


def neighbour(shape, rank, move):
    there = list(np.unravel_index(rank, shape))
    there[move.axis] += move.shift
    return int(np.ravel_multi_index(there, shape, "wrap"))


def gathered(schedule):
    """Run a schedule forward: at the end every rank holds the shard of every rank, once."""
    shape, everybody = schedule.shape, range(schedule.size)
    held = {(rank, lane): {rank} for rank in everybody for lane in range(schedule.lanes)}
    for moves in schedule.rounds:
        post = []
        for move, rank in pairs(moves, everybody):
            for origin in [plus(shape, rank, offset, -1) for offset in move.offsets]:
                if origin not in held[rank, move.lane]:
                    raise Fault("not held")
                post.append(((neighbour(shape, rank, move), move.lane), origin))
        for to, origin in post:
            if origin in held[to]:
                raise Fault("held already")
            held[to].add(origin)
    if any(shards != set(everybody) for shards in held.values()):
        raise Fault("not gathered")


def reduced(schedule):
    """Run a schedule backward: at the end every rank holds only its own sum over all ranks.

    Returns the number of shards that a rank sent, in all and in messages without a partial sum.
    """
    shape, everybody = schedule.shape, range(schedule.size)
    partial = {
        (rank, lane): {owner: {rank} for owner in everybody}
        for rank in everybody
        for lane in range(schedule.lanes)
    }
    sent, raw = 0, 0
    for moves in reversed(schedule.rounds):
        post = []
        for move, rank in pairs(moves, everybody):
            sender = partial[neighbour(shape, rank, move), move.lane]
            message = []
            for owner in [plus(shape, rank, offset, -1) for offset in move.offsets]:
                if owner not in sender:
                    raise Fault("given away already")
                message.append(((rank, move.lane), owner, sender.pop(owner)))
            sent += len(message)
            raw += len(message) * all(len(contributors) == 1 for *_, contributors in message)
            post += message
        for to, owner, contributors in post:
            mine = partial[to].get(owner)
            if mine is None or mine & contributors:
                raise Fault("nothing to add to, or added twice")
            mine |= contributors
    for (rank, _), sums in partial.items():
        if sums != {rank: set(everybody)}:
            raise Fault("not reduced")
    shards = schedule.size * schedule.lanes
    return Fraction(sent, shards), Fraction(raw, shards)


def exchanged(schedule):
    """Run an all-to-all: at the end slot d holds the block that rank r - d has for rank r."""
    shape, everybody = schedule.shape, range(schedule.size)
    held = {
        (rank, lane): {slot: (rank, plus(shape, rank, slot)) for slot in everybody}
        for rank in everybody
        for lane in range(schedule.lanes)
    }
    for moves in schedule.rounds:
        post = []
        for move, rank in pairs(moves, everybody):
            for slot in move.offsets:
                if slot not in held[rank, move.lane]:
                    raise Fault("sent already")
                block = held[rank, move.lane].pop(slot)
                post.append(((neighbour(shape, rank, move), move.lane), slot, block))
        for to, slot, block in post:
            held[to][slot] = block
    for (rank, _), blocks in held.items():
        if blocks != {slot: (plus(shape, rank, slot, -1), rank) for slot in everybody}:
            raise Fault("not exchanged")
