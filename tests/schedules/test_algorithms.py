"""The library of schedules: every algorithm is right, short, and found by its name."""

import inspect
from dataclasses import replace
from functools import partial

import pytest
from cases import MAIN, check
from machine import Fault, exchanged, gathered, reduced
from support import exists, make_mesh

from ringcoll import algorithms
from ringcoll.algorithms import ALL_TO_ALLS, COLLECTIVES, GATHERS, STAGED, build, names
from ringcoll.commands import explain
from ringcoll.costs import price
from ringcoll.costs.counts import price_backward
from ringcoll.schedules.registry import (
    AS_ALL_REDUCE,
    EXCHANGES,
    along_each_axis,
    listed_name,
)
from ringcoll.schedules.schedule import (
    AllToAllSchedule,
    Move,
    Schedule,
    ScheduleError,
    SizeError,
)

pytestmark = pytest.mark.quick

LISTED = [*GATHERS.values(), *STAGED.values(), *ALL_TO_ALLS.values()]
SHAPES = [(1,), (2,), (3,), (4,), (5,), (8,), (9,), (2, 2), (4, 2), (3, 5), (1, 4), (4, 1)]
SHAPES += [(2, 3, 4), (3, 1, 2)]


# -- every algorithm, executed --


@pytest.mark.parametrize("name", GATHERS)
def test_gathers_forward_and_reduces_backward(name):
    for shape in SHAPES:
        if exists("all_gather", name, shape):
            schedule = GATHERS[name](*shape)
            gathered(schedule)
            paid = price_backward(schedule)
            assert reduced(schedule) == (paid.sent, paid.raw)
            assert paid.additions == paid.sent == schedule.size - 1


@pytest.mark.parametrize("name", ALL_TO_ALLS)
def test_every_block_goes_to_its_rank(name):
    for shape in SHAPES:
        if exists("all_to_all", name, shape):
            exchanged(ALL_TO_ALLS[name](*shape))


@pytest.mark.parametrize("name", STAGED)
def test_stages_gather_along_digits_of_all_ranks(name):
    for shape in filter(partial(exists, "psum", name), SHAPES):
        sizes = []
        for stage in STAGED[name](*shape):
            gathered(stage)
            sizes.append(stage.size)
        split = iter(sizes)  # each axis is a run of digits, major first
        for n in shape:
            while n > 1:
                n, rest = divmod(n, next(split))
                assert rest == 0
        assert list(split) == []


# -- every algorithm, checked --


@pytest.mark.parametrize(
    ("collective", "name"), [(c, name) for c in ("psum", "all_to_all") for name in names(c)]
)
def test_every_algorithm_is_right_on_every_shape(collective, name):
    every = [(n,) for n in range(1, 65)] + SHAPES + [(512,), (8, 8, 8)]
    shapes = [shape for shape in every if exists(collective, name, shape)]
    assert len(shapes) >= len(every) // 6  # some run on powers of two alone
    for shape in shapes:
        build.__wrapped__(collective, name, shape)  # checks what it builds


#: Computed on paper: the rounds, and the shards that a rank sends (a whole vector is n of them).
#: For one axis, `costs/test_formulas.py` has the forms that do not depend on the factors of n.
ON_PAPER = {
    ("psum", "recursive_doubling", (6,)): (3, 3 * 6),
    ("psum", "recursive_doubling", (7,)): (3, 6 * 7),
    ("psum", "recursive_doubling", (12,)): (4, 4 * 12),
    ("all_to_all", "bruck", (6,)): (3, 7),
    ("all_to_all", "bruck", (7,)): (3, 9),
    ("all_to_all", "bruck", (12,)): (4, 20),
    ("all_gather", "ring", (4, 3)): (3 + 2, 11),
    ("all_gather", "bruck", (4, 3)): (2 + 2, 11),
    ("all_gather", "direct", (4, 3)): (1 + 1, 11),
    ("all_gather", "two_ended", (4, 3)): (2 + 1, 11),
    ("all_gather", "torus", (4, 4)): (3 + 3, 15),
    ("all_gather", "torus", (4, 1)): (3, 3),
    ("all_gather", "hamiltonian", (4, 2)): (7, 7),
    ("all_gather", "recursive_doubling", (4, 2)): (3, 7),
    ("psum", "recursive_doubling", (4, 6)): (2 + 1 + 2, (2 + 1 + 2) * 24),
    ("psum", "one_shot", (4, 6)): (2 + 3, (3 + 5) * 24),
    ("all_to_all", "pairwise", (4, 3)): (3 + 2, 3 * 3 + 2 * 4),
    ("all_to_all", "bruck", (4, 3)): (2 + 2, 4 * 3 + 2 * 4),
}


