"""Lines of source beside rows, in both forms that programs have; and versions."""

import inspect
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from hlo_texts import CHIP, MATMUL, SHAPE, computation, done, dot, loop, program, start
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import make_mesh

import ringcoll
from ringcoll import overlap
from ringcoll.overlap import program as programs
from ringcoll.overlap.hlo import parse
from ringcoll.overlap.lines import Line, Lines
from ringcoll.overlap.rows import by_line

OURS = inspect.getfile(ringcoll.all_gather_matmul)
#: Stacks of calls: train.py, line 41, our function, an installed model's; line 7 alone; that model
#: with a library's module, a wrapper of Python's and code of no file inside of it.
TABLES = f"""
FileNames
1 "/home/me/train.py"
2 "{OURS}"
3 "/venv/lib/site-packages/other/layer.py"
4 "/venv/lib/python3.13/site-packages/flax/nnx/nn/linear.py"
5 "/usr/lib/python3.13/functools.py"
6 "<string>"

FunctionNames
1 "step"
2 "all_gather_matmul"
3 "Linear.__call__"
4 "dot_product"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=41 end_line=41 column=8 end_column=42}}
2 {{file_name_id=2 function_name_id=2 line=70 end_line=70}}
3 {{file_name_id=3 line=99}}
4 {{file_name_id=1 line=7}}
5 {{file_name_id=4 function_name_id=3 line=50}}
6 {{file_name_id=5 line=9}}
7 {{file_name_id=6 line=1}}
8 {{file_name_id=4 function_name_id=4 line=60}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}
4 {{file_location_id=4 parent_frame_id=1}}
5 {{file_location_id=2 parent_frame_id=1}}
6 {{file_location_id=3 parent_frame_id=1}}
7 {{file_location_id=2 parent_frame_id=7}}
8 {{file_location_id=6 parent_frame_id=4}}
9 {{file_location_id=5 parent_frame_id=9}}
10 {{file_location_id=7 parent_frame_id=10}}
11 {{file_location_id=8 parent_frame_id=10}}
12 {{file_location_id=4 parent_frame_id=4}}
13 {{file_location_id=5 parent_frame_id=1}}

"""
#: The same as others write it: they count parents like frames, and leave out empty ones.
PLAIN = TABLES
for n in (1, 2, 3, 4, 7, 9, 10):
    PLAIN = PLAIN.replace(f" parent_frame_id={n}}}", f" parent_frame_id={n - 1}}}")
PLAIN = PLAIN.replace(" parent_frame_id=0", "")


def text(metadata, tables=TABLES, **options):
    """A program whose permute has metadata."""
    built = program(f"{start('s')}, metadata={{{metadata}}}", dot("y"), done("d", "s"), **options)
    head, line, rest = built.partition("\n")
    return head + line + tables + rest


def line_of(text, name="s"):
    return Lines(text, parse(text)).of(name)


@pytest.mark.parametrize("tables", [TABLES, PLAIN])
@pytest.mark.parametrize(
    ("frame", "source"),
    [
        (1, "/home/me/train.py:41"),
        (2, "/home/me/train.py:41 all_gather_matmul"),  # not ours
        (3, "/venv/lib/site-packages/other/layer.py:99 train.py:41"),  # an installed model's
        (4, "/home/me/train.py:7"),
        (5, f"{OURS}:70"),  # none called it
        (7, "/venv/lib/site-packages/other/layer.py:99 all_gather_matmul"),  # no user's file
        (8, "/venv/lib/site-packages/other/layer.py:99 train.py:41"),  # not Python's own
        (9, "/venv/lib/site-packages/other/layer.py:99 train.py:41"),  # not a library's
        (10, "/venv/lib/site-packages/other/layer.py:99 train.py:41"),  # not that of no file
        (11, "/venv/lib/site-packages/other/layer.py:99 dot_product train.py:41"),
        (12, "/home/me/train.py:7"),  # a user's function, which an installed model calls
        (13, "/venv/lib/python3.13/site-packages/flax/nnx/nn/linear.py:50"),  # none called it
        (14, ""),
    ],
)
def test_a_line_is_the_innermost_frame_of_a_model_or_a_user(tables, frame, source):
    found = line_of(text(f'op_name="jit(f)/psum" stack_frame_id={frame}', tables))
    words = " ".join(filter(None, (found.source, found.function, found.user)))
    assert (words, found.op_name) == (source, "jit(f)/psum")


