"""`Schedule.check` against a machine that executes what it is told; see `machine`."""

import re
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from machine import Fault, exchanged, gathered, reduced
from support import runnable

from ringcoll.algorithms import bruck, build, ring
from ringcoll.schedules.schedule import (
    AllToAllSchedule,
    Move,
    Schedule,
    ScheduleError,
    in_lanes,
    stretches,
)

pytestmark = pytest.mark.quick


def runs(machine, schedule):
    try:
        machine(schedule)
    except Fault:
        return False
    return True


def passes(schedule):
    try:
        return schedule.check() is schedule
    except ScheduleError:
        return False


# -- check: what is wrong, in words --


def one(*moves, shape=(4,), lanes=1, kind=Schedule):
    """A schedule of one move a round."""
    return kind(shape, tuple((move,) for move in moves), lanes)


RING = [Move(1, (0,)), Move(1, (1,)), Move(1, (2,))]
PAIRWISE = [Move(1, (1,)), Move(2, (2,)), Move(3, (3,))]
BROKEN = [
    (
        one(Move(1, (1,))),
        "round 1: rank r sends the shard of offset 1 before holding it; bring it in an earlier",
    ),
    (one(*RING[:2]), "offset 3 never arrives; add a move whose offset + shift is 3"),
    (
        one(RING[0], Move(1, (0, 1))),
        "round 2: offset 1 arrives twice; leave offset 0 out of this move of shift 1",
    ),
    (one(*RING, Move(1, (3,))), "round 4: offset 0 arrives twice"),
    (Schedule((4,), ((RING[0], RING[0]),)), "round 1: offset 1 arrives twice"),
    (one(*RING, lanes=2), "offset 1 never arrives (lane 1)"),
    (
        one(*RING, Move(1, (1,), lane=1), lanes=2),
        "round 4: rank r sends the shard of offset 1 before holding it (lane 1)",
    ),
    (one(RING[0], RING[0], lanes=2), "round 2: offset 1 arrives twice (lane 0)"),
    (one(Move(1, (0,), axis=1)), "round 1: axis 1, but the shape is (4,); count axes from 0"),
    (one(Move(1, (0,), axis=-1)), "round 1: axis -1, but the shape is (4,)"),
    (one(Move(1, (0,), lane=1)), "round 1: lane 1, but lanes=1; count lanes from 0"),
    (one(Move(1, (0,), lane=-1)), "round 1: lane -1, but lanes=1"),
    (one(RING[0], Move(1, (4,))), "round 2: offset 4 is not in 0..3; take it modulo n"),
    (one(RING[0], Move(1, (-1,))), "round 2: offset -1 is not in 0..3"),
    (one(Move(1.0, (0,))), "round 1: 1.0 is not a whole number; pass an int (n // 2, not"),
    (one(RING[0], Move(1, (1.0,))), "round 2: 1.0 is not a whole number"),
    (one(Move(1, (0,), axis=None)), "round 1: None is not a whole number"),
    (one(Move(1, (0,), lane="0")), "round 1: '0' is not a whole number"),
    (one(Move(4, (0,))), "round 1: shift 4 sends to oneself; pass no multiple of 4"),
    (one(Move(2, (0,), axis=1), shape=(4, 2)), "round 1: shift 2 sends to oneself; pass no mul"),
    (one(Move(1, ())), "round 1: a move of shift 1 sends nothing; give it an offset, or drop it"),
    (Schedule((4,), (), 0), "lanes=0: pass 1 or more"),
    (
        one(*PAIRWISE[:2], kind=AllToAllSchedule),
        "the block for rank r + 3 ends at r + 0; the shifts of the moves that send 3 must add up",
    ),
    (
        one(PAIRWISE[0], Move(1, (2, 2)), PAIRWISE[2], kind=AllToAllSchedule),
        "round 2: the block for rank r + 2 is sent twice; leave it out of one of the moves",
    ),
    (
        one(*PAIRWISE, kind=AllToAllSchedule, lanes=2),
        "the block for rank r + 1 ends at r + 0 (lane 1)",
    ),
    (one(Move(1, (4,)), kind=AllToAllSchedule), "round 1: offset 4 is not in 0..3"),
]


@pytest.mark.parametrize(("schedule", "message"), BROKEN)
def test_errors_of_check(schedule, message):
    with pytest.raises(ScheduleError) as error:
        schedule.check()
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (one(RING[0], shape=(10**15,)), "offset 2 never arrives"),
        (one(RING[0], shape=(10**9, 10**9)), "offset 1 never arrives"),
        (one(RING[0], lanes=10**15), "offset 2 never arrives (lane 0)"),
        (one(*RING, lanes=10**15), "offset 1 never arrives (lane 1)"),
        (one(PAIRWISE[0], shape=(10**15,), kind=AllToAllSchedule), "rank r + 2 ends at r + 0"),
        (one(*PAIRWISE, lanes=10**15, kind=AllToAllSchedule), "rank r + 1 ends at r + 0 (lane 1)"),
    ],
)
def test_check_takes_memory_for_the_moves_alone(schedule, message):
    tracemalloc.start()
    with pytest.raises(ScheduleError, match=re.escape(message)):
        schedule.check()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100_000  # bytes


