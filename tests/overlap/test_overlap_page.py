"""Timelines as a trace for Perfetto, and as a page: their contents, and moving about in them."""

import json
from collections import defaultdict

import pytest
from browsing import DESK, needs_a_browser
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


# -- the page, in a browser --


@pytest.fixture
def opened(visit, both, tmp_path):
    def open_page(**options):
        file = tmp_path / "timelines.html"
        file.write_text(both[0].to_html(both[1]), encoding="utf-8")
        return visit(file, **options)

    return open_page


def span(page):
    """From when to when, in microseconds."""
    first, _, last, _ = page.locator("#span").inner_text().replace(",", "").split()
    return float(first), float(last)


@needs_a_browser
def test_two_programs_are_shown_on_one_axis(opened, both):
    page = opened(viewport={"width": DESK[0], "height": DESK[1]})
    assert page.locator(".timeline").count() == 2
    total = both[0].total * 1e6
    assert span(page) == (0, pytest.approx(total, rel=1e-3))
    strips = page.locator(".strip[aria-label=compute]")
    for strip, report in zip(strips.all(), both, strict=True):
        box, bars = strip.bounding_box(), strip.locator("rect").all()
        assert len(bars) == sum(s.row != "wire" for s in report.segments)
        end = max(b["x"] + b["width"] for b in (bar.bounding_box() for bar in bars))
        share = (end - box["x"]) / box["width"]
        assert share == pytest.approx(report.total * 1e6 / total, abs=0.01)
    assert f"exposed {both[0].exposed * 1e6:.0f} us" in page.locator(".totals").first.inner_text()


@needs_a_browser
def test_zoom_by_keys_buttons_wheel_and_table(opened, both):
    page, total = opened(), both[0].total * 1e6
    near = pytest.approx
    page.keyboard.press("+")
    assert span(page) == (near(total / 4, rel=1e-3), near(total * 3 / 4, rel=1e-3))
    page.keyboard.press("ArrowRight")
    assert span(page)[0] == near(total * 3 / 8, rel=1e-3)
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    assert span(page)[1] == near(total, rel=1e-3)  # not beyond the end
    page.click("#fit")
    page.click("#closer")
    page.click("#farther")
    assert span(page) == (0, near(total, rel=1e-3))
    strip = page.locator(".strip").first
    strip.hover(position={"x": 1, "y": 10})
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_function("!document.getElementById('span').textContent.startsWith('0 to 4,752')")
    assert span(page)[1] == near(0.8 * total, rel=0.01)
    page.click("#fit")
    page.locator("#tables button", has_text="train.py:41 ppermute").first.click()
    assert span(page)[1] - span(page)[0] == near(3003, rel=0.01)
    assert page.locator("rect.marked").count() >= 2  # on the wire, and exposed


@needs_a_browser
def test_the_tip_describes_the_bar_under_the_pointer(opened):
    page = opened()
    assert not page.locator("#tip").is_visible()
    page.locator(".strip[aria-label=compute] rect").nth(1).hover()
    tip = page.locator("#tip").inner_text().split("\n")
    assert tip[0] == "train.py:41 ppermute"
    assert tip[1].startswith("wait for the wire: exposed: 1,001 us from 1,000")
    assert tip[-1] == "/home/me/train.py:41"
    page.mouse.move(1, 1)
    assert not page.locator("#tip").is_visible()
