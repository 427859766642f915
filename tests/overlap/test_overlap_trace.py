"""Timelines as a trace for Perfetto."""

import json
from collections import defaultdict

import pytest
from hlo_texts import BACK, CHIP, blocking, done, dot, loop, program, start

from ringcoll import overlap
from ringcoll.overlap.tracks import tracks

FRAMES = """FileNames
1 "/home/me/train.py"

FileLocations
1 {file_name_id=1 line=41 end_line=41 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

"""
HIDDEN = program(
    start("s"), dot("y"), done("d", "s"), start("t", "d", BACK), dot("z", "d"), done("e", "t")
)
_BARE = program(
    *(dot("y"), start("s", "y") + ', metadata={op_name="jit(f)/ppermute" stack_frame_id=1}'),
    *(done("d", "s"), dot("z", "d"), blocking("all-reduce", "z")),
)
BARE = _BARE.replace("%matmul (", FRAMES + "%matmul (", 1)


@pytest.fixture(scope="module")
def both():
    return overlap.report(BARE, chip=CHIP), overlap.report(HIDDEN, chip=CHIP)


def test_a_trace_has_a_track_of_the_chip_and_one_of_each_direction(both):
    trace = json.loads(both[0].to_perfetto(both[1]))
    assert trace["displayTimeUnit"] in ("ns", "ms")
    named, sums, ends = {}, defaultdict(float), defaultdict(float)
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        assert event["ph"] in "MX"
        key = event["pid"], event["tid"]
        if event["ph"] == "M":
            named[event["name"], *key] = event["args"]
            continue
        assert event["dur"] > 0
        assert event["ts"] >= ends[key] - 1e-6  # or a viewer would nest it in the one before
        ends[key] = event["ts"] + event["dur"]
        sums[key] += event["dur"]
        sums[event["pid"], event["cat"]] += event["dur"]
        assert event["name"].startswith("exposed: ") == (event["cat"] == "exposed")
    for pid, report in enumerate(both, 1):
        assert named["process_name", pid, 0]["name"] == "jit_f on 4 x toy"
        wanted = ["compute", "links axis 0 +", "links axis 0 -"]
        assert [named["thread_name", pid, tid]["name"] for tid in (1, 2, 3)] == wanted
        assert [sums[pid, 1], ends[pid, 1]] == pytest.approx([report.total * 1e6] * 2)
        assert sums[pid, "exposed"] == pytest.approx(report.exposed * 1e6)
        assert sums[pid, "compute"] == pytest.approx(report.compute * 1e6)
        assert max(sums[pid, 2], sums[pid, 3]) == pytest.approx(report.communication * 1e6)
        assert trace["otherData"]["reports"][pid - 1]["total_us"] == pytest.approx(
            report.total * 1e6
        )
    (sent,) = [e for e in trace["traceEvents"] if e["name"] == "s" and e["pid"] == 1]
    assert sent["args"] == {"source": "/home/me/train.py:41", "at": "train.py:41 ppermute"}


def test_skipped_turns_are_a_segment():
    text = loop("", start("s"), done("next", "s"), bound="40")
    report = overlap.report(text, chip=CHIP)
    (chip, *_) = tracks(report.segments)
    assert chip.segments[-1].stop == pytest.approx(report.total)
    assert any(segment.row == "skipped" for segment in chip.segments)
    (event,) = [e for e in json.loads(report.to_perfetto())["traceEvents"] if "more" in e["name"]]
    assert event["cat"] == "skipped"


def test_simultaneous_transfers_in_one_direction_have_two_tracks():
    report = overlap.report(HIDDEN, chip=CHIP)
    wires = [segment for segment in report.segments if segment.row == "wire"]
    twice = tracks([*report.segments, wires[0]])
    assert [track.name for track in twice] == [
        *("compute", "links axis 0 +", "links axis 0 + (2)", "links axis 0 -")
    ]
