"""Drawings show what happens, proved on symbols; their captions; drawings as text."""

import re
from fractions import Fraction
from math import prod

import pytest
from support import SIZES, runnable

from ringcoll.__main__ import main
from ringcoll.algorithms import COLLECTIVES, ring
from ringcoll.costs.counts import price
from ringcoll.draw import as_motion, as_text, frames, plan
from ringcoll.draw.captions import round_words, sentence
from ringcoll.draw.plan import Execution
from ringcoll.schedules.phases import Carries, Phase
from ringcoll.schedules.registry import EXCHANGES
from ringcoll.schedules.schedule import Move, Schedule, ScheduleError

pytestmark = pytest.mark.quick

SHAPES = [*((n,) for n in SIZES), (4, 2), (3, 2), (2, 2, 2)]


# -- steps --


def wanted(collective, rank, n):
    """For each column, whose data a rank holds at the end; None stands for whole vectors."""
    everybody = frozenset(range(n))
    if collective == "all_gather":
        return tuple(frozenset([shard]) for shard in range(n))
    if collective in ("psum_scatter", *EXCHANGES):
        return tuple(everybody if shard == rank else frozenset() for shard in range(n))
    return None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_last_frame_is_the_result_and_messages_match_the_price(collective, shape):
    for algorithm in runnable(collective, *shape):
        drawn = plan(collective, algorithm, shape)
        run, n = frames(drawn), prod(shape)
        for rank, lanes in enumerate(run[-1].held):
            for cells in lanes:
                assert cells == (wanted(collective, rank, n) or (frozenset(range(n)),) * len(cells))
        assert len(run) - 1 == drawn.paid.rounds
        rounds = zip(run[1:], drawn.numbered(), strict=True)
        sent_in = [(phase, m) for frame, (_, ((phase, _),)) in rounds for m in frame.messages]
        for rank in range(n):
            mine = [(m, phase) for phase, m in sent_in if m.sender == rank]
            assert len(mine) == drawn.paid.messages
            sent = sum(Fraction(len(m.pieces), phase.schedule.lanes) for m, phase in mine)
            assert sent * (n if drawn.whole else 1) == drawn.paid.sent


def broken(carries, *rounds):
    """A plan on three ranks that nothing has checked."""
    schedule = Schedule((3,), rounds)
    return Execution("mine", "mine", (3,), (Phase("mine", carries, schedule),), schedule, None)


def test_a_schedule_that_is_wrong_does_not_run():
    with pytest.raises(ScheduleError, match="rank 0 sends 2, which it does not hold"):
        frames(broken(Carries.SHARDS, (Move(1, (1,)),)))
    with pytest.raises(ScheduleError, match="column 0 is added twice"):
        frames(broken(Carries.SHARDS, (Move(1, (0,)),), (Move(1, (0,)),)))
    away = Move(1, (1,))  # backward: each sends its sum of the next one's shard there
    with pytest.raises(ScheduleError, match="rank 0 sends 1, which it does not hold"):
        frames(broken(Carries.SUMS, (away,), (away,)))


@pytest.mark.parametrize("algorithm", runnable("all_gather", 6))
def test_frames_of_a_tour(algorithm):
    drawn, n = plan("tour", algorithm, (6,)), 6
    run, all_ranks, lanes = frames(drawn), frozenset(range(6)), drawn.tour.out.lanes
    for rank, held in enumerate(run[-1].held):
        own = [column == rank for column in range(n)]
        assert held[:lanes] == (tuple(frozenset([rank] if mine else []) for mine in own),) * lanes
        assert held[lanes:] == (tuple(all_ranks if mine else frozenset() for mine in own),) * lanes
    waiting = [sum(map(bool, lane)) for f in run for lane in f.held[0][lanes:]]
    assert max(waiting) <= 1 + drawn.tour.waiting  # its own sum waits too
    mine = [m for f in run for m in f.messages if m.sender == 0]
    paid = price("tour", algorithm, (6,))
    assert (len(run) - 1, len(mine)) == (paid.rounds, paid.messages)
    for sent, some in ((paid.raw, range(lanes)), (paid.sent - paid.raw, range(lanes, 2 * lanes))):
        assert Fraction(sum(len(m.pieces) for m in mine if m.lane in some), lanes) == sent


# -- words --


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("algorithm", runnable("all_gather", 5))
def test_captions_match_the_messages_of_every_rank(collective, algorithm):
    drawn = plan(collective, algorithm, (5,))
    for frame, (_, now) in zip(frames(drawn)[1:], drawn.numbered(), strict=True):
        in_captions = set()
        for part in round_words(drawn, now)[2]:
            targets, what, lane = re.fullmatch(
                r"to (?:each of )?(.*): .*?(?:shards? (.*?)|that rank's shard)( \(lane \d\))?", part
            ).groups()
            for target in targets.split(", "):
                for r in range(5):
                    to = eval(target, {"r": r}) % 5
                    columns = eval(f"[{what or target}]", {"r": r})
                    in_captions.add((r, to, int((lane or "0)")[-2]), tuple(c % 5 for c in columns)))
        assert in_captions == {
            (m.sender, m.receiver, m.lane, tuple(p.column for p in m.pieces))
            for m in frame.messages
        }


