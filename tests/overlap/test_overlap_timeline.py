"""Programs of a few lines, run on paper: every time here was worked out by hand.

See `hlo_texts`: a transfer takes 1001 us, a matmul 1000 us, an addition 300 us.
"""

from dataclasses import replace

import pytest
from hlo_texts import (
    BACK,
    CHIP,
    add,
    blocking,
    done,
    dot,
    loop,
    program,
    start,
    us,
)

from ringcoll import overlap
from ringcoll.overlap import transfers
from ringcoll.overlap.hlo import parse


def totals(*lines):
    """Total, compute, waits for memory and exposed, in microseconds."""
    report = overlap.report(program(*lines), chip=CHIP)
    return us(report, "total", "compute", "memory", "exposed")


@pytest.mark.parametrize(
    ("lines", "times"),
    [
        # Work between start and done hides a transfer; before or after, it hides nothing.
        ([start("s"), dot("y"), done("d", "s")], (1001, 1000, 0, 1)),
        ([start("s"), dot("y", cycles=400_000), done("d", "s")], (1001, 400, 0, 601)),
        ([start("s"), dot("y"), dot("z", "y"), done("d", "s")], (2000, 2000, 0, 0)),
        ([dot("y"), start("s", "y"), done("d", "s")], (2001, 1000, 0, 1001)),
        ([start("s"), done("d", "s"), dot("y", "d")], (2001, 1000, 0, 1001)),
        # Each direction is a queue, and works on while another transfer is waited for.
        ([start("s"), start("t"), done("d", "s"), done("e", "t")], (2002, 0, 0, 2002)),
        ([start("s"), start("t", pairs=BACK), done("d", "s"), done("e", "t")], (1001, 0, 0, 1001)),
        ([start("s"), start("t"), done("d", "s"), dot("y", "d"), done("e", "t")],
         (2002, 1000, 0, 1002)),
    ],
)  # fmt: skip
def test_exposed_time_of_transfers(lines, times):
    assert totals(*lines) == times


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{}", [[0, 1, 2, 3]]),
        ("[1,4]<=[4]", [[0, 1, 2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'b','a'}", [[0, 2, 1, 3]]),
        ("mesh['a'=4,'b'=2] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=([4]) {'a'}", [[0, 2], [1, 3]]),
        ("{{3,1},{0,2}}", [[3, 1], [0, 2]]),
        ("{ {3, 1}, {0, 2} }", [[3, 1], [0, 2]]),
    ],
)
def test_forms_of_replica_groups(text, groups):
    root = parse(program(blocking("all-gather", groups=text))).entry.root
    assert transfers.groups(root, 4) == groups


def test_an_addition_is_priced_by_its_bytes_not_by_its_estimate():
    report = overlap.report(program(add("y"), dot("z", "y")), chip=CHIP)
    assert us(report, "compute") == (300 + 1000,)
    assert report.sources == pytest.approx({"roofline": 300e-6, "estimate": 1000e-6})
    assert any("23% of the compute time from bytes" in line for line in report.assumptions)


def test_the_error_of_estimates_is_that_of_the_chip():
    def assumption(chip, profile=()):
        profiled = overlap.Program(program(dot("y")), profile=dict(profile))
        lines = overlap.report(profiled, chip=chip).assumptions
        return next(line for line in lines if "of the compute time from" in line)

    for name in ("v5e", "v5p", "v6e", "tpu7x"):
        assert "programs measured: compute" in assumption(name, profile={"v": 1})
    assert "12 programs measured: compute -11 to +19 %" in assumption("v6e")
    assert "not measured on this chip" in assumption(CHIP)
    assert assumption("v6e", profile={"y": 10_000_000}).endswith("of the generated code")


def test_the_profile_comes_first_and_serves_equal_instructions():
    # y and z do the same; by the compiler's estimate v takes fewer cycles.
    lines = [dot("y"), dot("z", "y"), dot("v", "z", cycles=500_000)]
    profiled = overlap.Program(program(*lines), profile={"y": 2_000_000})
    report = overlap.report(profiled, chip=CHIP)
    assert us(report, "compute") == (2000 + 2000 + 500,)
    assert report.sources == pytest.approx({"profile": 4e-3, "estimate": 5e-4})


BARE = dot("y").partition(", backend_config")[0]
CODES = "%n = s8[500,500]{1,0:T(8,128)} convert(%x)"