@pytest.mark.parametrize("kind", [Schedule, AllToAllSchedule])
def test_where_there_is_one_rank_nothing_is_missing(kind):
    assert passes(kind((1,), (), 10**15))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4,), (5,)), "a round of moves must be a tuple: (5,)"),
        (((4,), None), "rounds must be a tuple: (None,)"),
        ((4, ()), "shape must be a tuple: (4,)"),
        (((4, 0), ()), "shape (4, 0): give every axis one rank or more"),
        (((), ()), "shape (): give every axis one rank or more"),
        ((("4",), ()), "shape ('4',), lanes 1: '4' is not a whole number"),
        (((4.0,), ()), "shape (4.0,), lanes 1: 4.0 is not a whole number"),
        (((1,), (), "2"), "shape (1,), lanes 2: '2' is not a whole number; pass an int"),
        (((2,), ((1,),)), "a round holds 1, which is no Move; write Move(shift, offsets): Move(1,"),
        (((2,), (((1, (0,)),),)), "a round holds (1, (0,)), which is no Move"),
        (((2,), (Move(1, (0,)),)), f"a round of moves must be a tuple: ({Move(1, (0,))!r},)"),
        (((2,), ((Move(1, 0),),)), f"{Move(1, 0)!r}: offsets must be a tuple: (0,)"),
    ],
)
def test_malformed_schedules_are_refused_when_they_are_made(arguments, message):
    with pytest.raises(ScheduleError) as error:
        Schedule(*arguments)
    assert str(error.value).startswith(message)


def changed(draw, move, schedule):
    """The move with one thing about it changed."""
    shape, offsets = schedule.shape, list(move.offsets)
    i = draw(st.integers(0, len(offsets) - 1))
    offsets[i] = draw(st.integers(0, schedule.size - 1))
    axis = draw(st.sampled_from([a for a, n in enumerate(shape) if n > 1]))
    changes = [
        replace(move, shift=draw(st.integers(1, shape[axis] - 1)), axis=axis),
        replace(move, lane=draw(st.integers(0, schedule.lanes - 1))),
        replace(move, offsets=tuple(offsets)),
        replace(move, offsets=move.offsets[:i] + move.offsets[i + 1 :]),
        replace(move, offsets=move.offsets[::-1]),
    ]
    return draw(st.sampled_from(changes))


@st.composite
def mutants(draw, collective, shapes):
    """A right schedule with a few things changed, some of which leave it right."""
    shape = draw(st.sampled_from(shapes))
    name = draw(st.sampled_from(runnable(collective, *shape)))
    right = build(collective, name, shape)
    rounds = [list(moves) for moves in right.rounds]
    for _ in range(draw(st.integers(0, 3))):
        moves = draw(st.sampled_from([moves for moves in rounds if moves] or [[]]))
        if moves:
            move = moves.pop(draw(st.integers(0, len(moves) - 1)))
            other = changed(draw, move, right)
            to = draw(st.sampled_from([moves, *rounds]))
            to += [m for m in draw(st.sampled_from([[other], [move, other], [move]])) if m.offsets]
    if draw(st.booleans()):
        rounds = draw(st.permutations(rounds))
    return replace(right, rounds=tuple(map(tuple, rounds)))


MUTATED_SHAPES = [(2,), (3,), (4,), (5,), (2, 2), (2, 3), (3, 1)]


@settings(deadline=None, max_examples=120)
@given(mutants("all_gather", MUTATED_SHAPES))
def test_check_passes_exactly_the_schedules_that_run(schedule):
    right = passes(schedule)
    event(str(right))
    assert right == runs(gathered, schedule)
    assert right == runs(reduced, schedule)  # a reduce-scatter is a gather backward


@settings(deadline=None, max_examples=120)
@given(mutants("all_to_all", MUTATED_SHAPES))
def test_check_of_all_to_all_passes_exactly_the_schedules_that_run(schedule):
    event(str(passes(schedule)))
    assert passes(schedule) == runs(exchanged, schedule)


# -- the arithmetic of ranks, and schedules made of schedules --


def test_lanes_of_different_length_keep_to_their_rounds():
    lanes = in_lanes(ring(5), bruck(5)).check()
    assert (lanes.lanes, len(lanes.rounds)) == (2, 4)
    assert [[move.lane for move in moves] for moves in lanes.rounds] == [[0, 1]] * 3 + [[0]]
    assert sum(len(move.offsets) for _, move in lanes.numbered_moves()) == 2 * 4  # half shards


def test_schedules_are_values():
    assert ring(4) == one(*RING)
    assert hash(ring(4)) == hash(one(*RING))
    listed = Schedule([4], [[Move(1, [offset])] for offset in range(3)])
    assert (listed, hash(listed)) == (ring(4), hash(ring(4)))
    assert one(*PAIRWISE) != one(*PAIRWISE, kind=AllToAllSchedule)


#: By algorithm and shape: the most rounds that are not a loop, and the runs of rounds.
STRETCHES = [
    ("ring", (8,), 7, [(i, i + 1) for i in range(7)]),
    ("ring", (8,), 6, [(0, 7)]),
    ("ring", (3,), 0, [(0, 1), (1, 2)]),  # a loop writes out two rounds anyway
    ("ring", (4,), 0, [(0, 3)]),
    ("ring", (2, 5), 2, [(0, 1), (1, 2), (2, 5)]),  # along the second axis it first sends both
    ("ring", (5, 2), 2, [(i, i + 1) for i in range(5)]),  # the last round sends all again
    ("bidirectional_ring", (5,), 2, [(0, 4)]),
    # In the first, both ends send one shard; in the last, one end has nothing to send.
    ("two_ended", (12,), 2, [(0, 1), (1, 5), (5, 6)]),
    ("torus", (6, 6), 2, [*((i, i + 1) for i in range(6)), (6, 10)]),
    ("bruck", (9,), 0, [(i, i + 1) for i in range(4)]),
]


@pytest.mark.parametrize(("algorithm", "shape", "limit", "runs_of_rounds"), STRETCHES)
def test_stretches(algorithm, shape, limit, runs_of_rounds):
    assert stretches(build("all_gather", algorithm, shape), limit) == runs_of_rounds
