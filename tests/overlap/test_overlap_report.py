"""Reports: what they take, refuse, print, write and draw."""

import json
from dataclasses import replace
from functools import partial
from itertools import permutations
from xml.etree import ElementTree

import jax
import pytest
from hlo_texts import (
    CHIP,
    MATMUL,
    SHAPE,
    blocking,
    computation,
    done,
    dot,
    program,
    start,
    untiled,
    us,
)

from ringcoll import overlap
from ringcoll.costs import DEVICES
from ringcoll.overlap import hlo
from ringcoll.overlap.options import SETS, in_words
from ringcoll.overlap.picture import LOOKS, as_svg
from ringcoll.overlap.rows import LineWork, table_lines
from ringcoll.overlap.timeline import Segment
from ringcoll.placement.network import Network

SVG = "{http://www.w3.org/2000/svg}"
HIDDEN = program(start("s"), dot("y"), done("d", "s"), dot("z", "d"))
BARE = program(dot("y"), start("s", "y"), done("d", "s"))


def at(instruction, name):
    """An instruction on a line of source."""
    return f'{instruction}, metadata={{op_name="{name}" source_file="a.py" source_line=9}}'


def test_text_is_parsed_into_instructions():
    line = (
        "%f.1 = (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/u32[], pred[2], s4[3]) fusion("
        'f32[2,2]{1,0} %x, %w), kind=kLoop, calls=%matmul, metadata={op_name="a, b={c}" line=3}, '
        'backend_config={"estimated_cycles":"12","list":["1","2"],"debug":"say \\"x, y}\\""}'
    )
    found = hlo.parse(program(line)).entry.root
    assert (found.name, found.opcode, found.operands) == ("f.1", "fusion", ("x", "w"))
    assert found.shapes[0] == hlo.Shape("bf16", (8, 128), space=1)
    assert [shape.bytes for shape in found.shapes] == [2048, 4, 2, 1.5]
    assert found.called == ("matmul",)
    assert found.number("estimated_cycles") == 12
    assert found.attribute("list") == '["1","2"]'
    assert found.attribute("none_such") is None
    assert found.root


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("module @jit_f {}", "no line begins with 'HloModule'"),
        (HIDDEN.replace("is_scheduled=true, ", ""), r"not scheduled.*compile\(\)"),
        (HIDDEN[: HIDDEN.index("ENTRY")], "no ENTRY"),
        (HIDDEN[: HIDDEN.index("%y =") + 30], "no ENTRY"),
        (HIDDEN[: HIDDEN.index("%y =") + 30] + "\n}\n", r"cannot be read: '  %y = f32"),
        (HIDDEN.replace("calls=%matmul", "calls=\n  {\n  }"), r"jit_f is .* canonical .*as_text"),
        (HIDDEN + BARE.replace("jit_f", "jit_g"), "has 2 programs, HloModule jit_f, jit_g; pass"),
        (program(blocking("all-gather", groups="mesh['a'=4] {'b'}")), "=mesh.*does not know"),
    ],
)
def test_text_that_is_not_scheduled_hlo_is_refused(text, complaint):
    with pytest.raises(overlap.HloError, match=complaint):
        overlap.report(text, chip=CHIP)


def test_bad_arguments_of_report_raise():
    with pytest.raises(TypeError, match=r"got builtins\.int"):
        overlap.report(3)
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
        overlap.report(HIDDEN, mesh=("x",))
    with pytest.raises(ValueError, match="nothing says of which; pass chip='v5e'"):
        overlap.report(HIDDEN)


