"""The figures of a report, each worked out on paper: bytes, FLOPs, hops, shares, counts.

No two sizes, bytes or numbers of ranks of a case are equal where another formula could use them.
See `hlo_texts`: a link carries 1 GB/s each way, and a hop takes 1 us; x is 1 MB, f32[500,500].
"""

from dataclasses import replace

import pytest
from hlo_texts import CHIP, SHAPE, blocking, done, dot, loop, program, start, untiled, us

from ringcoll import overlap
from ringcoll.placement.network import Network


def read(*lines, ranks=4, network=None, chip=CHIP, **options):
    """The report of a program of these lines."""
    text = program(*lines, ranks=ranks, **options)
    return overlap.report(overlap.Program(text, network=network), chip=chip)


#: The bits of an element.
BITS = {
    2: "s2 u2",
    4: "s4 u4 f4e2m1fn",
    8: "pred s8 u8 f8e3m4 f8e4m3 f8e4m3fn f8e4m3fnuz f8e4m3b11fnuz f8e5m2 f8e5m2fnuz f8e8m0fnu",
    16: "s16 u16 f16 bf16",
    32: "s32 u32 f32",
    64: "s64 u64 f64 c64",
    128: "c128",
}
DTYPES = [(dtype, bits) for bits, names in BITS.items() for dtype in names.split()]


@pytest.mark.parametrize(("dtype", "bits"), DTYPES)
def test_a_message_has_the_bytes_of_its_dtype(dtype, bits):
    """1,000 x 24 elements: 3,000 bytes for each bit of one. Also read and written by memory."""
    array = f"{dtype}[1000,24]{{1,0:T(8,128)}}"
    before = f"%v = {array} constant(0)"
    send = start("s", "v").replace(SHAPE, array)
    (row,) = read(before, send, done("d", "s").replace(SHAPE, array)).rows
    assert (row.bytes, row.hops) == (3000 * bits, 1)
    assert row.wire == pytest.approx(3000 * bits * 1e-9 + 1e-6)
    copied = read(before, f"%c = {array} copy(%v)")
    assert copied.compute == pytest.approx(2 * 3000 * bits / 10e9)


def test_a_token_and_an_array_of_size_0_have_no_bytes():
    for dtype in ("token[]", "f32[0,24]{1,0}", "f8e5m2[24,0]{1,0}"):
        line = f"%v = {dtype} constant(0)", f"%y = {dtype} all-reduce(%v), replica_groups={{}}"
        (row,) = read(*line).rows
        assert (row.bytes, row.wire) == (0, 0)


# -- collectives: two operands of 1 MB and 0.1 MB, on a ring of five, where a rank has two links --

SMALL = "bf16[500,100]{1,0:T(8,128)}"
OPERANDS = (f"%v = {SMALL} constant(0)",)
RING = "source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,0}}"
ALL, UNEVEN = "{{0,1,2,3,4}}", "{{0,1,2},{3,4}}"


