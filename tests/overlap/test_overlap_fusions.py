"""Collectives inside fusions, calls and branches, run on paper; see `hlo_texts`."""

import re

import pytest
from hlo_texts import CHIP, MATMUL, SHAPE, computation, dot, loop_of, program, us

from ringcoll import overlap

FULL = "f32[2000,500]{1,0:T(8,128)}"
GATHER = "replica_groups={{0,1,2,3}}, dimensions={0}"
ASYNC = (
    MATMUL
    + computation(
        "begin", {"a": SHAPE},
        f"%g = {FULL} all-gather(%a), {GATHER}",
        f'%as = ({SHAPE}, u32[]) custom-call(%g), custom_call_target="AsyncCollectiveStart"',
    )
    + computation(
        "go_on", {"b": SHAPE, "u": "u32[]", "bw": SHAPE},
        f"%bc = {SHAPE} convolution(%b, %bw), dim_labels=bf_io->bf",
        f"%bg = {FULL} all-gather(%b), {GATHER}",
        f"%bt = ({SHAPE}, {SHAPE}, u32[]) tuple(%bc, %b, %u)",
    )
    + computation(
        "finish", {"e": SHAPE, "v": "u32[]"},
        f"%eg = {FULL} all-gather(%e), {GATHER}",
        f'%ed = {FULL} custom-call(%e, %eg), custom_call_target="AsyncCollectiveDone"',
    )
)  # fmt: skip
GO_ON = dot("m").replace("calls=%matmul", "calls=%go_on").replace("(%x, %w)", "(%s0, %s1, %w)")
SPREAD = (
    f"%s = ({SHAPE}, u32[]) fusion(%x), kind=kCustom, calls=%begin",
    f"%s0 = {SHAPE} get-tuple-element(%s), index=0",
    "%s1 = u32[] get-tuple-element(%s), index=1",
    GO_ON.replace(f"= {SHAPE} fusion", f"= ({SHAPE}, {SHAPE}, u32[]) fusion"),
    f"%m1 = {SHAPE} get-tuple-element(%m), index=1",
    "%m2 = u32[] get-tuple-element(%m), index=2",
    "%d = f32[2000,500]{1,0:T(8,128)} fusion(%m1, %m2), kind=kCustom, calls=%finish",
)
#: A sum; each rank keeps a slice of it.
SUMMED = computation(
    "all-reduce-scatter", {"a": SHAPE},
    "%zero = s32[] constant(0)",
    f"%sum = {SHAPE} all-reduce(%a), replica_groups={{}}",
    "%mine = f32[125,500] dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={125,500}",
)  # fmt: skip
#: The end of a computation of a tpu7x's sparse cores.
SPARSE = '}, execution_thread="sparsecore"'


def test_a_built_in_collective_that_the_compiler_spreads_over_a_matmul():
    report = overlap.report(program(*SPREAD, before=ASYNC), chip=CHIP)
    assert us(report, "total", "compute", "exposed") == (1500, 1000, 500)
    (row,) = report.rows
    assert (row.kind, row.asynchronous, row.matmuls) == ("all-gather", True, 1)


def test_a_matmul_does_not_move_the_buffers_of_a_transfer_spread_over_it():
    """It reads two MB and writes one, 300 us; the operand that it passes on is not written."""
    lines = [line.replace("1000000", "350000") for line in SPREAD]
    assert us(overlap.report(program(*lines, before=ASYNC), chip=CHIP), "compute") == (350,)


def test_a_collective_that_is_spread_over_the_turns_of_a_loop():
    carry = f"(s32[], {SHAPE}, u32[], {SHAPE})"
    body = (
        f"%b0 = {SHAPE} get-tuple-element(%c), index=1",
        "%b1 = u32[] get-tuple-element(%c), index=2",
        f"%w = {SHAPE} get-tuple-element(%c), index=3",
        SPREAD[3].replace("(%s0, %s1", "(%b0, %b1"),
        f"%n1 = {SHAPE} get-tuple-element(%m), index=1",
        "%n2 = u32[] get-tuple-element(%m), index=2",
    )
    loop = loop_of(carry, "%n1, %n2, %w", *body, bound=2)
    lines = [
        *SPREAD[:3],
        "%first = s32[] constant(0)",
        f"%carry = {carry} tuple(%first, %s0, %s1, %w)",
        f"%while = {carry} while(%carry), condition=%condition, body=%body",
        f"%m1 = {SHAPE} get-tuple-element(%while), index=1",
        "%m2 = u32[] get-tuple-element(%while), index=2",
        SPREAD[6],
    ]
    report = overlap.report(program(*lines, before=ASYNC + loop), chip=CHIP)
    assert us(report, "total", "compute", "exposed") == (2000, 2000, 0)
    (row,) = report.rows
    assert (row.count, row.matmuls, row.asynchronous) == (1, 2, True)