COLUMNS = "{{0,1,2,3},{4,5,6,7}}"
ROWS = "{{0,4},{1,5},{2,6},{3,7}}"
#: What JAX 0.12 writes for these groups.
NAMED = "mesh['y'=2,'x'=4] {'%s'}"
NEXT = "source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}"
OVER = "source_target_pairs={{0,2},{1,3},{2,4},{3,5},{4,6},{5,7},{6,0},{7,1}}"
IN_FOURS = "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
IN_PAIRS = "source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}"


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([blocking("all-gather", groups=COLUMNS)], "all-gather.1 of jit_f sends within 2 groups"),
        ([blocking("all-reduce", groups=ROWS)], "all-reduce.1 of jit_f sends within 4 groups"),
        ([blocking("all-to-all", groups="[4,2]<=[2,4]T(1,0)")],
         "all-to-all.1 of jit_f sends within 4 groups"),
        ([start("s", pairs=IN_FOURS), done("d", "s")], "s of jit_f sends within 2 groups of ranks"),
        ([start("s", pairs=IN_PAIRS), done("d", "s")], "s of jit_f sends within 4 groups of ranks"),
        ([start("s", pairs=OVER), done("d", "s")],
         "s of jit_f sends within 2 groups of ranks"),
        # The text names only one axis, and not that of the second.
        ([blocking("all-reduce", groups="mesh['d'=8] {'d'}"),
          blocking("all-gather", "all-reduce.1", COLUMNS)], "all-gather.1 of jit_f sends within 2"),
    ],
)  # fmt: skip
def test_a_text_with_groups_along_unknown_axes_needs_the_mesh(lines, named):
    text = program(*lines, ranks=8)
    reads = overlap.report, overlap.assert_overlapped, overlap.waste
    for read in reads:
        with pytest.raises(ValueError, match=rf"overlap: {named}.*pass mesh="):
            read(text, chip=CHIP)
    assert overlap.collectives(text)  # which has no times
    overlap.report(untiled(text))
    mesh = jax.make_mesh((2, 4), ("y", "x"))
    assert overlap.report(text, chip=CHIP, mesh=mesh).timed


@pytest.mark.parametrize(
    ("lines", "took", "taken"),
    [
        ([blocking("all-gather", groups="{{0,1,2,3,4,5,6,7}}")], 3500, "8 ranks taken for a ring,"),
        ([blocking("all-gather", groups="{}")], 3500, "8 ranks taken for a ring,"),
        ([start("s"), done("d", "s")], 3003, "8 ranks taken for a ring,"),
        # By Bruck's algorithm, all ranks send to the next one, then to the one after.
        ([start("s", pairs=NEXT), done("d", "s"),
          start("u", "d", OVER), done("e", "u")], 1001 + 2002,
         "8 ranks taken for a ring,"),
        # Of a ring of four in a row: 3 MB over two links. Of two, 1 MB over one.
        ([blocking("all-gather", groups=NAMED % "x")], 1500, "8 ranks taken for 2x4 rings,"),
        ([blocking("all-gather", groups=NAMED % "y")], 1000, "8 ranks taken for 2x4 rings,"),
        ([blocking("all-gather", groups=NAMED % "x"), start("s", "all-gather.1", IN_FOURS),
          done("d", "s")], 1500 + 1001, "8 ranks taken for 2x4 rings,"),
        ([blocking("all-gather", groups=NAMED % "x"), blocking("all-to-all", "all-gather.1", ROWS)],
         1500 + 500, "8 ranks taken for 2x4 rings,"),
    ],
)  # fmt: skip
def test_a_text_without_a_mesh_has_rings_along_the_axes_that_it_names(lines, took, taken):
    report = overlap.report(program(*lines, ranks=8), chip=CHIP)
    assert us(report, "total") == (took,)
    assert any(taken in assumed for assumed in report.assumptions)


def test_a_report_of_a_cpu_program_says_what_is_widened():
    cpu, tpu = (str(overlap.report(text, chip=CHIP)) for text in (untiled(HIDDEN), HIDDEN))
    assert "in a CPU program, bf16 has four bytes" in cpu
    assert "in a CPU program, bf16 has four bytes" in str(overlap.report(untiled(HIDDEN)))
    assert "bf16 has" not in tpu + str(overlap.report(untiled(HIDDEN), chip="h100"))


SC, V6E = overlap.OPTIONS["sparse cores"], "TPU v6 lite"


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (SC, V6E, "sparse cores"),
        (
            SC | {"xla_tpu_enable_all_gather_offload_tracing": True, "x": 1},
            V6E,
            "sparse cores, x=1",
        ),
        (SC, "cpu", "sparse cores"),
        (overlap.OPTIONS["vmem 96 MiB"] | {"x": 1}, "TPU v5", "vmem 96 MiB (for v6e), x=1"),
        (
            {n: v for n, v in SC.items() if "scatter" not in n},
            "TPU v5",
            "sparse cores: all-gather, sparse cores: all-reduce",
        ),
        (
            overlap.OPTIONS["sparse cores: all-reduce"],
            "TPU v5 lite",
            "sparse cores: all-reduce (for v5p, v6e, tpu7x; not with v5e, which has none: it takes "
            "the options, and is slower)",
        ),
    ],
)
def test_options_are_named_by_their_sets(options, kind, words):
    assert ", ".join(in_words(options, kind)) == words