@pytest.mark.parametrize(
    ("opcode", "groups", "sent", "taken"),
    [
        # Of each operand, for one megabyte: what a rank sends, and the time over its links.
        ("all-gather", ALL, 4, 2000),  # 4 shards, over two links
        ("reduce-scatter", ALL, 0.8, 400),  # 4/5
        ("all-reduce", ALL, 1.6, 800),  # 4/5, twice
        ("collective-broadcast", ALL, 1, 500),
        # A rank's blocks of 1/5 go 1 + 1 + 2 + 2 hops: 30 in all, over 10 links.
        ("all-to-all", ALL, 0.8, 600),
        # In a group of three in a row, the first rank has one link to the others.
        ("all-gather", UNEVEN, 2, 2000),
        ("reduce-scatter", UNEVEN, 2 / 3, 2000 / 3),
        ("all-reduce", UNEVEN, 4 / 3, 4000 / 3),
        ("collective-broadcast", UNEVEN, 1, 1000),
        # 1 + 2 + 1 + 1 + 2 + 1 hops of 1/3 and 2 of 1/2, over 6 links, are 611 us; by a port 667.
        ("all-to-all", UNEVEN, 2 / 3, 2000 / 3),
    ],
)
@pytest.mark.parametrize(("x", "megabytes"), [("x", 1), ("x, %v", 1.1), ("v, %x, %v", 1.2)])
def test_built_in_collectives_send_all_their_operands(opcode, groups, sent, taken, x, megabytes):
    report = read(*OPERANDS, blocking(opcode, x, groups), ranks=5)
    (row,) = report.rows
    assert (row.kind, row.hops, row.count, row.asynchronous) == (opcode, 0, 1, False)
    assert row.bytes == pytest.approx(1e6 * megabytes * sent)
    assert 1e6 * row.wire == pytest.approx(megabytes * taken)
    assert report.exposed == report.total == report.communication == pytest.approx(row.wire)
    # With a start of 7 us for each link to the farthest rank, which is two links away, and shares.
    slow = replace(CHIP, start=7e-6, built_in=0.5, built_in_sum=0.25)
    found = read(*OPERANDS, blocking(opcode, x, groups), ranks=5, chip=slow)
    share = 0.25 if opcode == "all-reduce" else 0.5
    assert 1e6 * found.exposed == pytest.approx(14 + megabytes * taken / share)
    assert found.least == {"total": report.total, "exposed": report.exposed} == report.least


def test_a_ragged_all_to_all_sends_only_its_first_operand():
    ragged = blocking("ragged-all-to-all", x="v, %x, %v, %v, %v, %v", groups=ALL)
    (row,) = read(*OPERANDS, ragged, ranks=5).rows
    assert row.bytes == pytest.approx(0.08e6)
    assert 1e6 * row.wire == pytest.approx(60)


@pytest.mark.parametrize(
    ("operand", "sizes", "sent"),
    [
        ("%x", "{100,500}", 200_000),
        ("%x", "{100,500},{7,3}", 200_084),
        ("%p", "{9},{2,4}", 36 + 16),
    ],
)
def test_a_permute_in_place_sends_its_slices(operand, sizes, sent):
    """Its other operands are what it writes into, and where slices begin there and here."""
    lines = (
        "%zero = s32[] constant(0)",
        "%at = (s32[], s32[]) tuple(%zero, %zero)",
        f"%p = ({SHAPE}, {SMALL}) tuple(%x, %v)",
        f"%cp = {SHAPE} collective-permute({operand}, %w, %at, %at), {RING}, "
        f"slice_sizes={{{sizes}}}",
    )
    (row,) = read(*OPERANDS, *lines, ranks=5).rows
    assert row.bytes == sent


def test_a_combined_permute_sends_every_operand():
    lines = start("s", "x, %v", RING), done("d", "s")
    report = read(*OPERANDS, *lines, ranks=5)
    assert (report.rows[0].bytes, report.rows[0].hops) == (1_100_000, 1)
    assert us(report, "total", "exposed", "communication") == (1101,) * 3


def shifted(n, shift):
    return [(rank, (rank + shift) % n) for rank in range(n)]