def test_older_texts_name_the_line_beside_the_instruction():
    metadata = 'op_name="jit(f)/shard_map/psum" source_file="C:\\\\me\\\\train.py" source_line=12'
    assert line_of(text(metadata, "\n\n")).short == "train.py:12 psum"


@pytest.mark.parametrize(
    ("line", "short"),
    [
        (Line("/a/train.py", 41, "jit(f)/shard_map/psum"), "train.py:41 psum"),
        (Line("/a/train.py", 41, "jvp()/reduce_scatter"), "train.py:41 psum_scatter"),
        (Line("/a/train.py", 41, "transpose(jvp())/reduce_scatter"), "train.py:41, gradient"),
        (Line("train.py", 41, "jit(f)/dot_general"), "train.py:41"),  # made by the compiler
        (Line("train.py", 41), "train.py:41"),
        (Line(op_name="jit(f)/psum_invariant"), "psum"),
        (Line(), ""),
        (Line("a/b.py", 1, "f/ringcoll.psum(ring)/all_gather/round 7/ppermute"), "b.py:1 psum"),
        (Line("a/b.py", 1, "transpose(f)/ringcoll.all_gather_einsum(lax)/all_gather", "linear"),
         "b.py:1 linear, gradient"),
        (Line("a/b.py", 1, "jit(f)/psum", user="c.py:9"), "b.py:1 psum (c.py:9)"),
        (Line("a/b.py", 1, "transpose(f)/psum", user="c.py:9"), "b.py:1 (c.py:9), gradient"),
    ],
)  # fmt: skip
def test_short_labels_of_lines(line, short):
    assert line.short == short


def test_a_fusion_has_the_line_of_its_collective():
    metadata = 'metadata={op_name="f/psum" stack_frame_id=4}'
    inner = computation("spread", {"a": SHAPE}, f"%g = {SHAPE} all-reduce(%a), {metadata}")
    outer = f'%f = {SHAPE} fusion(%x), calls=%spread, metadata={{op_name="f/dot" stack_frame_id=1}}'
    fused = program(outer, before=inner + MATMUL).replace("\n\n", TABLES, 1)
    assert line_of(fused, "f").short == "train.py:7 psum"
    bare = fused.replace(', metadata={op_name="f/psum" stack_frame_id=4}', ", to_apply=%add")
    assert line_of(bare, "f").short == "train.py:41"
    # The compiler left out the line of the sum, and kept that of its addition.
    addition = """
%add (b: f32[], c: f32[]) -> f32[] {
  %b = f32[] parameter(0), metadata={op_name="f/reduce_scatter"}
  %c = f32[] parameter(1), metadata={op_name="f/reduce_scatter"}
  ROOT %sum = f32[] add(%b, %c), metadata={op_name="f/add" stack_frame_id=4}
}

%spread"""
    kept = bare.replace("%spread", addition[1:], 1)
    assert line_of(kept, "f").short == "train.py:7 psum_scatter"
    alone = fused.replace("%spread", addition[1:], 1)
    alone = alone.replace(outer[1:], f"f = {SHAPE} all-reduce(%x), to_apply=%add")
    assert line_of(alone, "f").short == "train.py:7 psum_scatter"
    # Another sum has the same addition, so its line is that of only one. What is added has a line.
    again = kept.replace("  ROOT %f", f"  %h = {SHAPE} all-reduce(%w), to_apply=%add\n  ROOT %f")
    made = f'%m = {SHAPE} copy(%x), metadata={{op_name="f/dot" stack_frame_id=1}}\n  ROOT %f'
    again = again.replace("ROOT %f", made).replace("fusion(%x)", "fusion(%m)")
    assert line_of(again, "f").short == "train.py:41 psum_scatter"
    assert line_of(fused, "none_such") == Line()


def test_a_sum_without_a_line_is_on_the_line_that_calls_it():
    """JAX made the addition on line 7 and uses it on line 41: below the first stack is the call."""
    tables = TABLES.rstrip() + "\n8 {file_location_id=4 parent_frame_id=5}\n"
    tables += "9 {file_location_id=4 parent_frame_id=2}\n\n"
    scalar = {"b": "f32[]", "c": "f32[]"}
    named = 'metadata={op_name="%s" stack_frame_id=%s}'
    before = MATMUL
    for n, frame in enumerate((8, 9)):
        lines = f"%sum{n} = f32[] add(%b, %c), {named % ('add', frame)}"
        added = computation(f"add{n}", scalar, lines).replace(
            "parameter(0)", 'parameter(0), metadata={op_name="reduce_scatter"}'
        )
        before += added
    sums = (
        f"%y = {SHAPE} copy(%x), {named % ('jit(f)/dot', 1)}",
        f"%first = {SHAPE} all-reduce(%y), to_apply=%add0",
        f"%z = {SHAPE} copy(%first), {named % ('transpose(f)/dot', 4)}",
        f"%second = {SHAPE} all-reduce(%z), to_apply=%add1",
    )
    built = program(*sums, before=before).replace("\n\n", tables, 1)
    assert line_of(built, "first").short == "train.py:7 psum_scatter"
    assert line_of(built, "second").short == "train.py:41, gradient"
    assert line_of(built, "first").op_name == "jit(f)/reduce_scatter"


