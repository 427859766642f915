"""Texts of `--xla_dump_to`: elements of tuples, texts from before there are cycles, folders."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hlo_texts import CHIP, MATMUL, SHAPE, add, done, dot, loop, program, start, us
from jax.sharding import PartitionSpec as P
from support import make_mesh

from ringcoll import overlap
from ringcoll.__main__ import main
from ringcoll.overlap.hlo import HloError, parse

#: Seven turns, each with a permute under a matmul.
TURNS = loop("", start("s"), dot("y"), done("next", "s"))
BARE = dot("y").partition(", backend_config")[0]


def dumped(text):
    """The text as newer compilers dump it: without lines for the elements of tuples."""
    computations = text.split("\n}\n")
    for n, lines in enumerate(computations):
        taken = r"^  %(\S+) = \S+ get-tuple-element\(%(\w+)\), index=(\d+)\n"
        for name, whole, index in re.findall(taken, lines, re.M):
            lines = re.sub(rf"^  %{name} = .*\n", "", lines, flags=re.M)
            computations[n] = lines = re.sub(rf"%{name}\b", f"%{whole}#{index}", lines)
    return "\n}\n".join(computations)


def test_an_element_of_a_tuple_needs_no_line():
    text = dumped(TURNS)
    assert set(re.findall(r"%\w+#\d", text)) == {"%c#0", "%c#1", "%c#2", "%d#0"}
    assert text.count("get-tuple-element(") == 1  # the root of the program
    assert overlap.report(text, chip=CHIP) == overlap.report(TURNS, chip=CHIP)


@pytest.mark.parametrize(
    ("operand", "shape"),
    [
        ("%t#0", [(500, 500)]),
        ("%t#1", [(7, 5), (3,)]),
        ("%t#1#0", [(7, 5)]),
        ("f32[3]{0} %t#1#1", [(3,)]),
        ("%t#2", [()]),
    ],
)
def test_an_element_has_the_shape_that_its_tuple_names(operand, shape):
    whole = f"({SHAPE}, /*index=1*/(f32[7,5]{{1,0:T(8,128)}}, f32[3]{{0}}), token[])"
    module = parse(program(f"%t = {whole} custom-call(%x)", f"%y = {SHAPE} custom-call({operand})"))
    (element,) = module.entry.operands(module.entry.root)
    assert [of_one.dims for of_one in element.shapes] == shape
    assert element.opcode == "get-tuple-element"
    assert element.number("index") == int(operand[-1])


def test_a_constant_with_a_sign_is_no_element():
    line = '%c = c64[] constant("a#1")'
    assert parse(program(line, dot("y"))).entry.by_name["c"].operands == ('"a#1"',)


@pytest.mark.parametrize(
    ("lines", "sources"),
    [
        # 250 MFLOP at 80 % of 1 TFLOP/s take 312.5 us; three arrays of 1 MB 300 us.
        ([BARE], {"share": 312.5e-6}),
        ([BARE, add("z", "y")], {"share": 312.5e-6, "roofline": 300e-6}),  # cycles of a sum only
        ([BARE, dot("z", "y", 400_000)], {"roofline": 300e-6, "estimate": 400e-6}),
    ],
)
def test_without_cycles_matmuls_take_a_share_of_the_peak(lines, sources):
    report = overlap.report(program(*lines), chip=replace(CHIP, matmul_share=0.8))
    assert report.sources == pytest.approx(sources)


@pytest.mark.parametrize(
    ("chip", "words"),
    [("v5e", "(82%)"), ("v6e", "(90%)"), ("tpu7x", "(83%)"), ("v5p", "(nobody measured it: 85%)")],
)
def test_a_report_says_that_a_text_has_no_cycles(chip, words):
    wide = BARE.replace("500,500", "9000,9000"), MATMUL.replace("500,500", "9000,9000")
    said = overlap.report(program(wide[0], before=wide[1]), chip=chip).assumptions
    (line,) = (line for line in said if "written before there were cycles" in line)
    assert line.endswith(words)


# -- folders --

SMALL, LARGE = program(BARE), program(dot("y"), dot("z", "y")).replace("jit_f", "jit_step")
#: The names of a dump's files, and their contents.
DUMP = {
    "module_0001.jit_f.before_optimizations.txt": SMALL.replace("is_scheduled=true, ", ""),
    "module_0001.jit_f.after_optimizations.txt": SMALL,
    "module_0001.jit_f.after_optimizations-buffer-assignment.txt": "BufferAssignment:\n",
    "module_0002.jit_step.cl_7.after_optimizations.txt": LARGE + "\n" * 9999,
    "module_0002.jit_step.cl_7.after_codegen.txt": LARGE.replace(
        ", backend", ', metadata={op_name="estimated_cycles"}, backend'
    ),
    "module_0002.jit_step.cl_7.flagfile": "--x\n",
    "module_0003.jit_f.after_optimizations.txt": SMALL[: len(SMALL) // 2],
    "empty.txt": "",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in DUMP.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "module_0002.jit_step.cl_7").mkdir()
    return tmp_path


@pytest.mark.parametrize("path_of", [str, lambda path: path])
def test_of_a_folder_the_program_with_the_most_work_is_read(folder, path_of):
    report = overlap.report(path_of(folder), chip=CHIP)
    assert (report.name, us(report, "total")) == ("jit_step", (2000,))
    (note,) = report.notes
    assert note == (
        "read from module_0002.jit_step.cl_7.after_codegen.txt, which has the most FLOPs; beside "
        "it module_0001.jit_f.after_optimizations.txt (2.5e+08 FLOP), "
        "module_0003.jit_f.after_optimizations.txt (unread)"
    )
    assert str(report).splitlines()[1].startswith("read from module_0002.")
    assert overlap.Report.from_json(report.to_json()).notes == (note,)
    with pytest.raises(AssertionError, match="read from module_0002"):
        overlap.assert_overlapped(path_of(folder), chip=CHIP)
    assert overlap.collectives(path_of(folder)) == overlap.waste(path_of(folder)) == ()


def test_a_file_is_a_text(folder):
    file = folder / "module_0001.jit_f.after_optimizations.txt"
    assert overlap.report(file, chip=CHIP) == overlap.report(SMALL, chip=CHIP)


def test_texts_with_other_names_are_programs_of_their_own(tmp_path):
    for name, text in (("jit_f_old", SMALL), ("jit_f_new", program(dot("y"), dot("z", "y")))):
        (tmp_path / f"{name}.txt").write_text(text)
    (note,) = overlap.report(tmp_path, chip=CHIP).notes
    assert note.startswith("read from jit_f_new.txt, ")
    assert note.endswith(" beside it jit_f_old.txt (2.5e+08 FLOP)")


def test_a_folder_without_programs_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(SMALL.replace("is_scheduled=true, ", ""))
    with pytest.raises(HloError, match=r"no \.txt file in it begins with 'HloModule' and is_sched"):
        overlap.report(tmp_path)
    with pytest.raises(FileNotFoundError):
        overlap.report(tmp_path / "none")
    with pytest.raises(HloError, match="or a file or folder that exists"):
        overlap.report(str(tmp_path / "none"))


def test_the_command_reads_a_dump(folder, capsys):
    assert main(["overlap", "--text", str(folder), "--chip", "v5e", "--waste"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("jit_step on 4 x v5e: total 1333 us = compute ")
    assert " + exposed 0 us (0.0%)\nread from module_" in printed
    assert printed.endswith("\nno waste was found\n")
    file = folder / "module_0002.jit_step.cl_7.after_codegen.txt"
    before = file.read_text()
    assert main(["overlap", "--text", str(file), "--chip", "v5e", "--json"]) == 0
    assert overlap.Report.from_json(capsys.readouterr().out).name == "jit_step"
    assert file.read_text() == before


def test_a_dump_of_this_compiler_is_the_compiled_program(tmp_path):
    @jax.jit
    @jax.shard_map(mesh=make_mesh(4), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def f(x):
        turn = lambda carry, _: (jax.lax.psum(carry @ carry, "x"), None)  # noqa: E731
        return jax.lax.scan(turn, x, None, length=5)[0]

    lowered = f.lower(jax.ShapeDtypeStruct((32, 8), jnp.float32))
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(tmp_path)})
    (row,), (same,) = overlap.report(tmp_path).rows, overlap.report(compiled).rows
    assert replace(row, axes=same.axes) == same  # older texts name no mesh
    assert row.count == 5