@pytest.mark.parametrize(
    ("n", "closed", "pairs", "hops", "taken", "ways"),
    [
        # Half round a ring both ways are as short: all go ahead, and four share each link.
        (8, True, shifted(8, 4), 4, 4004, "+"),
        (8, True, [(0, 4)], 4, 4004, "+"),
        (8, True, [(5, 1)], 4, 4004, "+"),
        (8, True, shifted(8, 3), 3, 3003, "+"),
        (8, True, shifted(8, 5), 3, 3003, "-"),
        (7, True, shifted(7, 3), 3, 3003, "+"),
        (7, True, shifted(7, 4), 3, 3003, "-"),
        (2, True, shifted(2, 1), 1, 1001, "+-"),
        # A line is not closed: the last sends back to the first by every link.
        (8, False, shifted(8, 1), 7, 7007, "+-"),
        (8, False, [(7, 0)], 7, 7007, "-"),
        # 0 and 1 to 2 share a link, and 3 to 2 is another way: the second waits for the first.
        (8, True, [(0, 2), (1, 2), (3, 2)], 2, 2002, "+-"),
        # Three messages by one link, though none takes more than two hops.
        (8, True, [(0, 2), (1, 2), (1, 3)], 2, 3002, "+"),
        (8, True, [(3, 3)], 0, 0, ""),
        (8, True, [], 0, 0, ""),
    ],
)
def test_a_permute_takes_its_hops_or_the_messages_of_its_busiest_link(
    n, closed, pairs, hops, taken, ways
):
    network = Network(tuple((rank,) for rank in range(n)), (closed,))
    written = ",".join(f"{{{a},{b}}}" for a, b in pairs)
    lines = start("s", pairs=f"source_target_pairs={{{written}}}"), done("d", "s")
    report = read(*lines, ranks=n, network=network)
    (row,) = report.rows
    assert (row.bytes, row.hops, round(1e6 * row.wire)) == (1_000_000, hops, taken)
    shown = {way for segment in report.segments if segment.row == "wire" for way in segment.ways}
    assert shown == {f"axis 0 {way}" for way in ways if taken}
    far = [line for line in report.assumptions if "order the devices" in line]
    assert [f"a {row.kind} goes {hops} hops; " in line for line in far] == [True] * (hops > 2)
    if pairs != shifted(8, 4):  # that may be along an axis of two
        unknown = overlap.report(program(*lines, ranks=n), chip=CHIP)  # perhaps they are neighbours
        assert not any("order the devices" in line for line in unknown.assumptions)


def test_a_message_along_two_axes_takes_the_first_axis_first():
    """From (0, 3) to (2, 0) of 4 x 4, rows closed: two hops down, one hop ahead."""
    places = tuple((row, column) for row in range(4) for column in range(4))
    network = Network(places, (False, True))
    assert network.path(3, 8) == [((0, 3), (1, 3)), ((1, 3), (2, 3)), ((2, 3), (2, 0))]
    lines = start("s", pairs="source_target_pairs={{3,8}}"), done("d", "s")
    report = read(*lines, ranks=16, network=network)
    assert (report.rows[0].hops, us(report, "total")) == (3, (3003,))
    (wire,) = (segment for segment in report.segments if segment.row == "wire")
    assert wire.ways == ("axis 0 +", "axis 1 +")


# -- rows and runs --

HIDDEN = start("s"), dot("y"), done("next", "s")
BARE = start("s"), done("next", "s"), dot("y", "next")


def with_another(text, *lines):
    """The program, with further lines before the end of its entry."""
    head, last = text.rsplit("  ROOT ", 1)
    return f"{head}  {(chr(10) + '  ').join(lines)}\n  ROOT {last}"


@pytest.mark.parametrize(
    ("body", "bare", "of_permutes", "of_gathers"),
    [(HIDDEN, 1, 0, 1 / 8), (BARE, 8, 7 / 8, 1 / 8)],
)
def test_without_times_every_run_of_a_collective_counts(body, bare, of_permutes, of_gathers):
    """A permute of seven turns, and a gather that nothing hides."""
    report = overlap.report(untiled(with_another(loop("", *body), blocking("all-gather"))))
    assert {row.kind: row.count for row in report.rows} == {
        "all-gather": 1,
        "collective-permute": 7,
    }
    assert report.exposed_share == bare / 8
    assert report.exposed_share_of("collective-permute") == of_permutes
    assert report.exposed_share_of("all-gather") == of_gathers
    assert report.exposed_share_of("all-reduce") == 0
    assert report.summary == f"{bare} of 8 collectives exposed ({bare / 8:.1%})"
    lines = str(report).splitlines()
    cells = {cells[3]: cells[:3] for line in lines[3:5] if (cells := line.split())}
    assert cells == {
        "all-gather": ["1", "12.5", "1"],
        "collective-permute": [f"{bare - 1}", f"{100 * of_permutes:.1f}", "7"],
    }
    assert f"{8 - bare} of 8 collectives have a matmul between start and done" in lines