@pytest.mark.parametrize(
    ("lines", "rates", "took"),
    [
        # Three arrays of 1 MB at 10 GB/s take 300 us; 250 MFLOP at 1 TFLOP/s are 250 us.
        ([dot("y", cycles=100_000)], {}, 300),
        ([dot("y", cycles=100_000)], {"hbm": 1e18}, 250),
        ([CODES, dot("y", "n", cycles=100_000)], {"hbm": 1e18}, 100),  # codes may be faster
        ([BARE], {}, 300),
        ([dot("y", cycles=2**63 - 1)], {}, 300),  # the compiler has no estimate
        ([BARE], {"flops": 1e11}, 2500),
    ],
)
def test_a_matmul_takes_at_least_its_bytes_and_its_flops(lines, rates, took):
    report = overlap.report(program(*lines), chip=replace(CHIP, **rates))
    assert us(report, "total", "compute") == (took, took)
    if took == 300:
        assert report.sources == pytest.approx({"roofline": 3e-4})


@pytest.mark.parametrize(
    ("source", "target", "took"), [("", "S(1)", 100), ("S(1)", "", 100), ("", "", 200)]
)
def test_copies_between_memories_run_beside_the_compute(source, target, took):
    x, y = (f"f32[500,500]{{1,0:T(8,128){space}}}" for space in (source, target))
    there = f"%v = {x} bitcast(%x)"
    move = f"%c = ({y}, {x}, u32[]) copy-start(%v)"
    wait = f"%y = {y} copy-done(%c)"
    assert totals(there, move, wait) == (took, 0, took, 0)
    assert totals(there, move, dot("z"), wait) == (1000, 1000, 0, 0)
    early = move + ", cross_program_prefetch_index=0"
    assert totals(there, early, wait) == (took, 0, took, 0)
    part = f"%c = (({x}), {y.replace('500,', '50,')}, u32[]) slice-start(%v)"
    assert totals(there, part, "%y = f32[50,500] slice-done(%c)") == (took / 10, 0, took / 10, 0)


LOOP = (start("s"), dot("y"), done("next", "s"))


DOWN = {"first": "7", "bound": "0", "step": "-1"}
LESS = "%k, %bound), direction=LT"


@pytest.mark.parametrize(
    ("known", "compared", "options", "turns"),
    [
        ("7", LESS, {"bound": "9"}, 7),  # what the compiler knows comes first
        ("-1", LESS, {"bound": "3", "first": "-2"}, 5),  # unless it is negative
        ("", LESS, {}, 7),
        ("", LESS, {"step": "2"}, 4),
        ("", LESS, {"bound": "0", "first": "3"}, 0),
        ("", "%k, %bound), direction=LE", {}, 8),
        ("", "%k, %bound), direction=NE", {}, 7),
        ("", "%k, %bound), direction=GT", DOWN, 7),
        ("", "%k, %bound), direction=GE", DOWN, 8),
        ("", "%k, %bound), direction=NE", DOWN, 7),
        ("", "%k, %bound), direction=GE", DOWN | {"step": "-2"}, 4),
        ("", LESS, {"step": "-1"}, None),  # the step has the wrong sign
        ("", "%k, %bound), direction=GE", DOWN | {"step": "1"}, None),
        ("", "%k, %bound), direction=NE", {"step": "-1"}, None),
        ("", "%k, %bound), direction=NE", {"step": "2"}, None),  # the counter is never 7
        ("", "%k, %bound), direction=EQ", {}, None),
    ],
)
def test_the_body_of_a_loop_counts_once_a_turn(known, compared, options, turns):
    """A turn is 1001 us, of which a matmul hides 1000. A loop of unknown turns is run once."""
    config = f', backend_config={{"known_trip_count":{{"n":"{known}"}}}}' if known else ""
    text = loop(config, *LOOP, **options).replace(LESS, compared)
    report = overlap.report(text, chip=CHIP)
    ran = 1 if turns is None else turns
    assert us(report, "total", "compute", "exposed") == (1001 * ran, 1000 * ran, ran)
    assert [row.count for row in report.rows] == [ran] * (ran > 0)
    assert sum(segment.row == "wire" for segment in report.segments) == ran
    assert report.unread == (() if turns is not None else ("while",))
    noted = any("turns of while cannot be read" in line for line in report.assumptions)
    assert noted == (turns is None)
