"""Transfers that loops carry from turn to turn, and branches, run on paper; see `hlo_texts`.

A transfer takes 1001 us, a matmul 1000 us.
"""

from dataclasses import replace

import pytest
from hlo_texts import (
    BACK,
    CHIP,
    MATMUL,
    SHAPE,
    blocking,
    computation,
    done,
    dot,
    loop_of,
    program,
    start,
    us,
)

from ringcoll import overlap

STATE = f"({SHAPE}, {SHAPE}, u32[])"


def carried(*body, turns=7, before=("s0",), after=(), states=1, given=None):
    """A loop that carries the states of transfers, p1 and so on, and hands on n1 and so on."""
    places = range(1, states + 1)
    carry = f"(s32[], {SHAPE}, {', '.join([STATE] * states)})"
    taken = [f"%p{k} = {STATE} get-tuple-element(%c), index={k + 1}" for k in places]
    left = [f"%q{k} = {STATE} get-tuple-element(%while), index={k + 1}" for k in places]
    w, kept = f"%w = {SHAPE} get-tuple-element(%c), index=1", [f"%n{k}" for k in places]
    turned = loop_of(carry, ", ".join(["%w", *kept]), w, *taken, *body, bound=turns)
    return program(
        *before,
        "%first = s32[] constant(0)",
        f"%carry = {carry} tuple(%first, %w, {', '.join(f'%{name}' for name in given or ['s0'])})",
        f"%while = {carry} while(%carry), condition=%condition, body=%body",
        *left,
        *after,
        before=MATMUL + turned,
    )


def test_instructions_of_two_computations_may_have_one_name():
    """Each turn of the loop sums a few numbers, and after it a sum of many has the same name."""
    few, many = "f32[14]{0:T(128)}", "f32[1400]{0:T(1024)}"
    carry, same = f"(s32[], {few})", "replica_groups={{0,1,2,3}}"
    taken = f"%v = {few} get-tuple-element(%c), index=1"
    turned = loop_of(carry, "%all-reduce.1", taken, f"%all-reduce.1 = {few} all-reduce(%v), {same}")
    text = program(
        "%first = s32[] constant(0)",
        f"%v = {few} constant({{...}})",
        f"%carry = {carry} tuple(%first, %v)",
        f"%while = {carry} while(%carry), condition=%condition, body=%body",
        f"%large = {many} broadcast(%first), dimensions={{}}",
        f"%all-reduce.1 = {many} all-reduce(%large), {same}",
        f"%twice = {many} add(%all-reduce.1, %all-reduce.1)",
        before=turned,
    )
    report = overlap.report(text, chip=CHIP)
    assert [(row.count, row.bytes) for row in report.rows] == [(7, 84), (1, 8400)]
    assert len({row.name for row in report.rows}) == 2
    overlap.assert_collectives(text, {"all-reduce": 8}, {"all-reduce": 7 * 84 + 8400})


def counts(report):
    return {row.name: row.count for row in report.rows}


#: The state itself, and the state taken apart and joined again, as compilers write it.
WHOLE = (f"%n1 = {STATE} bitcast(%s)",)
PARTS = (
    f"%sa = {SHAPE} get-tuple-element(%s), index=0",
    f"%sb = {SHAPE} get-tuple-element(%s), index=1",
    "%sc = u32[] get-tuple-element(%s), index=2",
    f"%sd = {STATE} tuple(%sa, %sb, %sc)",
    f"%n1 = {STATE} opt-barrier(%sd)",
)


@pytest.mark.parametrize(
    ("turns", "compute", "body"),
    [
        (7, 7000, (done("x", "p1"), start("s"), dot("y"), *WHOLE)),
        (7, 7000, (done("x", "p1"), start("s"), dot("y"), *PARTS)),
        # Permutes of two turns share a link.
        (7, 7000, (start("s", "w"), done("x", "p1"), dot("y"), *WHOLE)),
        (0, 0, (done("x", "p1"), start("s"), dot("y"), *WHOLE)),
        # Counted without being run; the counter's 12 bytes are 1.2 ns a turn.
        (100_000, 100_000_120, (done("x", "p1"), start("s"), dot("y"), *WHOLE)),
    ],
)
def test_a_permute_that_ends_in_the_next_turn_counts_in_each(turns, compute, body):
    """Each turn waits, starts the next permute, and runs a matmul over it: 1 us is exposed.

    Nothing runs over the first permute, so 1001 us are exposed. The last one ends after the loop.
    """
    text = carried(*body, turns=turns, before=[start("s0")], after=[done("z", "q1")])
    report = overlap.report(text, chip=CHIP)
    total = 1001 * (1 + turns)
    assert us(report, "total", "compute", "exposed") == (total, compute, total - compute)
    assert us(report, "communication") == (total,)
    assert counts(report) == {"s0": 1, **({"s": turns} if turns else {})}
    if body[0].startswith("%x"):
        assert [(row.matmuls, row.without_matmul) for row in report.rows] == [(0, 1), (turns, 0)][
            : 1 + turns
        ]