def test_with_times_a_row_sums_its_runs():
    """Seven turns of 1001 us on the wire under 600 us: 401 us a turn, 2807 in all; and 750."""
    lines = start("s"), dot("y", cycles=600_000), done("next", "s")
    text = with_another(loop("", *lines), blocking("all-reduce"))
    report = overlap.report(text, chip=CHIP)
    assert us(report, "total", "compute", "exposed") == (7757, 4200, 3557)
    assert us(report, "communication") == (7 * 1001 + 750,)
    by_kind = {row.kind: row for row in report.rows}
    permute, summed = by_kind["collective-permute"], by_kind["all-reduce"]
    assert (permute.count, permute.matmuls, permute.without_matmul) == (7, 7, 0)
    assert (summed.count, summed.matmuls, summed.without_matmul) == (1, 0, 1)
    assert permute.flops == report.flops == 7 * 250e6
    assert [round(1e6 * one) for one in (permute.wire, permute.compute, permute.exposed)] == [
        *(1001, 4200, 2807)
    ]
    assert report.exposed_share_of("collective-permute") == pytest.approx(2807 / 7757, rel=1e-3)
    cells = [line.split()[:4] for line in str(report).splitlines()[3:5]]
    assert cells == [
        ["2807.0", "36.2", "7", "collective-permute"],
        ["750.0", "9.7", "1", "all-reduce"],
    ]
    details = report.details()
    assert "each: 1.00 MB, 1 hop, 1001.0 us on the wire; 600.0 us of compute, 0.2 GFLOP" in details
    bare = "each: 1.50 MB, 750.0 us on the wire; 0.0 us of compute, 0.0 GFLOP under it; blocking\n"
    assert bare in details


def test_totals_in_words():
    figures = {"total": 7777e-6, "compute": 4200e-6, "memory": 77e-6, "exposed": 3500e-6}
    sizes = {"temporaries": 7 * 2**19, "program_bytes": 2**18}
    report = replace(read(*BARE), **figures, communication=5000e-6, least={}, **sizes)
    first, *_ = lines = str(report).splitlines()
    total = "total 7777 us = compute 4200 + memory 77 + {}exposed 3500 us (45.0%)"
    assert first == "jit_f on 4 x toy: " + total.format("")
    ranges = replace(report, least={"total": 7000e-6, "exposed": 2723e-6})
    words = total.format("").replace("7777", "7000 to 7777").replace("3500", "2723 to 3500")
    assert str(ranges).splitlines()[0] == f"jit_f on 4 x toy: {words}"
    host = replace(report, host=21e-6, unpriced=("k", "m"))
    waits = total.format("waits for the host 21 + ")
    assert str(host).splitlines()[0] == f"jit_f on 4 x toy: {waits}, without a price: k, m"
    assert lines[5:7] == [
        "the busiest link is busy for 5000 us; the total is 55.5% above the longer of that and "
        "compute",
        "temporaries 3.5 MiB, program 0.2 MiB",
    ]
    assert "the total is 85.2% above" in str(replace(report, communication=1e-6))
    assert report.summary == "3500 of 7777 us exposed (45.0%)"


