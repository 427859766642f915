"""From a program back to a schedule, if every rank does the same.

The rounds of a program are read off the messages of its proof. If there is a shape in which the
messages of every rank are those of rank 0, moved, they are the moves of a schedule. What was
found is compared with the program, message by message, before it is returned.
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
    """A chunk in a message: `offset_to` less `offset_from` is its offset."""

    sender: int
    receiver: int
    offset_to: int
    offset_from: int
    lane: int


class _Piece(NamedTuple):
    """A chunk in a message: its shard (or the rank that it is for), its lane, whose data it has."""

    sender: int
    receiver: int
    shard: int
    lane: int
    ranks: frozenset[int]


_Rounds = list[list[_Piece]]


def schedule_of(proof: Proof) -> Schedule | Stages | None:
    """The schedule (or stages) that a program runs; None if it is not the same on every rank.

    An all-reduce has to be a reduce-scatter and then the same schedule run forward, or stages.

    Args:
        proof: of the program.

    >>> made = formats.prove(formats.program("all_gather", "bruck", (4,)))
    >>> formats.schedule_of(made) == algorithms.bruck(4)
    True
    """
    program = proof.program
    whole = program.collective == "psum"
    found: Schedule | Stages | None = None
    if not program.chunks % program.size:
        found = _by_shards(proof)
    if found is None and whole:
        rounds = _pieces(proof, program.chunks)
        found = _stages(rounds, program.size, program.chunks) if rounds is not None else None
    return found


def plan_of(proof: Proof) -> Plan | None:
    """The plan of a program's schedule, to be drawn; None if there is no such schedule."""
    found = schedule_of(proof)
    if found is None:
        return None
    program = proof.program
    shape: tuple[int, ...] = (program.size,)
    if isinstance(found, Schedule) and max(found.shape) > 2:
        shape = found.shape
    made = plan(program.collective, found, shape)
    return replace(made, algorithm=program.name)


def _by_shards(proof: Proof) -> Schedule | None:
    program = proof.program
    lanes = program.chunks // program.size
    rounds = _pieces(proof, lanes)
    if rounds is None:
        return None
    for shape in factorizations(program.size):
        made = _in_shape(program.collective, rounds, shape, lanes)
        if made is not None and _is_run_by(made, program.collective, rounds):
            return made
    return None


def _pieces(proof: Proof, lanes: int) -> _Rounds | None:
    """The chunks of the messages, by round; None if one is a sum of different chunks."""
    rounds: _Rounds = [[] for _ in range(proof.rounds)]
    kind = proof.program.collective
    for message in proof.messages:
        for value in message.values:
            chunks = {chunk for _, chunk in value}
            if len(chunks) > 1:
                return None
            (chunk,) = chunks
            shard, lane = divmod(chunk, lanes)
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
) -> Schedule | None:
    """The schedule on ranks of a shape, if the moves of all ranks are the same in it."""
    if collective == "all_to_all":
        made = _moves(shape, lanes, ([_slot(p) for p in one] for one in rounds))
        return None if made is None else AllToAllSchedule(shape, made.rounds, lanes)
    made = _moves(shape, lanes, ([_shard(p) for p in one] for one in rounds))
    if made is None or collective == "all_gather":
        return made
    if collective == "psum_scatter":
        return _backward(made)
    size, half = prod(shape), len(rounds) // 2
    complete = [{len(piece.ranks) == size for piece in one} for one in rounds]
    if complete != [{False}] * half + [{True}] * half:
        return None
    scatter, gather = (replace(made, rounds=r) for r in (made.rounds[:half], made.rounds[half:]))
    return gather if _canonical(_backward(scatter)) == _canonical(gather) else None


def _slot(piece: _Piece) -> _Sent:
    (origin,) = piece.ranks
    return _Sent(piece.sender, piece.receiver, piece.shard, origin, piece.lane)


def _shard(piece: _Piece) -> _Sent:
    return _Sent(piece.sender, piece.receiver, piece.sender, piece.shard, piece.lane)


def _moves(
    shape: tuple[int, ...], lanes: int, rounds: Iterable[Sequence[_Sent]]
) -> Schedule | None:
    """Rounds of moves, if in each of them every rank sends what rank 0 sends."""
    made = []
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
        made.append(tuple(Move(s, tuple(sorted(sent)), a, lane) for (lane, a, s), sent in moves))
    return Schedule(shape, tuple(made), lanes)


def _difference(first: int, second: int, shape: tuple[int, ...]) -> list[int]:
    pairs = zip(digits(first, shape), digits(second, shape), shape, strict=True)
    return [(a - b) % n for a, b, n in pairs]


def _backward(schedule: Schedule) -> Schedule:
    """The schedule whose reduce-scatter has these rounds: it is run backward."""
    return replace(schedule, rounds=Phase("", Carries.SUMS, schedule).rounds)


def _canonical(schedule: Schedule) -> list[set[tuple[int, int, int, frozenset[int]]]]:
    """The moves of each round, however they are ordered and shifts are written."""
    return [
        {(m.lane, m.axis, m.shift % schedule.shape[m.axis], frozenset(m.offsets)) for m in moves}
        for moves in schedule.rounds
    ]


def factorizations(n: int) -> list[tuple[int, ...]]:
    """The shapes of n ranks without axes of one rank, those of few axes first."""
    found: list[tuple[int, ...]] = [(n,)]
    for shape in found:  # it grows: the last axis is cut in two
        *axes, last = shape
        found += [(*axes, d, last // d) for d in range(2, last // 2 + 1) if last % d == 0]
    return found


def _stages(rounds: _Rounds, size: int, lanes: int) -> Stages | None:
    """The stages of an all-reduce of whole vectors: in each, sums of as many ranks are sent."""
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
    made = tuple(stages)
    return made if _is_run_by(made, "psum", rounds) else None


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
        if (made := _moves(finer, lanes, along)) is not None:
            return made
    return None


def _is_run_by(made: Schedule | Stages, collective: str, rounds: _Rounds) -> bool:
    """Whether a schedule sends exactly these messages, with the same data in them."""
    size = prod(s.size for s in made) if isinstance(made, tuple) else made.size
    try:
        run = frames(plan(collective, made, (size,)))
    except ValueError:  # a schedule that is wrong by itself, or that nothing here runs
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
