"""Compiled programs: the page of the grid; programs are compiled once."""

import json

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import make_mesh

from benchmarks.__main__ import main
from benchmarks.compiled import collectives, compiling, program_cache
from benchmarks.compiled.grid import Cell
from benchmarks.compiled.program_figures import Figures
from ringcoll import overlap

CELL = Cell("all_gather_matmul", "forward", "v5e:4x2", 512)


def found(algorithm, total):
    which = next(one for one in CELL.programs() if one["algorithm"] == algorithm)
    return Figures(which, total, 1.0, 1.0, None, None, 1.0, True, {})


def test_the_page_tells_of_all_that_was_found_in_any_run(monkeypatch, tmp_path, capsys):
    rows = []

    def find_all(args, todo, make):
        assert all(one in todo for one in (which.which for which in rows[0]))
        return rows.pop(0), []

    monkeypatch.setattr(compiling, "find_all", find_all)
    page = tmp_path / "page.md"
    flags = ["overlap", "--grid", "--page", str(page), "--direction", "forward"]
    first = [found("auto", 228), found("plain", 240), found("compiler", 220)]
    rows[:] = [first, [found("auto", 215), found("compiler/tuned", 210)]]
    assert main(flags) == 0
    assert "auto loses 1 of them" in capsys.readouterr().out
    assert "228 / 240 / 220 **!**" in page.read_text()
    assert main(flags) == 0
    text = page.read_text()
    assert "| v5e:4x2 | 215 / 240 / 210 |  |" in text
    assert "1 of 96 cells have been compiled; auto loses 0 of them." in text
    assert jax.__version__ in text
    assert len(json.loads(page.with_suffix(".json").read_text())) == 4


def test_a_refused_program_has_no_time_and_sets_the_status(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compiling, "find_all", lambda *_: ([found("auto", 2)], ["why"]))
    assert main(["overlap", "--grid", "--page", str(tmp_path / "page.md")]) == 1
    assert "0 of 96" in (printed := capsys.readouterr().out)
    assert "failed why" in printed


def test_a_program_is_compiled_again_only_if_it_is_another(monkeypatch, tmp_path):
    calls = []

    def compile_for(topology, function, *operands, **keywords):
        calls.append(keywords)
        return overlap.Program("text", kind="TPU v5e", temporaries=3, notes=("note",))

    monkeypatch.setattr(overlap, "compile_for", compile_for)
    mesh = make_mesh(4)
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("x")))

    def made(
        function=lambda x: x + 1, topology="v5e:2x2", folder=tmp_path, profile=False, **options
    ):
        before = len(calls)
        program, seconds = program_cache.compiled(
            folder, topology, function, (x,), options, profile
        )
        assert (program.text, program.temporaries, program.notes[0]) == ("text", 3, "note")
        assert seconds >= 0
        return len(calls) - before

    assert made() == 1
    assert made() == 0
    assert made(lambda y: y + 1) == 0  # the same program, with a different name
    assert made(lambda x: x + 2) == 1
    assert made(topology="v5e:4x1") == 1
    assert made(option="on") == 1
    assert made(folder=None) == 1
    assert made(profile=True) == 1  # there was no profile, so it is not kept
    assert made(profile=True) == 1
    for package in ("libtpu", "jax-cuda13-pjrt"):
        monkeypatch.setattr(program_cache, "installed", lambda _, of=package: {of: "another"})
        assert made() == 1


def test_the_operand_of_a_compiled_collective_is_of_so_many_bytes(monkeypatch):
    monkeypatch.setattr(collectives, "mesh_on", lambda topology, axes: make_mesh(4, 2))
    _, (operand,) = collectives.program_of(
        "v5e:4x2", "4x2", "psum_scatter", "1M", "ring", "float32"
    )
    assert operand.size * 4 == 8 * 2**20