def test_a_collective_after_a_spread_one_counts_by_itself():
    # The all-reduce in a fusion reads the result of the gather's matmul; it is not a part of it.
    lines = [
        *SPREAD[:4],
        f"%m0 = {SHAPE} get-tuple-element(%m), index=0",
        "%r = f32[125,500] fusion(%m0), kind=kCustom, calls=%all-reduce-scatter",
        *SPREAD[4:],
    ]
    report = overlap.report(program(*lines, before=ASYNC + SUMMED), chip=CHIP)
    assert [row.kind for row in report.rows] == ["all-gather", "reduce-scatter"]
    # The matmul hides 1000 of 1500 us; the links are free for the second collective then.
    assert us(report, "total", "exposed") == (1500 + 375, 500 + 375)


def test_a_sum_of_which_a_slice_is_kept_may_be_spread_over_a_matmul():
    text = program(*SPREAD, before=ASYNC.replace("all-gather(", "all-reduce("))
    named = re.sub("%(begin|go_on|finish)", r"%all-reduce-scatter.\1", text)
    report = overlap.report(named, chip=CHIP)
    # 3/4 MB over two links, all of it under the matmul.
    assert [(row.kind, row.count) for row in report.rows] == [("reduce-scatter", 1)]
    assert us(report, "total", "exposed", "communication") == (1000, 0, 375)


@pytest.mark.parametrize(
    ("start", "key"), [("call", "to_apply=%"), ("custom-call", "called_computations={%")]
)
@pytest.mark.parametrize(
    ("kind", "wire"), [("reduce-scatter", 375), ("all-gather", 1500), ("all-reduce", 750)]
)
def test_an_asynchronous_call_begins_with_its_update(start, key, kind, wire):
    """A tpu7x's sparse cores run such calls; libtpu writes the second form since 0.0.52."""
    body = computation(
        "offloaded", {"a": SHAPE},
        f"%b = ({SHAPE}) tuple(%a)",
        f"%c = {SHAPE} get-tuple-element(%b), index=0",
        f"%rs = f32[125,500] {kind}(%c), replica_groups={{}}, dimensions={{0}}", end=SPARSE,
    )  # fmt: skip
    closed = "}" if "{" in key else ""
    lines = [
        f"%s = ((), (), s32[1]) {start}-start(), {key}offloaded{closed}",
        dot("y"),
        f"%u = (({SHAPE}), f32[125,500]) {start}-update(%s, %y)",
        dot("z", cycles=300_000),
        f"%d = f32[125,500] {start}-done(%u)",
    ]
    report = overlap.report(program(*lines, before=MATMUL + body), chip=CHIP)
    # 300 us of compute stand between the update and its end.
    expected = (1000 + wire, 1300, wire - 300)
    assert us(report, "total", "compute", "exposed") == expected
    assert [(row.kind, row.asynchronous) for row in report.rows] == [(kind, True)]
    assert [row.matmuls for row in report.rows] == [1]


def test_an_asynchronous_call_that_sends_nothing_is_free_and_noted():
    body = computation("formats", {"a": SHAPE}, f"%c = {SHAPE} copy(%a)", end=SPARSE)
    begun = "%s = ((), (), s32[1]) call-start(), to_apply=%formats"
    update = f"%u = (({SHAPE}), {SHAPE}) call-update(%s, %y)"
    lines = begun, dot("y"), update, f"%d = {SHAPE} call-done(%u)"
    report = overlap.report(program(*lines, before=MATMUL + body), chip=CHIP)
    assert us(report, "total", "compute", "exposed") == (1000, 1000, 0)
    assert any("sparse cores" in line for line in report.assumptions)


