"""What `ringcoll.debug` says when processes of this machine really fail, or really differ."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.failures import FAILURES, ended
from ringcoll.debug import STATUS

ABORTED = -6  # by JAX, when the first process has ended before


@pytest.fixture(scope="module")
def ends():
    """They wait for each other, so all at once."""
    rows = [("has", "checked", 3), ("is killed in the middle", "deadline", 3)]
    rows += [("never arrives", "deadline", 2)]
    with ThreadPoolExecutor() as pool:
        each = pool.map(lambda row: ended(*row, seconds=20, patience=200), rows)
        return {only: found for (only, _, _), found in zip(rows, each, strict=True)}


def test_processes_that_differ_are_refused_on_every_one_in_the_same_words(ends):
    found = ends["has"]
    assert [end.status for end in found] == [0, 0, 0], found
    said = [end.text.split("refused: ringcoll.debug.check_consistent(fn, ...): ") for end in found]
    rows = [name for name in FAILURES if "has" in name]
    cure = "let every process make the same calls"
    words = [[text.partition(cure)[0].rstrip().splitlines() for text in own[1:]] for own in said]
    assert words[1] == words[0] == words[2]
    assert all(text.count(cure) == 1 for text in said[1][1:])
    differ = "process 2 differs from process 0 (and 1 more) in call {}"
    assert {row: lines[0] for row, lines in zip(rows, words[0], strict=True)} == {
        row: differ.format(2 if row == "has a call less" else 1) for row in rows
    }
    lines = {row: own[1:] for row, own in zip(rows, words[0], strict=True)}
    usual = lines["has another shape"][0]
    assert re.fullmatch(
        r"  process 0 \(calls: 1\): psum over x=3 by ring \(schedule \w{8}\): float32\[1,12\]",
        usual,
    )
    own = usual.replace("process 0", "process 2")
    ring = usual.partition(": psum")[2]
    assert lines["has another shape"][1] == own.replace("[1,", "[2,")
    assert lines["has a wider dtype"] == [usual, own.replace("float32", "complex64")]
    assert lines["has a dtype as wide"] == [usual, own.replace("float32", "int32")]
    bruck = lines["has another algorithm"][1]
    assert bruck.startswith("  process 2 (calls: 1): psum over x=3 by bruck (schedule ")
    assert bruck.split("(")[2] != usual.split("(")[2]
    psum, pmax = lines["has another order of calls"]
    assert psum.startswith("  process 0 (calls: 2): psum over x=3 by exchange ")
    assert pmax.startswith("  process 2 (calls: 2): pmax over x=3 by exchange ")
    assert lines["has a call less"] == [
        f"  process 0 (calls: 2): psum{ring}",
        "  process 2 (calls: 1): no more calls",
    ]
    refused = "  process 2 (calls: 1): no program, but ValueError: ringcoll.psum(x, axis_name='x'"
    assert lines["has a call that is refused"][1].startswith(refused)


def test_where_one_is_killed_the_others_end_and_say_where_they_were(ends):
    *others, killed = ends["is killed in the middle"]
    assert others[0].status == STATUS
    assert killed.status == -9
    for rank, end in enumerate(others):
        assert end.status in (STATUS, ABORTED), end
        assert "ringcoll.debug.deadline(20) is left by JaxRuntimeError on " in end.text
        where = f"rank {rank} (x={rank}): in ringcoll.psum(ring)/"
        assert where in end.text
        assert end.text.split(where)[1].split("/round ")[0] in ("reduce_scatter", "all_gather")


def test_where_one_never_arrives_all_end_and_say_where_they_were(ends):
    waits, sleeps = ends["never arrives"]
    for end in (waits, sleeps):
        assert end.status == STATUS, end
        assert "ringcoll.debug.deadline(20) is over on " in end.text
        assert "Python is at\n" in end.text
    first = "\nrank 0 (x=0): in ringcoll.psum(ring)/reduce_scatter/round 1, begun "
    assert first in waits.text
    assert "\nno rank has come to a collective of ringcoll\n" in sleeps.text
    assert "in _process\n" in sleeps.text
