"""Time model of a matmul with an overlapped, preceding or following collective.

`"auto"` compares `hidden_seconds` with `bare_seconds`. A matmul takes as long as its operations
or as reading its operands, whichever is longer. To hide a collective, the matmul is cut into
pieces, and each piece reads the stationary operand again: with few rows that takes longer than the
wire. The `Model` has the rates, and the size of the memory next to the core. Of the compiled
programs of single matmuls in `benchmarks/pages/grid.json`, half take within 4 % of these seconds,
nine of ten within 14 %, and all within 25 %, except one: 8192 x 8192 x 28672, gathered along the
contraction on tpu7x:2x2x1, takes 1149 us, and these are 764 (`tests/costs/test_matmul_cost.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

from ringcoll import algorithms
from ringcoll.costs.model import Model
from ringcoll.schedules.schedule import Schedule

# These constants were read from programs that libtpu 0.0.52 compiled on 2026-11-22; most of the
# programs are in `benchmarks/pages/grid.json`. (Rates are in `ringcoll.costs`.)

#: How long TPU compilers estimate that it takes to put a slice in its place: seconds, and seconds
#: per byte. They order operations by this. The real time is a tenth of it. From the
#: `estimated_cycles` of fusions that place 0.2 to 0.9 MB: 2115 cycles, and 2.5 (v5p) to 2.8 (v6e)
#: for 1000 bytes.
PLACING = 1.2e-6, 1 / 650e9

#: A matmul that joins its own operands takes this many times as long, if the memory next to the
#: core does not hold the stationary operand: it joins them again for every block. One program: 2048
#: x 8192 x 28672 on v5p:2x2x2 takes 62.8 us for a piece; with operands that were joined before,
#: 42.8.
AGAIN = 1.5
#: The part of the copy of a slice that is left if a round has one part: then the matmul reads the
#: slice itself, from the main memory. 512 x 8192 x 28672 on v5e:2x2, gathered along the contraction
#: by a ring one way: 401 us; with this constant 424.
READ_INSIDE = 0.7
#: How many times the bytes of a sum are moved by a matmul that adds to it, if the memory next to
#: the core does not hold the sum. The sum itself is moved twice. The operands are moved as much
#: again, because less memory is left for their blocks. Gathers of w by rows, 65536 x 8192 x 28672,
#: sums of 470 MB, per round: v5p 1.21 ms, v6e 1.48, v5e 3.10; with this constant 1.17, 1.36, 3.18.
#: A whole matmul before a built-in scatter moves as much. Plain, 32768 x 4096 x 1024 on v5e:2x2 and
#: 16384 x 4096 x 4096 on v6e:4x2: 3792 and 1039 us; with this constant 4056 and 1045.
SUMMED = 4
#: The part of the fetch of its operands for which a scatter in rounds waits if other work comes
#: before. Before a built-in scatter, compilers fetch them under that work. Rounds are a loop, which
#: waits for the whole fetch in some programs, and for nothing in others. Fitted to programs of
#: layers and gradients that were compiled both ways: `tests/matmuls/test_matmul_choice.py`.
AWAITED = 0.28


@dataclass(frozen=True, slots=True)
class Work:
    """The matmuls of a collective: their FLOPs, and the bytes of memory that they move.

    Attributes:
        flops: the FLOPs of the whole matmuls.
        added: bytes moved to add partial results in each round, if matmuls are cut into pieces. A
            scatter has all of them here, a gather only the result.
        once: bytes that are read or written once, whether the matmuls are cut or not.
        again: bytes that every piece reads; the whole matmuls read them once.
        placed: bytes of the result, if every piece is put in its place in it.
        sliced: bytes of an operand, if every piece takes a slice of it. Compilers copy the slice
            before they start the hop.
        cut: bytes of an operand, if every piece of a scatter takes a slice of it. Compilers copy
            the slice to the memory next to the core, under the previous hop.
        joined: bytes of the result of a scatter, if it is put together from the sums of both
            directions.
        written: bytes of the sum that whole matmuls write before a built-in scatter.
    """

    flops: float
    added: float = 0.0
    once: float = 0.0
    again: float = 0.0
    placed: float = 0.0
    sliced: float = 0.0
    cut: float = 0.0
    joined: float = 0.0
    written: float = 0.0


class Round(NamedTuple):
    """What one round of a gather brings to a rank. The first round brings the rank's own shard.

    Attributes:
        parts: the number of messages.
        shards: the number of shards in them.
        load: the load of the busiest direction of a link, in shards.
    """

    parts: int
    shards: float
    load: float


@lru_cache(maxsize=256)
def rounds_of(algorithm: str, ranks: int) -> tuple[Round, ...]:
    """`rounds` of the gather with this name."""
    schedule = algorithms.build("all_gather", algorithm, (ranks,))
    assert isinstance(schedule, Schedule)  # stages are for all-reduces
    return rounds(schedule)


def rounds(schedule: Schedule) -> tuple[Round, ...]:
    """The rank's own shard, then the rounds of a gather whose messages go to neighbours."""
    found = [Round(schedule.lanes, 1.0, 0.0)]
    for moves in schedule.rounds:
        loads: dict[tuple[int, int], float] = {}
        for move in moves:
            way = move.axis, move.shift
            loads[way] = loads.get(way, 0) + len(move.offsets) / schedule.lanes
        found.append(Round(len(moves), sum(loads.values()), max(loads.values())))
    return tuple(found)