@pytest.mark.parametrize("call", ON_PAPER)
def test_rounds_and_shards_are_those_on_paper(call):
    paid = price(*call)
    assert (paid.rounds, paid.sent) == ON_PAPER[call]


@pytest.mark.parametrize("name", ["torus", "hamiltonian"])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_algorithms_of_several_axes_on_one(name, n):
    assert build("psum", name, (n,)) == build("psum", "bidirectional_ring", (n,))


@pytest.mark.parametrize("shape", [(1, 4), (2, 1, 2), (3, 3, 1)], ids=str)
def test_a_torus_has_no_lanes_for_axes_of_one_rank(shape):
    schedule, used = build("all_gather", "torus", shape), [n for n in shape if n > 1]
    without = build("all_gather", "torus", tuple(used))
    assert schedule.lanes == without.lanes == 2 * len(used)
    for moves, fewer in zip(schedule.rounds, without.rounds, strict=True):
        assert [(shape[m.axis], m.shift) for m in moves] == [(used[m.axis], m.shift) for m in fewer]


@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 4), (4, 2), (2, 3, 1), (3, 3, 3)], ids=str)
def test_a_hamiltonian_uses_every_link_once(shape):
    schedule = build("all_gather", "hamiltonian", shape)
    came = dict.fromkeys(range(schedule.lanes), (0,))
    assert len(schedule.rounds) == schedule.size - 1
    for moves in schedule.rounds:
        assert {move.lane: move.offsets for move in moves} == came
        came = {move.lane: schedule.arrivals(move) for move in moves}
        links = {(move.axis, move.shift % shape[move.axis]) for move in moves}
        assert len(links) == len(moves) or len(set(shape)) > 1  # of unequal axes, some share


@pytest.mark.parametrize("function", LISTED, ids=lambda f: f.__name__)
def test_an_algorithm_is_at_most_15_lines(function):
    """From `def` to the end, without its docstring and blank lines."""
    code = inspect.getsource(inspect.unwrap(function)).partition("\ndef ")[2]
    definition, _, body = code.split('"""')
    lines = [*definition.splitlines(), *body.splitlines()]
    assert 2 <= sum(bool(line.strip()) for line in lines) <= 15


def test_every_public_algorithm_is_listed():
    public = {
        f
        for name, f in vars(algorithms).items()
        if inspect.isfunction(f) and f.__module__ == algorithms.__name__ and name[0] != "_"
    }
    assert public == set(LISTED)


def test_a_new_algorithm_needs_no_other_line(monkeypatch):
    def left_ring(n):
        """A ring the other way round.

        When: never.
        """
        return Schedule((n,), tuple((Move(-1, (-t % n,)),) for t in range(n - 1)))

    monkeypatch.setitem(GATHERS, "left_ring", along_each_axis(left_ring))
    test_gathers_forward_and_reduces_backward("left_ring")
    test_every_algorithm_is_right_on_every_shape("psum", "left_ring")
    assert "| `left_ring` | n-1 | (n-1)/n | never |" in explain.markdown()
    gather = [case for case in MAIN if case.name == "all_gather"]
    check(make_mesh(3), gather, lambda case, n: [{"algorithm": "left_ring"}])

    def lazy(n):
        return replace(left_ring(n), rounds=left_ring(n).rounds[1:])

    monkeypatch.setitem(GATHERS, "left_ring", along_each_axis(lazy))
    with pytest.raises(Fault, match="not gathered"):
        test_gathers_forward_and_reduces_backward("left_ring")


# -- from a name to a schedule --


def test_other_names_mean_the_same_and_are_not_listed():
    other, gather = "halving_doubling", build("all_gather", "recursive_doubling", (8,))
    for collective in ("all_gather", "psum_scatter"):
        assert other not in names(collective)
        assert listed_name(collective, other) == "recursive_doubling"
        assert build(collective, other, (8,)) == gather
    assert build("psum", other, (8,)) == gather != build("psum", "recursive_doubling", (8,))
    assert listed_name("psum", "halving_doubling") == "halving_doubling"
    assert listed_name("all_gather", "one_shot") == "one_shot"
    assert listed_name("all_to_all", "halving_doubling") == "halving_doubling"
    with pytest.raises(ValueError, match="no algorithm 'halving_doubling'"):
        build("all_to_all", "halving_doubling", (8,))