#: A fusion within a fusion takes a tenth of w (1 MB): 50 rows, as they are or transposed.
SLICED = computation(
    "slice", {"v": SHAPE, "at": "s32[]"},
    "%z = s32[] constant(0)",
    f"%same = {SHAPE} bitcast(%v)",
    "%wide = f64[500,500] convert(%same)",
    "%part = f64[50,500] dynamic-slice(%wide, %at, %z), dynamic_slice_sizes={50,500}",
    "%narrow = f32[50,500] convert(%part)",
) + computation(
    "inner", {"u": SHAPE, "there": "s32[]"},
    "%rows = f32[50,500] fusion(%u, %there), kind=kLoop, calls=%slice",
    "%columns = f32[500,50] transpose(%rows), dimensions={1,0}",
)  # fmt: skip
PRODUCT = computation(
    "product", {"a": SHAPE, "b": SHAPE, "i": "s32[]"},
    "%c = f32[500,50] fusion(%b, %i), kind=kLoop, calls=%inner",
    "%d = f32[500,50] convolution(%a, %c), dim_labels=bf_io->bf",
)  # fmt: skip
CALL = "%y = f32[500,50] fusion(%x, %w, %i0), kind=kOutput, calls=%product"


def test_nested_fusions_read_the_slice_or_the_whole_array():
    half = "%n = f32[50,500] convert(%part)\n  ROOT %narrow = f32[25,500] slice(%n)"
    halved = SLICED.replace("ROOT %narrow = f32[50,500] convert(%part)", half)
    sum_too = f"%e = {SHAPE} add(%a, %b)\n  ROOT %d = f32[500,50] convolution(%e, %c)"
    both = PRODUCT.replace("ROOT %d = f32[500,50] convolution(%a, %c)", sum_too)
    for before, read in ((SLICED + PRODUCT, 100_000), (halved + PRODUCT, 50_000),
                         (SLICED + both, 1_000_000)):  # fmt: skip
        report = overlap.report(program("%i0 = s32[] constant(3)", CALL, before=before), chip=CHIP)
        # All of x, what is read of w, the index, and a tenth of a MB written.
        moved = 1_000_000 + read + 4 + 100_000
        assert 10e9 * report.compute == pytest.approx(moved)


def test_a_fusion_of_slices_reads_only_the_slices():
    body = computation(
        "cut", {"v": SHAPE},
        "%head = f32[100,500] slice(%v), slice={[0:100], [0:500]}",
        "%tail = f32[50,500] slice(%v), slice={[450:500], [0:500]}",
        f"%both = (f32[100,500], f32[50,500], {SHAPE}) tuple(%head, %tail, %v)",
    )  # fmt: skip
    shapes = f"(f32[100,500], f32[50,500], {SHAPE})"
    line = f"%y = {shapes} fusion(%w), kind=kLoop, calls=%cut"
    report = overlap.report(program(line, before=body), chip=CHIP)
    # Both parts are read and written. The operand that is passed on is neither.
    assert report.compute * 10e9 == pytest.approx(2 * (200_000 + 100_000))


def test_a_slice_and_an_update_in_place_move_the_bytes_they_touch():
    given = {"p": SHAPE, "row": "f32[1,500]", "at": "s32[]"}
    update = f"%dus = {SHAPE} dynamic-update-slice(%p, %row, %at, %at)"
    outer = f"%f = {SHAPE} fusion(%p, %row, %at), kind=kLoop, calls=%update"
    body = computation("update", given, update)
    body += computation("outer", given, outer, f"%same = {SHAPE} bitcast(%f)")
    lines = (
        "%i0 = s32[] constant(3)",
        "%row = f32[1,500] dynamic-slice(%w, %i0, %i0), dynamic_slice_sizes={1,500}",
        f"%y = {SHAPE} fusion(%x, %row, %i0), kind=kLoop, calls=%outer",
    )
    report = overlap.report(program(*lines, before=body), chip=CHIP)
    # Both read and write 2,000 bytes; the indices are 4 bytes each.
    assert report.compute * 10e9 == pytest.approx(4000 + 8 + 4000 + 4)