#: How the messages of a round are multiplied if there are several; see
#: `ringcoll.matmuls.auto.joining`.
APART, FUSED, COPIED = "apart", "fused", "copied"


def hidden_seconds(
    works: Sequence[Work],
    shard_bytes: float,
    ranks: int,
    model: Model,
    made: Sequence[Round],
    joining: str | None = None,
    ratio: float = 1.0,
    follows: bool = False,
) -> float:
    """Seconds of a collective under its matmuls, which are cut into a piece for every round.

    A piece is multiplied while a round is on the wire. One piece hides no round: the last one of a
    gather, the first one of a scatter.

    Args:
        works: the work of the whole matmuls.
        shard_bytes: the bytes of a rank's shard.
        ranks: the number of ranks.
        model: the rates of the machine.
        made: `rounds` of the gather, or of the gather that is run backward.
        joining: for a gather, how parts are multiplied: `APART`, `FUSED` or `COPIED`. Before the
            first piece, compilers copy what every piece reads into the memory next to the core, if
            it fits there. For a scatter, None: the first piece reads it from the main memory; the
            later pieces read it from the memory next to the core, if it fits there.
        ratio: the bytes of messages over the bytes of their values; below 1 if they are encoded.
            Then each round decodes what arrived.
        follows: whether other work comes before. Under that work, compilers fill the memory next
            to the core, in part.
    """
    again, added, sliced, cut, joined = (
        sum(getattr(work, name) for work in works)
        for name in ("again", "added", "sliced", "cut", "joined")
    )
    # With the sum, that memory also holds a shard, the shard that arrives, and a slice.
    beside = 2 * shard_bytes + sliced / ranks if joining else 0.0
    is_near = model.holds(again + added + beside)
    # If the sum is in the main memory, matmuls wait for it.
    waits = bool(joining and added and model.far) and not is_near
    adding = 0.0 if waits else added * (model.near if is_near else model.memory)
    filled = 0.0
    if model.holds(again):
        filled = again * model.memory
        if joining is None:  # under the first piece
            first = made[-1].shards / ranks
            near, far = (
                sum(piece_seconds(w, first, model, x) for w in works) for x in (True, False)
            )
            filled = far - near
    if follows:
        filled = AWAITED * (filled + model.holds(again + cut) * cut * model.memory)
    total = filled + joined * model.memory
    for came, going in zip_longest(made, made[1:]):
        pieces = _pieces(works, came, shard_bytes, ranks, model, joining, waits, ratio != 1)
        seconds = sum(piece.seconds for piece in pieces)
        slicing, cutting = (of * came.shards / ranks * model.memory for of in (sliced, cut))
        slicing *= READ_INSIDE if joining and came.parts == 1 else 1.0
        # Codes are read from the main memory. The decoded values stay next to the core.
        coding = (ratio != 1) * ratio * came.shards * shard_bytes * model.far
        sums = adding if joining else adding * came.shards
        total += slicing + cutting + seconds + sums + coding
        if going:
            sent = ratio * shard_bytes * going.load
            hop = model.latency + model.beta * sent
            # With codes, compilers decode, then start the hop, then multiply.
            whole = ratio != 1 and joining in (FUSED, COPIED)
            under = seconds if whole else _covered(pieces, sent, model)
            under += cutting
            if came is made[0] and joining and under >= seconds:
                under += filled
            # A scatter sends the sum, so its next hop waits for the addition.
            total += max(0.0, hop - under - (adding if joining else 0.0))
    return total


