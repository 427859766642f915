"""Tours: every rank adds to the partial result of every shard, and the sums come home."""

from itertools import product

import numpy as np
import pytest
from machine import plus
from support import exists
from test_algorithms import SHAPES

from ringcoll import algorithms
from ringcoll.schedules.registry import GATHERS
from ringcoll.schedules.schedule import Move, Schedule, ScheduleError
from ringcoll.schedules.tour import Tour, cut, tour


def came_home(checked):
    """By rank and lane, who has added to the sum for this rank's shard; run on symbols.

    A rank adds to a sum while the round after the shard's arrival is on the wire. Sums that arrive
    are added after that.
    """
    n, lanes = checked.out.size, checked.out.lanes
    come = {(r, lane, 0) for r in range(n) for lane in range(lanes)}
    sums = {}
    for time in range(1, max(checked.rounds, 1) + 1):
        arriving, received = set(), []
        for move in checked.out.rounds[time - 1] if time <= len(checked.out.rounds) else ():
            for r, (sent, got) in product(range(n), zip(*both(checked.out, move), strict=True)):
                assert (r, move.lane, sent) in come or time > 1
                arriving.add((checked.out.step(r, move.axis, move.shift), move.lane, got))
        number = len(checked.back.rounds) - (time - checked.delay)
        for move in checked.back.rounds[number] if 0 <= number < len(checked.back.rounds) else ():
            for r, (kept, sent) in product(range(n), zip(*both(checked.back, move), strict=True)):
                to = checked.back.step(r, move.axis, -move.shift)
                received.append(((to, move.lane, kept), sums.pop((r, move.lane, sent))))
        for r, lane, offset in come:
            sums[r, lane, offset] = {r}
        for key, others in received:
            here = sums.setdefault(key, set())  # the way back may pass ranks that see nothing
            assert here.isdisjoint(others), "a rank's contribution is added twice"
            here |= others
        come = arriving
    assert all(offset == 0 for _, _, offset in sums), "a sum is not at home"
    return sums


def both(schedule, move):
    return move.offsets, schedule.arrivals(move)


@pytest.mark.parametrize("name", GATHERS)
def test_every_rank_adds_once_to_every_shard(name):
    for shape in SHAPES:
        if exists("all_gather", name, shape):
            schedule = algorithms.build("all_gather", name, shape)
            sums = came_home(tour(schedule))
            assert len(sums) == schedule.size * schedule.lanes
            assert all(who == {*range(schedule.size)} for who in sums.values()), shape


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 64])
def test_rounds_of_a_tour_on_a_ring(n):
    """Each rank holds its own sum and one more, in each direction; n rounds follow the first."""
    for name, lanes in (("ring", 1), ("bidirectional_ring", 2)):
        checked = tour(algorithms.build("all_gather", name, (n,)))
        assert (checked.rounds, checked.waiting) == (n + 1, lanes)


def test_a_cut_tour_goes_back_as_it_came():
    """Offsets 1 and 2 of 8: two rounds there and two back, not all the way round."""
    cut_tour = tour(algorithms.ring(8), frozenset({1, 2}))
    assert len(cut_tour.out.rounds) == len(cut_tour.back.rounds) == 2
    sums = came_home(cut_tour)
    assert all(who == {r, (r + 1) % 8, (r + 2) % 8} for (r, _, _), who in sums.items())


@pytest.mark.parametrize("name", GATHERS)
def test_who_adds_in_a_cut_tour(name):
    """Also where the way there forwards shards that the way back would leave out."""
    for shape in SHAPES:
        if not exists("all_gather", name, shape) or (n := int(np.prod(shape))) > 8:
            continue
        schedule = algorithms.build("all_gather", name, shape)
        others = range(1, n)
        for needed in (*([o] for o in others), *([*range(1, o)] for o in others), others[::2]):
            for (rank, _, _), who in came_home(tour(schedule, frozenset(needed))).items():
                assert {plus(schedule.shape, rank, o) for o in needed} <= who, (shape, needed)


def test_a_cut_gather_sends_what_is_needed_or_forwarded():
    both_ways = algorithms.two_ended(8)
    assert [len(m.offsets) for r in cut(both_ways, frozenset({2})).rounds for m in r] == [1, 1]
    assert cut(both_ways, frozenset()).rounds == ()
    cut(both_ways, frozenset({3, 7})).check({3, 7})
    there, and_back = Move(1, (0,)), [Move(-1, (offset,), lane=1) for offset in (0, 3, 2)]
    rounds = [(there, and_back[0]), (and_back[1],), (and_back[2],)]
    both_lanes = algorithms.bidirectional_ring(4)
    assert cut(both_lanes, frozenset({1})) == Schedule((4,), rounds, lanes=2)
    with pytest.raises(ScheduleError, match="offset 5 never arrives"):
        cut(both_ways, frozenset({3})).check({5})


def test_errors_of_check():
    ring = algorithms.ring(4)
    with pytest.raises(ScheduleError, match="one shape"):
        Tour(ring, algorithms.ring(5)).check()
    with pytest.raises(ScheduleError, match="offset 3 never arrives"):
        Tour(cut(ring, frozenset({1, 2})), ring).check()
    with pytest.raises(ScheduleError, match="offset 3 never arrives"):
        Tour(ring, cut(ring, frozenset({1, 2}))).check()
    with pytest.raises(ScheduleError, match="offset 2 never comes home"):
        Tour(ring, cut(ring, frozenset({1}))).check({1})