def test_sets_that_give_an_option_two_values_say_so():
    for (name, one), (other, two) in permutations(overlap.OPTIONS.items(), 2):
        family = other.partition(":")[0]
        if not name.startswith(family) and any(two.get(k, v) != v for k, v in one.items()):
            assert family in SETS[name]["clashes"], (name, other)


def test_sparse_cores_are_those_that_auto_knows():
    known = {name for name, model in DEVICES.items() if model.sparse_cores}
    assert {*SETS["sparse cores"]["chips"]} == known


@pytest.mark.parametrize(
    ("chip", "notes", "lines", "named"),
    [
        ("v6e", (), [blocking("all-gather")], True),
        ("v5p", ("compiled with vmem 96 MiB",), [at(blocking("all-reduce"), "psum")], True),
        ("v6e", ("compiled with sparse cores: all-gather",), [blocking("all-gather")], False),
        ("v5e", (), [blocking("all-gather")], False),  # which has none
        ("tpu7x", (), [blocking("all-gather")], False),  # by default
        ("v6e", (), [start("s"), done("d", "s")], False),  # a permute stays on the core
    ],
)
def test_advice_names_sparse_cores_where_they_may_help(chip, notes, lines, named):
    report = replace(overlap.report(program(*lines), chip=overlap.CHIPS[chip]), notes=notes)
    assert report.advice
    assert ('; compile with overlap.OPTIONS["sparse cores"]' in report.advice) == named


def test_many_rows_are_cut_to_the_most_exposed():
    each = at(blocking("all-reduce"), "f")
    lines = [each.replace(".1", f".{i}").replace("=9", f"={i}") for i in range(40)]
    text = str(overlap.report(program(*lines), chip=CHIP))
    assert "... and 16 more" in text


@pytest.mark.parametrize("chip", [CHIP, overlap.CHIPS["h100"], None])
def test_a_saved_report_is_read(chip):
    made = overlap.report(HIDDEN if chip == CHIP else untiled(HIDDEN), chip=chip)
    saved = overlap.Report.from_json(made.to_json())
    assert saved.details() == made.details()
    assert saved.to_dict() == made.to_dict() | {"unread": [], "assumptions": [*made.assumptions]}
    with pytest.raises(ValueError, match="has no t"):
        saved.to_perfetto()
    for other in ([made.to_dict()], made.to_dict() | {"bare": 0.1}):
        with pytest.raises(ValueError, match="another version of ringcoll wrote it; make it again"):
            overlap.Report.from_json(json.dumps(other))


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([dot("y")], ""),
        ([start("s"), dot("y"), done("d", "s")], "collective-permute"),
        ([blocking("all-gather")], "all-gather; if a matmul takes it: `all_gather_matmul`"),
        ([at(blocking("all-reduce"), "psum")],
         "a.py:9 psum; if it adds up a matmul: `matmul_all_reduce`"),
        ([at(blocking("reduce-scatter"), "transpose(f)/x")],
         "a.py:9, gradient; if a matmul takes it: `all_gather_matmul`"),
        ([at(blocking("all-gather"), "transpose(f)/checkpoint/rematted_computation/all_gather")],
         "a.py:9 all_gather, recomputed; if a matmul takes it: `all_gather_matmul`"),
        ([at(blocking("all-gather"), "ringcoll.all_gather_einsum(lax)/x")],
         "a.py:9 all_gather_einsum"),
        # Compiled as a sum: of a product, and of a gradient.
        ([at(blocking("all-reduce"), "f/reduce_scatter")],
         "a.py:9 psum_scatter; if it adds up a matmul: `matmul_reduce_scatter`"),
        ([at(blocking("all-reduce"), "transpose(f)/reduce_scatter")],
         "a.py:9, gradient; if a matmul takes it: `all_gather_matmul`"),
        # 1500 us of a gather; and of another line 750 us, and 1001 of its gradient.
        ([at(blocking("all-gather"), "f/all_gather").replace("=9", "=5"),
          at(blocking("all-reduce"), "f/psum"),
          at(start("s"), "transpose(f)/ppermute"), done("d", "s")], "a.py:9, gradient"),
        # The same, of files with one name.
        ([at(blocking("all-gather"), "f/all_gather"),
          at(start("s"), "f/ppermute").replace('"a.py', '"/x/a.py'), done("d", "s"),
          at(start("u", "d"), "f/ppermute").replace('"a.py', '"/y/a.py'), done("e", "u")],
         "a.py:9 all_gather; if a matmul takes it: `all_gather_matmul`"),
    ],
)  # fmt: skip
def test_advice_names_the_most_exposed_line(lines, named):
    report = overlap.report(program(*lines), chip=CHIP)
    assert report.advice == (named and f"to change first: {named}")
    assert str(report).endswith(report.advice)
    assert report.to_dict()["advice"] == report.advice