def test_details_of_a_line_have_mean_bytes_and_most_hops():
    """Seven messages of 1 MB to a neighbour, 1001 us, and one of 0.1 MB over two links, 202 us."""
    at = ', metadata={op_name="f/ppermute" source_file="a.py" source_line=9}'
    body = start("s") + at, dot("y"), done("next", "s")
    small = start("far", "v", "source_target_pairs={{0,2}}").replace(SHAPE, SMALL) + at
    others = (*OPERANDS, small, done("e", "far").replace(SHAPE, SMALL))
    text = with_another(loop("", *body), *others)
    report = overlap.report(text, chip=CHIP)
    assert report.rows[0].at == report.rows[1].at == "a.py:9 ppermute"
    details = "each: 0.89 MB, 2 hops, 901.1 us on the wire; 875.0 us of compute, 0.2 GFLOP under it"
    assert details in report.details()
    assert details not in str(report)


# -- FLOPs: two for each multiply-add --


@pytest.mark.parametrize(
    ("a", "b", "out", "line", "adds"),
    [
        ("4,6", "6,10", "4,10", "dot(%a, %b), lhs_contracting_dims={1}", 4 * 6 * 10),
        ("6,4", "6,10", "4,10", "dot(%a, %b), lhs_contracting_dims={0}", 4 * 6 * 10),
        ("3,4,6", "3,6,10", "3,4,10",
         "dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}", 3 * 4 * 6 * 10),
        ("3,4,6", "3,6,10", "4,10", "dot(%a, %b), lhs_contracting_dims={0,2}", 3 * 4 * 6 * 10),
        ("4,6", "6,10", "4,10", "convolution(%a, %b), dim_labels=bf_io->bf", 4 * 6 * 10),
        ("4,6", "10,6", "4,10", "convolution(%a, %b), dim_labels=bf_oi->bf", 4 * 6 * 10),
        ("4,6", "6,10", "10,4", "convolution(%a, %b), dim_labels=bf_io->fb", 4 * 6 * 10),
        # One spatial dimension: a tap at 5 places, each whole: 3 steps of 3 taps.
        ("2,5,4", "3,4,7", "2,3,7",
         "convolution(%a, %b), window={size=3}, dim_labels=b0f_0io->b0f", 2 * 4 * 7 * 9),
        # Padded: 5 steps of 3 taps, of which one is on the padding at each end.
        ("2,5,4", "3,4,7", "2,5,7",
         "convolution(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", 2 * 4 * 7 * 13),
        ("2,5,4", "3,4,7", "2,4,7",  # at the low end alone
         "convolution(%a, %b), window={size=3 pad=1_0}, dim_labels=b0f_0io->b0f", 2 * 4 * 7 * 11),
        ("2,5,4", "3,4,7", "2,2,7",  # every second place
         "convolution(%a, %b), window={size=3 stride=2}, dim_labels=b0f_0io->b0f", 2 * 4 * 7 * 6),
        # Values at 0, 2, 4: the windows from 0, 1 and 2 hold two, one and two of them.
        ("2,3,4", "3,4,7", "2,3,7",
         "convolution(%a, %b), window={size=3 lhs_dilate=2}, dim_labels=b0f_0io->b0f",
         2 * 4 * 7 * 5),
        ("2,5,4", "3,4,7", "2,1,7",  # taps at 0, 2, 4
         "convolution(%a, %b), window={size=3 rhs_dilate=2}, dim_labels=b0f_0io->b0f",
         2 * 4 * 7 * 3),
        # Two spatial dimensions: 2 steps of 3 taps, and 4 of which one tap is padding at each end.
        ("1,4,4,5", "3,3,5,7", "1,2,4,7",
         "convolution(%a, %b), window={size=3x3 pad=0_0x1_1}, dim_labels=b01f_01io->b01f",
         5 * 7 * 6 * 10),
    ],
)  # fmt: skip
def test_flops_of_products(a, b, out, line, adds):
    operands = f"%a = f32[{a}]{{0}} constant(0)", f"%b = f32[{b}]{{0}} constant(0)"
    assert read(*operands, f"%y = f32[{out}]{{0}} {line}").flops == 2 * adds
