"""From a program back to a schedule, if every rank does the same.

The rounds of a program come from the messages of its proof. If there is a shape in which the
messages of every rank are those of rank 0, shifted, they are the moves of a schedule. The schedule
is compared with the program, message by message, before it is returned.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import NamedTuple

from ringcoll.draw.plan import Plan, plan
from ringcoll.draw.steps import frames
from ringcoll.formats.proof import Proof
from ringcoll.schedules.phases import Carries, Phase
from ringcoll.schedules.registry import Stages
from ringcoll.schedules.schedule import (
    AllToAllSchedule,
    Move,
    Schedule,
    digits,
)


class _Sent(NamedTuple):
    """A chunk in a message: its offset is `offset_to` minus `offset_from`."""

    sender: int
    receiver: int
    offset_to: int
    offset_from: int
    lane: int


class _Piece(NamedTuple):
    """A chunk in a message: its shard (or the rank it is for), its lane, and whose data it has."""

    sender: int
    receiver: int
    shard: int
    lane: int
    ranks: frozenset[int]


class Part(NamedTuple):
    """A schedule (or stages), and the collective that it runs."""

    collective: str
    schedule: Schedule | Stages


_Rounds = list[list[_Piece]]
#: The shard and the lane of each chunk.
_Labels = dict[int, tuple[int, int]]


def schedule_of(proof: Proof) -> Schedule | Stages | None:
    """The schedule (or stages) that a program runs; None if there is no such schedule.

    There is none if ranks do different things, or if an all-reduce gathers by another schedule
    than it reduces by; then `schedules_of` has both.

    Args:
        proof: the proof of the program.

    >>> made = formats.prove(formats.program("all_gather", "bruck", (4,)))
    >>> formats.schedule_of(made) == algorithms.bruck(4)
    True
    """
    found = schedules_of(proof)
    return found[0].schedule if len(found) == 1 else None


def schedules_of(proof: Proof) -> list[Part]:
    """The schedules that a program runs one after the other; an empty list if its ranks differ.

    An all-reduce may have two: that of its reduce-scatter and that of its all-gather. Otherwise
    there is one.

    Args:
        proof: the proof of the program.

    >>> made = formats.prove(formats.program("psum", "ring", (4,)))
    >>> [part.collective for part in formats.schedules_of(made)]
    ['psum']
    """
    program = proof.program
    found: list[Part] = []
    if not program.chunks % program.size:
        found = _by_shards(proof)
    if not found and program.collective == "psum":
        rounds = _pieces(proof, {chunk: (0, chunk) for chunk in range(program.chunks)})
        stages = _stages(rounds, program.size, program.chunks) if rounds is not None else None
        found = [Part("psum", stages)] if stages is not None else []
    return found


def plans_of(proof: Proof) -> list[Plan]:
    """The plans of a program's schedules, which can be drawn."""
    plans = []
    for collective, found in schedules_of(proof):
        shape: tuple[int, ...] = (proof.program.size,)
        if isinstance(found, Schedule) and max(found.shape) > 2:
            shape = found.shape
        of_schedule = plan(collective, found, shape)
        plans.append(replace(of_schedule, algorithm=proof.program.name))
    return plans


def _by_shards(proof: Proof) -> list[Part]:
    program = proof.program
    lanes = program.chunks // program.size
    rounds = _pieces(proof, _labels(proof, lanes))
    for shape in factorizations(program.size) if rounds is not None else []:
        parts = _in_shape(program.collective, rounds or [], shape, lanes)
        if parts and all(_is_run_by(*part) for part in parts):
            return [Part(collective, schedule) for schedule, collective, _ in parts]
    return []