class _Piece(NamedTuple):
    """One operation of a round: its seconds, and the seconds that compilers estimate for it."""

    seconds: float
    reckoned: float


def _pieces(
    works: Sequence[Work],
    came: Round,
    shard_bytes: float,
    ranks: int,
    model: Model,
    joining: str | None,
    waits: bool,
    decodes: bool,
) -> list[_Piece]:
    """The operations on the shards of a round, in order. The next hop starts before the last ones.

    Compilers put small matmuls last. Decoded values are written to the place of the copy, so there
    is no copy.
    """
    parts = came.parts if joining == APART else 1
    share, is_near = came.shards / ranks / parts, model.holds(sum(work.again for work in works))
    is_joined = joining is not None and came.parts > parts
    products, places = [], []
    for work in works:
        is_read_inside = joining and work.sliced and came.parts == 1
        seconds = piece_seconds(work, share, model, is_near and not is_read_inside)
        if is_joined and joining == FUSED and came.load:
            seconds = seconds * (1 if is_near else AGAIN) + came.shards * shard_bytes * model.memory
        if waits:
            seconds = max(seconds, SUMMED * work.added * model.far)
        products.append(_Piece(seconds, seconds))
        if is_joined and work.placed:
            reckoned = came.parts * PLACING[0] + work.placed * share * PLACING[1]
            fits = model.holds(work.placed + 2 * shard_bytes)
            places.append(_Piece(0.0 if fits else work.placed * share * model.memory, reckoned))
    copies = []
    if is_joined and joining == COPIED and came.load and not decodes:
        copies.append(_Piece(2 * came.shards * shard_bytes * model.memory, 0.0))
    return copies + sorted(products, reverse=True) * parts + places


def _covered(pieces: Iterable[_Piece], sent: float, model: Model) -> float:
    """Seconds of the operations that run during a hop.

    By their own estimates, compilers start a hop so early that the operations after the start take
    as long as the hop.
    """
    under = reckoned = 0.0
    for piece in reversed(list(pieces)):
        if reckoned >= model.reckons(sent):
            break
        under, reckoned = under + piece.seconds, reckoned + piece.reckoned
    return under


def piece_seconds(work: Work, share: float, model: Model, is_near: bool) -> float:
    """Seconds of a share of the matmuls: to compute or to read, whichever is longer.

    Args:
        work: the work of the whole matmuls.
        share: the share of it.
        model: the rates of the machine.
        is_near: whether what is read again or sliced is in the memory next to the core.
    """
    rate = model.near if is_near else model.far
    reading = (work.once + work.cut) * share * model.far + (work.again + work.sliced * share) * rate
    return max(model.start + work.flops * share * model.delta, reading)


def bare_seconds(
    works: Sequence[Work],
    shard_bytes: float,
    ranks: int,
    model: Model,
    links: float = 2,
    gathers: bool = False,
    ratio: float = 1.0,
    follows: bool = False,
) -> float:
    """Seconds of whole matmuls and of their collective before or after them, without its latency.

    Args:
        works, shard_bytes, ranks, model: as for `hidden_seconds`.
        links: the number of links over which a rank receives at the same time.
        gathers: whether the matmuls read the result of the collective. The memory next to the core
            is filled during a gather.
        ratio, follows: as for `hidden_seconds`. Everything is encoded once before the collective
            and decoded once after it.
    """
    wire = (ranks - 1) * model.beta * ratio * shard_bytes / links
    if ratio != 1:
        wire += (1 + ranks) * shard_bytes * (1 + ratio) * model.memory
    if follows and model.holds(sum(work.again + work.cut for work in works)):
        works = [replace(work, again=work.again + work.cut, cut=0.0) for work in works]
    held = sum(work.again + work.sliced for work in works)
    fills = model.holds(held)
    filling = 0.0 if follows else fills * held * model.memory
    taken = max(wire, filling) if gathers else wire + filling
    multiplying = sum(piece_seconds(work, 1, model, fills) for work in works)
    written = sum(work.written for work in works)
    if not model.holds(written):
        multiplying = max(multiplying, SUMMED * written * model.far)
    return taken + multiplying
