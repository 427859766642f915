"""The seconds of a collective together with the matmuls that hide it: one price.

A schedule under work takes, in each round, the longer of the hop and the product that hides it,
plus what nothing hides: the first fetch of an operand, slices that are copied, and sums. A gather
multiplies what arrived while the next round travels. A reduce runs the same rounds backward, so it
has the same pairs of hop and product. A tour sends shards out and sums home. The built-in
collective travels alone, before or after the whole product.

A product takes as long as its FLOPs or as its bytes, whichever is longer. If it is cut into pieces,
every piece reads the other operand again: from the main memory or, if it fits there, from the
memory next to the core. With few rows that takes longer than the wire.

`ringcoll.choose` takes the cheapest, and `python -m ringcoll cost` prints all. How far these
seconds are from compiled programs: `tests/costs/test_under_work.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from ringcoll.costs.model import Model, built_in_start, gather_links, scatter_links
from ringcoll.schedules.schedule import Schedule
from ringcoll.schedules.tour import Tour

#: How many times the bytes of a sum are moved by a piece that adds to it: it is read and written.
ADDING = 2
#: How many links a message to a neighbour passes on a line (`slices.along`). There, the messages of
#: both directions of a ring share each direction of a link.
ON_A_LINE = 2


@dataclass(frozen=True, slots=True)
class Work:
    """A matmul: its FLOPs, and the bytes of memory that it moves.

    Attributes:
        flops: the FLOPs of the whole matmul.
        read_once: bytes that are read or written once, in all pieces together.
        reread: bytes that every piece reads; the whole matmul reads them once.
        slice_reads: bytes of an operand of which every piece takes a slice, which is copied first.
        accumulated: bytes of a sum to which every piece adds.
    """

    flops: float
    read_once: float = 0.0
    reread: float = 0.0
    slice_reads: float = 0.0
    accumulated: float = 0.0


def nbytes(x: Any) -> int:
    """The bytes of an array, or of one of its type."""
    return x.size * x.dtype.itemsize


class RoundLoad(NamedTuple):
    """What a rank gets in one round of a gather. The first round brings its own shard.

    Attributes:
        shards: the number of shards that arrive, and are multiplied.
        load: the load of the busiest direction of a link, in shards.
    """

    shards: float
    load: float


def rounds(schedule: Schedule, closed: Sequence[bool] | None = None) -> tuple[RoundLoad, ...]:
    """The rank's own shard, then the rounds of a gather whose messages go to neighbours.

    Args:
        schedule: the gather.
        closed: which axes are rings; the others are lines. None: all are rings.
    """
    found = [RoundLoad(1.0, 0.0)]
    for moves in schedule.rounds:
        loads: dict[tuple[int, int], float] = {}
        for move in moves:
            n = schedule.shape[move.axis]
            is_ring = n <= 2 or closed is None or closed[move.axis]
            way = move.axis, move.shift % n if is_ring else 0
            load = len(move.offsets) / schedule.lanes * (1 if is_ring else ON_A_LINE)
            loads[way] = loads.get(way, 0.0) + load
        shards = sum(len(move.offsets) for move in moves) / schedule.lanes
        found.append(RoundLoad(shards, max(loads.values(), default=0.0)))
    return tuple(found)


def tour_rounds(path: Tour, ratio: float = 1.0) -> tuple[RoundLoad, ...]:
    """The rounds of a tour: shards travel out, and the sums of their products travel home.

    Args:
        path: the tour.
        ratio: the bytes of a sum over the bytes of its shard.
    """
    (own, *out), nothing = rounds(path.out), RoundLoad(0.0, 0.0)
    home = [nothing] * path.delay + [*rounds(path.back)[:0:-1]]
    pairs = zip_longest(out, home, fillvalue=nothing)
    return own, *(RoundLoad(one.shards, one.load + ratio * back.load) for one, back in pairs)


def in_rounds(products: Iterable[float], hops: Iterable[float]) -> float:
    """The sum of the longer of each product and the hop under it."""
    return sum(max(pair) for pair in zip_longest(products, hops, fillvalue=0.0))


def overlapped_seconds(
    works: Sequence[Work],
    shard_bytes: float,
    model: Model,
    of_rounds: Sequence[RoundLoad],
    ratio: float = 1.0,
) -> float:
    """Seconds of a schedule under matmuls that are cut into a piece for every round.

    One piece hides no round: the last one of a gather, the first one of a reduce.

    Args:
        works: the whole matmuls.
        shard_bytes: the bytes of a rank's shard.
        model: the rates of the machine.
        of_rounds: the rounds of the schedule: of `rounds` or `tour_rounds`.
        ratio: the bytes of messages over the bytes of their values; below 1 if they are encoded.
            Then each round decodes what arrived.
    """
    ranks = sum(one.shards for one in of_rounds)
    reread = sum(work.reread for work in works)
    slice_reads = sum(work.slice_reads for work in works)
    accumulated = sum(work.accumulated for work in works)
    # A sum stays there only beside a shard and the one that arrives.
    is_near = model.holds(reread + accumulated + 2 * shard_bytes * (accumulated > 0))
    shares = [one.shards / ranks for one in of_rounds if one.shards]
    products = [sum(_seconds(work, share, model, is_near) for work in works) for share in shares]
    hops = (model.latency + model.beta * ratio * shard_bytes * x.load for x in of_rounds[1:])
    bare = (is_near * reread + slice_reads) * model.memory
    bare += len(shares) * ADDING * accumulated * (model.vmem_seconds if is_near else model.memory)
    bare += ranks * ratio * shard_bytes * model.hbm_seconds if ratio < 1 else 0.0
    return in_rounds(products, hops) + bare


def built_in_seconds(
    works: Sequence[Work],
    shard_bytes: float,
    ranks: int,
    model: Model,
    *,
    gathers: bool,
    ratio: float = 1.0,
) -> float:
    """Seconds of whole matmuls, and of their built-in collective before or after them.

    Args:
        works, shard_bytes, model, ratio: as for `overlapped_seconds`. Everything is encoded once
            before the collective and decoded once after it.
        ranks: the number of ranks.
        gathers: whether the collective is a gather, whose result the matmuls read. Their other
            operand is then fetched while it travels. If not, it is a reduce-scatter.
    """
    links = (gather_links if gathers else scatter_links)(ranks, model)
    arriving = max(ranks - model.devices, min(ranks - 1, 1))  # at a chip, for all its devices
    wire = arriving * model.beta * ratio * shard_bytes / links
    wire += built_in_start(ranks, model) if shard_bytes else 0.0
    wire += (1 + ranks) * shard_bytes * (1 + ratio) * model.memory if ratio < 1 else 0.0
    if gathers:
        whole = [replace(work, reread=work.reread + work.slice_reads) for work in works]
    else:
        whole = [replace(work, read_once=work.read_once + work.slice_reads) for work in works]
    read = sum(work.reread for work in whole)
    is_near = model.holds(read)
    fetch = is_near * read * model.memory
    products = sum(_seconds(work, 1.0, model, is_near) for work in whole)
    return (max(wire, fetch) if gathers else wire + fetch) + products


def _seconds(work: Work, share: float, model: Model, is_near: bool) -> float:
    """Seconds of a share of a matmul: of its FLOPs or of its bytes, whichever is longer.

    `is_near` says whether what is read again was fetched to the memory next to the core.
    """
    again = model.vmem_seconds if is_near else model.hbm_seconds
    reading = work.read_once * share * model.hbm_seconds + work.reread * again
    return max(model.start + work.flops * share * model.delta, reading)


def all_to_all_seconds(block_bytes: float, ranks: int, model: Model) -> float:
    """Seconds of a built-in all-to-all; `block_bytes` is a rank's operand.

    Each part passes as many links as the average message on a torus: a quarter of each axis.

    `prediction` prices the same collective in a different way: it has the slice, counts the pairs
    of ranks on the busiest link, and takes the rate that a built-in reaches. A matmul has only the
    number of its ranks.
    """
    distance = max(model.axes * ranks ** (1 / model.axes) / 4, 1.0)
    sent = (ranks - 1) / ranks * model.beta * block_bytes
    return built_in_start(ranks, model) + sent * distance / gather_links(ranks, model)