def _labels(proof: Proof, lanes: int) -> _Labels:
    """The shard and the lane of each chunk.

    In an all-reduce, any rank may reduce any chunk. There a chunk belongs to the shard of the rank
    that has its whole sum first, if every rank has equally many of these.
    """
    size, chunks = proof.program.size, range(proof.program.chunks)
    labels = {chunk: divmod(chunk, lanes) for chunk in chunks}
    if proof.program.collective != "psum":
        return labels
    owners: dict[int, int] = {}
    for message in sorted(proof.messages, key=lambda message: message.round):
        for value in (value for value in message.values if len(value) == size):
            owners.setdefault(min(value)[1], message.sender)
    for lane_of in (lambda chunk: chunk % lanes, lambda chunk: chunk // size):
        found = {chunk: (owner, lane_of(chunk)) for chunk, owner in owners.items()}
        if len(set(found.values())) == len(chunks):
            return found
    return labels


def _pieces(proof: Proof, labels: _Labels) -> _Rounds | None:
    """The chunks of the messages, by round; None if a message has a sum of different chunks."""
    rounds: _Rounds = [[] for _ in range(proof.rounds)]
    kind = proof.program.collective
    for message in proof.messages:
        for value in message.values:
            chunks = {chunk for _, chunk in value}
            if len(chunks) > 1:
                return None
            (chunk,) = chunks
            shard, lane = labels[chunk]
            ranks = frozenset(rank for rank, _ in value)
            if kind in ("all_gather", "all_to_all") and len(ranks) > 1:
                return None
            if kind == "all_gather":
                shard = min(ranks)
            piece = _Piece(message.sender, message.receiver, shard, lane, ranks)
            rounds[message.round - 1].append(piece)
    return rounds


def _in_shape(
    collective: str, rounds: _Rounds, shape: tuple[int, ...], lanes: int
) -> list[tuple[Schedule, str, _Rounds]]:
    """The schedules on ranks of a shape, each with its rounds, if all ranks do the same in it."""
    if collective == "all_to_all":
        schedule = _moves(shape, lanes, ([_slot(p) for p in one] for one in rounds))
        return (
            [(AllToAllSchedule(shape, schedule.rounds, lanes), collective, rounds)]
            if schedule
            else []
        )
    schedule = _moves(shape, lanes, ([_shard(p) for p in one] for one in rounds))
    if schedule is None:
        return []
    if collective != "psum":
        is_sum = collective == "psum_scatter"
        return [(_backward(schedule) if is_sum else schedule, collective, rounds)]
    complete = [{len(piece.ranks) == prod(shape) for piece in one} for one in rounds]
    half = complete.count({False})
    if complete != [{False}] * half + [{True}] * (len(rounds) - half):
        return []
    scatter = _backward(replace(schedule, rounds=schedule.rounds[:half]))
    gather = replace(schedule, rounds=schedule.rounds[half:])
    if _canonical(scatter) == _canonical(gather):
        return [(gather, "psum", rounds)]
    shards = [[p._replace(ranks=frozenset([p.shard])) for p in one] for one in rounds[half:]]
    return [(scatter, "psum_scatter", rounds[:half]), (gather, "all_gather", shards)]


def _slot(piece: _Piece) -> _Sent:
    (origin,) = piece.ranks
    return _Sent(piece.sender, piece.receiver, piece.shard, origin, piece.lane)


def _shard(piece: _Piece) -> _Sent:
    return _Sent(piece.sender, piece.receiver, piece.sender, piece.shard, piece.lane)


def _moves(
    shape: tuple[int, ...], lanes: int, rounds: Iterable[Sequence[_Sent]]
) -> Schedule | None:
    """A schedule of these rounds, if in each of them every rank sends what rank 0 sends."""
    found = []
    for sent in rounds:
        by_rank: list[defaultdict[tuple[int, int, int], set[int]]]
        by_rank = [defaultdict(set) for _ in range(prod(shape))]
        for one in sent:
            far = _difference(one.receiver, one.sender, shape)
            along = [axis for axis, digit in enumerate(far) if digit]
            if len(along) != 1:
                return None
            (axis,), n = along, shape[along[0]]
            shift = far[axis] if 2 * far[axis] <= n else far[axis] - n
            offset = 0
            for digit, size in zip(
                _difference(one.offset_to, one.offset_from, shape), shape, strict=True
            ):
                offset = offset * size + digit
            by_rank[one.sender][one.lane, axis, shift].add(offset)
        if any(moves != by_rank[0] for moves in by_rank):
            return None
        moves = sorted(by_rank[0].items())
        found.append(tuple(Move(s, tuple(sorted(sent)), a, lane) for (lane, a, s), sent in moves))
    return Schedule(shape, tuple(found), lanes)


def _difference(first: int, second: int, shape: tuple[int, ...]) -> list[int]:
    pairs = zip(digits(first, shape), digits(second, shape), shape, strict=True)
    return [(a - b) % n for a, b, n in pairs]


def _backward(schedule: Schedule) -> Schedule:
    """The schedule that has these rounds if it is run backward, as a reduce-scatter."""
    return replace(schedule, rounds=Phase("", Carries.SUMS, schedule).rounds)


def _canonical(schedule: Schedule) -> list[set[tuple[int, int, int, frozenset[int]]]]:
    """The moves of each round, in a form without their order and with shifts modulo the axis."""
    return [
        {(m.lane, m.axis, m.shift % schedule.shape[m.axis], frozenset(m.offsets)) for m in moves}
        for moves in schedule.rounds
    ]


def factorizations(n: int) -> list[tuple[int, ...]]:
    """The shapes of n ranks without axes of one rank; shapes with few axes come first."""
    found: list[tuple[int, ...]] = [(n,)]
    for shape in found:  # it grows: the last axis is cut in two
        *axes, last = shape
        found += [(*axes, d, last // d) for d in range(2, last // 2 + 1) if last % d == 0]
    return found


def _stages(rounds: _Rounds, size: int, lanes: int) -> Stages | None:
    """The stages of an all-reduce of whole vectors; None if the rounds are not such stages."""
    sizes = [{len(piece.ranks) for piece in one} for one in rounds]
    if any(len(one) > 1 for one in sizes):
        return None
    added = [min(one) for one in sizes]
    starts = [*sorted(set(added)), size]
    if added != sorted(added) or starts[0] != 1 or any(b % a for a, b in pairwise(starts)):
        return None
    shape = tuple(b // a for a, b in pairwise(starts))
    stages = []
    for axis, start in enumerate(starts[:-1]):
        of_stage = [one for one, count in zip(rounds, added, strict=True) if count == start]
        stage = _stage(of_stage, shape, axis, lanes)
        if stage is None:
            return None
        stages.append(stage)
    found = tuple(stages)
    return found if _is_run_by(found, "psum", rounds) else None


def _stage(rounds: _Rounds, shape: tuple[int, ...], axis: int, lanes: int) -> Schedule | None:
    """The gather of one stage, along a digit of the ranks."""
    along = [
        [
            _Sent(
                digits(piece.sender, shape)[axis],
                digits(piece.receiver, shape)[axis],
                digits(piece.sender, shape)[axis],
                digits(min(piece.ranks), shape)[axis],
                piece.lane,
            )
            for piece in one
        ]
        for one in rounds
    ]
    for finer in factorizations(shape[axis]):
        if (schedule := _moves(finer, lanes, along)) is not None:
            return schedule
    return None


def _is_run_by(schedule: Schedule | Stages, collective: str, rounds: _Rounds) -> bool:
    """Whether a schedule sends exactly these messages, with the same data in them."""
    size = prod(s.size for s in schedule) if isinstance(schedule, tuple) else schedule.size
    try:
        run = frames(plan(collective, schedule, (size,)))
    except ValueError:  # the schedule is wrong, or ringcoll cannot run it
        return False
    if len(run) != len(rounds) + 1:
        return False
    for frame, wanted in zip(run[1:], rounds, strict=True):
        assert frame.phase is not None
        vectors = frame.phase.carries is Carries.VECTORS
        sent = Counter(
            _Piece(m.sender, m.receiver, 0 if vectors else piece.column, m.lane, piece.contributors)
            for m in frame.messages
            for piece in m.pieces
        )
        if sent != Counter(wanted):
            return False
    return True