def my_ring(*shape):
    return GATHERS["ring"](*shape)


def test_names_are_those_of_the_collective():
    assert names("all_gather") == names("psum_scatter") == tuple(GATHERS)
    for collective in EXCHANGES:
        assert names(collective) == tuple(ALL_TO_ALLS)
    for collective in set(COLLECTIVES) - {"all_gather", "psum_scatter", *EXCHANGES}:
        gathers = (AS_ALL_REDUCE.get(name, name) for name in GATHERS)
        assert names(collective) == (*gathers, *STAGED)  # each once
    assert {"psum", "pmean", "pmax", "pmin", "pbroadcast"} < set(COLLECTIVES)


def test_build_takes_a_name_a_schedule_stages_or_a_function():
    ring, stages = GATHERS["ring"](4, 2), STAGED["recursive_doubling"](4, 2)
    assert build("all_gather", "ring", (4, 2)) == ring
    assert build("all_gather", ring, (4, 2)) == ring
    assert build("all_gather", my_ring, (4, 2)) == ring
    assert build("psum", "recursive_doubling", (4, 2)) == stages
    assert build("psum", stages, (4, 2)) == stages
    assert build("pmax", STAGED["recursive_doubling"], (4, 2)) == stages
    assert build("psum", "one_shot", (1,)) == ()
    # "bruck" names one algorithm of either kind
    assert type(build("all_gather", "bruck", (3,))) is Schedule
    assert type(build("all_to_all", "bruck", (3,))) is AllToAllSchedule


RING_3, PAIRWISE_3 = GATHERS["ring"](3), ALL_TO_ALLS["pairwise"](3)


def ring_of_three(*shape):
    return RING_3


REFUSED = [
    (
        ("allreduce", "ring", (3,)),
        "no collective 'allreduce'; choose from all_gather, psum_scatter, psum, pmean, pmax, "
        "pmin, pbroadcast, all_to_all, ragged_all_to_all",
    ),
    (
        ("all_to_all", "ring", (3,)),
        f"all_to_all: no algorithm 'ring'; choose from {', '.join(ALL_TO_ALLS)}",
    ),
    (("psum", "ring", (4, 0)), "psum: axes of sizes (4, 0); give one or more, each at least 1"),
    (
        ("psum", RING_3, (4,)),
        "psum: a schedule of 3 ranks on axes of sizes (4,); make one of 4, or pass a function of n",
    ),
    (("psum", (RING_3, RING_3), (3,)), "psum: a schedule of 3 x 3 ranks on axes of sizes (3,)"),
    (
        ("all_to_all", RING_3, (3,)),
        "all_to_all: takes an instance of AllToAllSchedule, got Schedule; return AllToAllSchedule",
    ),
    (("psum", PAIRWISE_3, (3,)), "psum: takes an instance of Schedule, got AllToAllSchedule"),
    (("all_gather", (RING_3,), (3,)), "all_gather: takes an instance of Schedule, got tuple"),
    (("all_gather", lambda n: None, (3,)), "all_gather: takes an instance of Schedule, got None"),
    (
        ("psum", ring_of_three, (2, 2)),
        "psum: a schedule of 3 ranks on axes of sizes (2, 2); make one of 4, or pass a function of "
        "n (ring_of_three(2, 2) returned it)",
    ),
    (
        ("all_gather", lambda n: Schedule((n,), ()), (2,)),
        "offset 1 never arrives; add a move whose offset + shift is 1 (<lambda>(2) returned it)",
    ),
    (("psum", Schedule((2,), ()), (2,)), "offset 1 never arrives"),
    (
        ("psum", (RING_3, Schedule((2,), ((Move(1, (1,)),),))), (6,)),
        "round 1: rank r sends the shard of offset 1 before holding it",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_errors_of_build(arguments, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is compared)
        build(*arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(KeyError("mine"), ScheduleError), (TypeError("mine"), TypeError), (SizeError("mine"), None)],
)
def test_what_an_algorithm_of_one_s_own_raises(raised, kind):
    """What is not an error of a schedule is chained to one that names the call."""

    def mine(n):
        raise raised

    with pytest.raises(Exception, match="mine") as caught:
        build("psum", mine, (3,))
    if kind is None:
        assert caught.value is raised
    else:
        assert type(caught.value) is kind
        assert caught.value.__cause__ is raised
        assert str(caught.value).startswith(f"mine(3) raised {type(raised).__name__}: ")
        assert str(caught.value).endswith("of each axis") == (kind is TypeError)