OF_X = f"%gx = {SHAPE} all-gather(%x), replica_groups={{{{0,1}},{{2,3}}}}, dimensions={{0}}"
OF_W = f"%gw = {SHAPE} all-gather(%w), replica_groups={{{{0,2}},{{1,3}}}}, dimensions={{0}}"
NARROW = computation("narrow", {"p": SHAPE}, f"%c = {SHAPE} convert(%p)")
GRID = Network(((0, 0), (0, 1), (1, 0), (1, 1)), (False, False))


@pytest.mark.parametrize(
    ("lines", "crossed"),
    [
        ([OF_X, OF_W, dot("y", "gx").replace("%w", "%gw")], True),
        # By a conversion, a copy, or a loop's carry.
        ([OF_X, OF_W, f"%n = {SHAPE} fusion(%gw), kind=kLoop, calls=%narrow",
          dot("y", "gx").replace("%w", "%n")], True),
        ([OF_X, OF_W, f"%n = {SHAPE} copy(%gw)", dot("y", "gx").replace("%w", "%n")], True),
        # Of the same axis; of one alone; of two products.
        ([OF_X, OF_W.replace("{0,2},{1,3}", "{0,1},{2,3}"),
          dot("y", "gx").replace("%w", "%gw")], False),
        ([OF_X, dot("y", "gx")], False),
        ([OF_X, OF_W, dot("y", "gx"), dot("z", "y").replace("%w", "%gw")], False),
        # What travels along the other axis is no gather, or one by rounds.
        ([at(start("s", pairs="source_target_pairs={{0,1},{1,0},{2,3},{3,2}}"), "f/ppermute"),
          OF_W, done("d", "s"), dot("y", "d").replace("%w", "%gw")], False),
        ([at(start("s", pairs="source_target_pairs={{0,1},{1,0},{2,3},{3,2}}"),
             "f/ringcoll.all_gather_einsum(ring)/round 1/ppermute"),
          OF_W, done("d", "s"), dot("y", "d").replace("%w", "%gw")], True),
    ],
)  # fmt: skip
def test_a_gather_whose_product_gathers_over_another_axis_gets_no_matmul(lines, crossed):
    text = program(*lines, before=MATMUL + NARROW)
    report = overlap.report(overlap.Program(text, network=GRID), chip=CHIP)
    assert {row.crossed for row in report.rows if row.kind == "all-gather"} == {crossed}
    gathers = [row for row in report.rows if row.kind == "all-gather"]
    advice = replace(report, rows=tuple(gathers)).advice
    assert ("all_gather_matmul" in advice) == (not crossed)


def called(line, name, exposed):
    """A row of a report."""
    row = overlap.report(BARE, chip=CHIP).rows[0]
    return replace(row, at=f"train.py:{line} {name}", exposed=exposed * 1e-6)