# fmt: off
SENTENCES = [
    ("all_to_all", "bruck", (8,), 1,
     "every rank r sends to r+2: 4 blocks for r+2, r-2 from r, r-1"),
    ("psum", "halving_doubling", (8,), 4, "every rank r sends to r^2: shards r, r^4"),
    ("psum", "recursive_doubling", (6,), 2,
     "every rank (i, j) sends to (i, j-1): the whole vector of (i, j)"),
    ("pmax", "ring", (3,), 0, "every rank r sends to r-1: its maximum of shard r+1"),
    ("all_gather", "ring", (3, 2), 2, "every rank (i, j) sends to (i, j+1): shards (*, j)"),
    ("tour", "ring", (4,), 2,
     "every rank r sends to r+1: shard r-2; to r+1: its sum of shard r-1"),
    ("all_gather", "direct", (64,), 0,
     "every rank r sends to each of r+1, r+2, r+3, ..., r-1 (63 of them): shard r"),
    ("all_gather", Schedule((3,), ((), *ring(3).rounds)), (3,), 0, "every rank r sends nothing"),
]
# fmt: on


@pytest.mark.parametrize(("collective", "algorithm", "shape", "number", "message"), SENTENCES)
def test_sentences(collective, algorithm, shape, number, message):
    drawn = plan(collective, algorithm, shape)
    _, now = list(drawn.numbered())[number]
    assert sentence(drawn, now) == message


# -- text --


def test_text_is_a_table_for_each_round():
    text = as_text(plan("all_reduce", "ring", (3,)))
    blocks = text.split("\n\n")
    assert blocks[0] == "all_reduce by ring on 3 ranks"
    assert blocks[2].startswith(r"rank \ shard  0  1  2")
    assert blocks[3].startswith("round 1 of 4, reduce-scatter: every rank r sends to r-1")
    table = [line.split() for line in blocks[3].splitlines()[-3:]]
    assert table == [["0", "0", ".", "0,1*"], ["1", "1,2*", "1", "."], ["2", ".", "2,0*", "2"]]
    assert [line.split() for line in blocks[-2].splitlines()[-3:]] == [
        ["0", "0-2", "0-2*", "0-2"],
        ["1", "0-2", "0-2", "0-2*"],
        ["2", "0-2*", "0-2", "0-2"],
    ]
    assert "4 rounds, 4 messages; sends 4/3 (1.33) full vectors, adds 2/3." in blocks[-1]


@pytest.mark.parametrize(
    ("collective", "algorithm", "shape"),
    [
        ("psum", "bidirectional_ring", (4,)),
        ("psum_scatter", "torus", (4, 2)),
        ("all_to_all", "bruck", (8,)),
        ("psum", "one_shot", (6,)),
        ("psum", "torus", (4, 4)),
        ("all_to_all", "pairwise", (16,)),
    ],
)
def test_text_fits_the_terminal(collective, algorithm, shape):
    for width in (60, 80, 132):
        lines = as_text(plan(collective, algorithm, shape), width).splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) < 400


def test_lanes_that_differ_are_shown_separately():
    text = as_text(plan("all_gather", "bidirectional_ring", (3,)))
    assert "1/2 of everything" in text
    assert re.search(r"^0 +0 +\.\|1\* +2\*\|\.$", text, re.M)
    narrow = as_text(plan("all_gather", "torus", (4, 2)))  # all lanes in a cell are too wide
    assert re.search(r"^3 lane 1 +\. +\. +\. +3 +\. +5\* +\. +\.$", narrow, re.M)


# -- the command --


def my_star(n):
    """Not in the library."""
    return Schedule((n,), tuple((Move(s, (0,)),) for s in range(1, n)))


def test_the_command_prints_text_and_writes_files(capsys, tmp_path):
    assert main(["draw", "all_reduce", "--algorithm", "bidirectional_ring", "-n", "4"]) == 0
    assert "all_reduce by bidirectional_ring on 4 ranks" in capsys.readouterr().out
    svg, film = (tmp_path / name for name in ("a.svg", "film.svg"))
    mine = ["--function", f"{__name__}:my_star", "--ranks", "4"]
    pictures = ["--svg", str(svg), "--animate", str(film)]
    assert main(["draw", "all_gather", *mine, *pictures]) == 0
    written = f"wrote {svg}\nwrote {film}\n"
    assert tuple(capsys.readouterr()) == ("", written)
    assert "round 2 of 3" in svg.read_text(encoding="utf-8")
    assert film.read_text(encoding="utf-8") == as_motion(plan("all_gather", my_star, (4,)))


@pytest.mark.parametrize(
    ("ranks", "width", "are"),
    [(8, 80, False), (16, 80, True), (16, 100, False)],
)
def test_text_says_that_tables_are_left_out(ranks, width, are):
    text = as_text(plan("all_gather", "ring", (ranks,)), width)
    assert (f"Tables of {ranks} ranks are left out: {width} columns are too few" in text) == are