def test_each_place_of_the_carry_holds_its_own_transfer():
    """The second starts 400 us after the first and ends at 1401. The loop waits for it alone."""
    before = [start("s0"), dot("v", cycles=400_000), start("t0", pairs=BACK)]
    swapped = f"%n1 = {STATE} bitcast(%p2)", f"%n2 = {STATE} bitcast(%p1)"
    ends = [done("z", "q2"), done("u", "q1")]  # after one turn they have swapped places
    text = carried(*swapped, turns=1, before=before, after=ends, states=2, given=["s0", "t0"])
    report = overlap.report(text, chip=CHIP)
    assert us(report, *("total", "exposed")) == (1401, 601 + 400)
    assert {row.name: round(1e6 * row.exposed) for row in report.rows} == {"s0": 601, "t0": 400}


def test_a_transfer_may_end_in_a_computation_that_is_called():
    """Its first 600 us are under a matmul, and 300 more under one of the computation."""
    inside = dot("v", "w", cycles=300_000), done("g", "e")
    called = computation("ends", {"e": STATE, "w": SHAPE}, *inside)
    lines = start("s"), dot("y", cycles=600_000), f"%z = {SHAPE} call(%s, %y), to_apply=%ends"
    report = overlap.report(program(*lines, before=MATMUL + called), chip=CHIP)
    assert us(report, "total", "compute", "exposed") == (1001, 900, 101)


def branch(name, *lines):
    return computation(name, {"x": SHAPE}, f"%w = {SHAPE} bitcast(%x)", *lines)


@pytest.mark.parametrize(
    ("one", "other", "times"),
    [
        # An all-gather of 1500 us and a matmul of 300 us beat a matmul of 1400 us.
        ([dot("y1", cycles=1_400_000)], [blocking("all-gather"), dot("y2", cycles=300_000)],
         (1800, 300, 1500)),
        ([dot("y1", cycles=1000)], [dot("y2", cycles=500_000)], (500, 500, 0)),
    ],
)  # fmt: skip
def test_the_branch_with_the_most_exposed_time_counts(one, other, times):
    branches = MATMUL + branch("one", *one) + branch("other", *other)
    for order in ("%one, %other", "%other, %one"):
        line = f"%y = {SHAPE} conditional(%x, %x, %x), branch_computations={{{order}}}"
        report = overlap.report(program(line, before=branches), chip=CHIP)
        assert us(report, "total", "compute", "exposed") == times
        assert [row.count for row in report.rows] == [1] * (len(other) - 1)
        assert any("branch with most exposed" in line for line in report.assumptions)


def test_the_least_is_of_the_branch_that_is_expected():
    """A gather of 1500 us, 3000 expected, and a permute of 2 hops with a long matmul."""
    gather = f"%g = {SHAPE} all-gather(%w), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}"
    far = start("s", "w", "source_target_pairs={{0,2}}"), done("d", "s"), dot("l", cycles=9_000_000)
    branches = MATMUL + branch("one", gather) + branch("other", *far)
    line = f"%y = {SHAPE} conditional(%x, %x, %x), branch_computations={{%one, %other}}"
    chip = replace(CHIP, built_in=0.5)
    report = overlap.report(program(line, before=branches), chip=chip)
    assert (report.exposed, report.least["exposed"]) == pytest.approx((3e-3, 1.5e-3))


def test_a_transfer_may_end_in_a_branch():
    lines = f"%w = {SHAPE} constant(0)", dot("u", "w", cycles=400_000), done("g", "e")
    ends = computation("ends", {"e": STATE}, *lines)
    short = branch("short", dot("y1", cycles=300_000))
    line = f"%z = {SHAPE} conditional(%x, %x, %s), branch_computations={{%short, %ends}}"
    text = program(start("s"), dot("v", cycles=500_000), line, before=MATMUL + short + ends)
    report = overlap.report(text, chip=CHIP)
    assert us(report, "total", "exposed") == (1001, 101)
    assert counts(report) == {"s": 1}