def test_reports_are_compared_by_line():
    """An edit has moved all lines by one: lines that call the same are matched in order."""
    report = overlap.report(BARE, chip=CHIP)
    old = [called(1, "psum", 10), called(2, "psum", 20), called(3, "all_gather", 5)]
    old += [called(7, "pmax", 3), called(9, "pmax", 4)]
    new = [called(2, "psum", 10), called(3, "psum", 25), called(4, "ppermute", 0)]
    new += [called(9, "pmax", 1)]
    # The first of three has gone, and the others have moved.
    old += [called(11, "pmin", 7), called(12, "pmin", 8), called(13, "pmin", 9)]
    new += [called(21, "pmin", 8), called(22, "pmin", 9)]
    # Of an installed model, the user's line has moved too.
    old += [called(5, "psum (run.py:6)", 2)]
    new += [called(5, "psum (run.py:8)", 2)]
    text = overlap.compare(replace(report, rows=tuple(old)), replace(report, rows=tuple(new)))
    cells = [line.split() for line in text.splitlines() if " train.py" in line]
    assert [(*row[:3], *row[-2:]) for row in cells] == [
        ("grew", "20.0", "25.0", "train.py:3", "psum"),
        ("appeared", "0.0", "0.0", "train.py:4", "ppermute"),
        ("shrank", "4.0", "1.0", "train.py:9", "pmax"),
        ("went", "3.0", "0.0", "train.py:7", "pmax"),
        ("went", "5.0", "0.0", "train.py:3", "all_gather"),
        ("went", "7.0", "0.0", "train.py:11", "pmin"),
    ]
    assert "\n4 lines as before\n" in text
    assert max(map(len, text.splitlines())) <= 100
    hidden = program(start("s"), dot("y"), done("d", "s"))
    assert overlap.compare(report, overlap.report(hidden, chip=CHIP)).splitlines()[-1] == (
        "before: 1001 of 2001 us exposed (50.0%); now: 1 of 1001 us exposed (0.1%), "
        "2.00 times as fast"
    )
    counted = [overlap.report(untiled(text)) for text in (BARE, hidden)]
    *_, row, _, end = overlap.compare(*counted).splitlines()
    assert row.split() == ["shrank", "1", "0", "collective-permute", "no", "line", "known"]
    share = "1 of 1 collectives exposed (100.0%); now: 0 of 1 collectives exposed (0.0%)"
    assert end == f"before: {share}"
    with pytest.raises(ValueError, match="jit_f has no times, and the other report has"):
        overlap.compare(report, overlap.report(untiled(BARE)))


def timed(compute, exposed, memory=0.0, host=0.0, **lines):
    """A report of so many ms; `lines`: the compute of lines of train.py."""
    parts = {"compute": compute, "exposed": exposed, "memory": memory, "host": host}
    parts = {name: 1e-3 * ms for name, ms in parts.items()}
    works = tuple(LineWork(1e-3 * ms, at=f"{at} f".replace("_", ":")) for at, ms in lines.items())
    report = overlap.report(BARE, chip=CHIP)
    return replace(report, **parts, total=sum(parts.values()), works=works, rows=())


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (
            timed(100, 40, t_45=30, t_46=9, t_47=1, t_48=1),
            timed(129.2, 17.9, t_45=50.1, t_46=18, t_47=1, t_48=1.1),
            "slower by 7.1 ms: compute +29.2 (t:45 +20.1, :46 +9.0, :48 +0.1), exposed -22.1",
        ),
        (timed(100, 9), timed(100, 9), "as fast as before"),
        (
            timed(3, 2, 1, t_1=3),
            timed(3, 1, 0, 1, u_1=2, t_9=1),
            "faster by 1000.0 us: memory -1000.0, exposed -1000.0, waits for the host +1000.0",
        ),
    ],
)
def test_a_comparison_begins_with_the_total(before, now, verdict):
    first = overlap.compare(before, now).partition("\n\n")[0]
    assert " ".join(first.split()) == f"compared with {before.title}: {verdict}"


def test_compute_is_compared_by_line():
    """In another file, the line with the same number; changes below 0.1 % are left out."""
    before = timed(100, 0, a_1=50, a_2=20, a_4=5)
    now = timed(100, 0, b_1=40, b_2=20.09, b_5=7)
    rows = [
        line.split() for line in overlap.compare(before, now).splitlines() if " compute  " in line
    ]
    assert rows == [
        ["appeared", "0.0", "7000.0", "compute", "b:5", "f"],
        ["went", "5000.0", "0.0", "compute", "a:4", "f"],
        ["shrank", "50000.0", "40000.0", "compute", "b:1", "f"],
    ]
    assert before.compute_by_line().splitlines()[1].split() == ["50000.0", "50.0", "a:1", "f"]
    assert overlap.Report.from_json(now.to_json()).works == now.works