def test_rows_point_to_code_in_text_and_json():
    report = overlap.report(text('op_name="jit(f)/psum" stack_frame_id=1'), chip=CHIP)
    row = str(report).splitlines()[3]
    assert row.endswith("  collective-permute  train.py:41 psum")
    (row,) = json.loads(report.to_json())["rows"]
    assert (row["source"], row["op_name"]) == ("/home/me/train.py:41", "jit(f)/psum")
    assert row["at"] == "train.py:41 psum"
    assert (
        str(overlap.report(text("", "\n\n"), chip=CHIP)).splitlines()[3].endswith(" no line known")
    )


def test_the_rows_of_a_line_are_added_up():
    turns = ', backend_config={"known_trip_count":{"n":"7"}}'
    call = "ringcoll.psum(ring)"
    named = ', metadata={op_name="%s/ppermute" source_file="/a/train.py" source_line=41}'
    begun = [
        start(n, "y") + named % f"{call}/rounds {k} to {k + 2}" for n, k in (("s", 1), ("u", 4))
    ]
    body = dot("y"), *begun, done("next", "s"), done("e", "u")
    report = overlap.report(loop(turns, *body), chip=CHIP)
    (line,) = by_line(report.rows)
    assert line.label == "train.py:41 psum, 6 rounds"
    assert (line.sum_of("count"), round(1e6 * line.sum_of("exposed"))) == (14, 14014)
    assert f"   14014.0  66.7     14  collective-permute  {line.label}" in str(report)


def test_a_compiled_program_tells_lines_and_versions():
    mesh = make_mesh(8)

    @jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P())
    def f(x):
        return jax.lax.psum(x, "x")

    g = jax.shard_map(lambda x: ringcoll.psum(x, "x", algorithm="ring"), mesh=mesh,
                      in_specs=P("x"), out_specs=P())  # fmt: skip
    operand = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    for function, which in ((f, "return jax.lax"), (g, "g = jax.")):
        report = overlap.report(jax.jit(function).lower(operand).compile())
        lines, first = inspect.getsourcelines(test_a_compiled_program_tells_lines_and_versions)
        (at,) = (first + i for i, line in enumerate(lines) if line.strip().startswith(which))
        assert report.rows
        assert {row.source for row in report.rows} == {f"{__file__}:{at}"}
    assert (report.timed, report.ranks) == (False, 8)
    assert report.temporaries is not None
    of_rows = {(row.kind, row.bytes, row.without_matmul) for row in report.rows}
    assert of_rows == {("collective-permute", 8 * 8 * 4 // 8, 1)}
    assert overlap.report(jax.jit(g).lower(operand)).rows == report.rows
    (line,) = by_line(report.rows)
    assert line.label.endswith(" psum, 14 rounds")
    assert dict(report.versions) == {"jax": jax.__version__, "jaxlib": jax.lib.__version__}
    assert f"\ncompiled by jax {jax.__version__}, jaxlib " in str(report)
    assert json.loads(report.to_json())["versions"]["jax"] == jax.__version__


def test_versions_of_compilers(monkeypatch):
    report = overlap.report(program(dot("y")), chip=CHIP)
    assert report.versions == {}
    assert "compiled by unknown versions of jax and of the compiler" in str(report)

    names = ("jax", "libtpu", "numpy", "jax_cuda13_plugin", None, "jax-cuda13-pjrt", "jaxlib")
    there = [SimpleNamespace(name=name, version=str(i)) for i, name in enumerate(names)]
    monkeypatch.setattr(programs.metadata, "distributions", lambda: there)
    assert programs.versions([]) == {"jax": "0", "jaxlib": "6"}
    assert programs.versions(["tpu"]) == {"jax": "0", "jaxlib": "6", "libtpu": "1"}
    gpu = {"jax": "0", "jaxlib": "6", "jax-cuda13-pjrt": "5", "jax_cuda13_plugin": "3"}
    assert programs.versions(["gpu", "cpu"]) == gpu