@pytest.mark.parametrize(
    ("waits", "computes", "advice"),
    [
        ({4: 0, 9: 2}, {4: 108, 9: 50}, "train.py:4 waits 5.0 us less and computes 8.0 us more; "),
        ({4: 0, 9: 9}, {4: 104, 9: 70}, ""),  # line 4 hides more than it pays; line 9 hides nothing
        ({4: 0, 9: 8}, {4: 140, 9: 10}, ""),  # the work of line 9 is at line 4 now
    ],
)
def test_a_line_that_pays_more_than_it_hides_is_named(waits, computes, advice):
    def report(waits, computes):
        works = (LineWork(us * 1e-6, at=f"train.py:{line} f") for line, us in computes.items())
        rows = (called(line, "f", us) for line, us in waits.items())
        return replace(timed(0.16, 0), rows=tuple(rows), works=tuple(works))

    text = overlap.compare(report({4: 5, 9: 8}, {4: 100, 9: 50}), report(waits, computes))
    found = " ".join(text.split()).partition("hidden, but slower: ")[2]
    assert found.startswith(advice)
    assert bool(found) == bool(advice)


def test_a_long_label_loses_its_middle():
    """It keeps its file, and its end."""
    label = f"train.py:41 {'call' * 30}, gradient, 7 rounds"
    (line,) = table_lines([("1.0", "all-gather", label)])
    assert len(line) == 100
    assert line.startswith("1.0  all-gather  train.py:41 ...call")
    assert line.endswith("call, gradient, 7 rounds")
    assert len(*table_lines([("1.0", "all-gather", "t" * 200)])) == 100


def test_timelines_are_drawn_one_above_the_other(tmp_path):
    report, path = overlap.report(HIDDEN, chip=CHIP), tmp_path / "timelines.svg"
    report.draw(path, replace(report, name="below"))
    texts = [one.text for one in ElementTree.parse(path).iter(f"{SVG}text")]
    titles = [text for text in texts if " on 4 x " in text]
    assert [title.partition(" on ")[0] for title in titles] == [report.name, "below"]
    assert texts.count("compute") == 3  # two tracks, and the legend
    with pytest.raises(ValueError, match=r"end the name with \.svg"):
        report.draw(tmp_path / "timelines.png")


def test_a_program_for_an_unknown_gpu_has_counts_and_no_times():
    report = overlap.report(untiled(HIDDEN))
    assert not report.timed
    assert (report.total, report.compute, report.exposed, report.communication) == (0, 0, 0, 0)
    assert "no times" in report.assumptions[0]
    for write in (report.to_perfetto, partial(report.draw, "timeline.svg")):
        with pytest.raises(ValueError, match="jit_f has no times to draw"):
            write()


def test_a_cpu_program_is_priced_on_the_given_chip():
    reports = [overlap.report(text, chip=CHIP) for text in (untiled(HIDDEN), HIDDEN)]
    assert us(reports[0], "total") == us(reports[1], "total")
    warned = ["not a TPU's program (its layouts have no tiles): toy's" in str(r) for r in reports]
    assert warned == [True, False]


def test_a_synchronous_permute_of_a_gpu_blocks_the_stream():
    flag = 'backend_config={"collective_backend_config":{"is_sync":%s,"is_pipelined":false}}'
    for is_sync in ("true", "false"):
        lines = f"{start('s')}, {flag % is_sync}", done("d", "s"), dot("y", "d")
        (row,) = overlap.report(untiled(program(*lines))).rows
        assert (row.asynchronous, row.count, row.without_matmul) == (is_sync == "false", 1, 1)


def test_a_notebook_shows_the_timeline_above_the_text():
    timed = overlap.report(BARE, chip=CHIP)
    shown = timed._repr_html_()
    svg, _, text = shown.partition("<pre>")
    bars = {bar.get("fill") for bar in ElementTree.fromstring(svg).iter(f"{SVG}rect")}
    assert {LOOKS[kind][0] for kind in ("compute", "exposed", "wire")} <= bars
    assert timed.advice in text
    assert "assumed:" not in text
    assert "<svg" not in replace(timed, total=0.0)._repr_html_()


def test_adjacent_bars_are_merged():
    segments = [Segment("compute", start * 1e-6, (start + 1) * 1e-6, "") for start in range(1000)]
    segments.append(Segment("compute", 0.002, 0.003, ""))
    picture = ElementTree.fromstring(as_svg([("", segments)]))
    bars = [one for one in picture.iter(f"{SVG}rect") if one.get("fill") == LOOKS["compute"][0]]
    assert len(bars) == 3  # two bars, and the legend's
