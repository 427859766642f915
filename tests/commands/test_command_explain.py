"""`python -m ringcoll explain`: what an algorithm is, and when to choose it; plans of a program."""

import os
import re
import subprocess
import sys

import pytest
from support import HERE, make_mesh

from ringcoll.__main__ import main
from ringcoll.commands import overlap
from ringcoll.commands.explain import LISTS, about

pytestmark = pytest.mark.quick

EVERY = [
    pytest.param(kind[name], id=f"{title}: {name}")
    for title, (_, kind) in LISTS.items()
    for name in kind
]


@pytest.mark.parametrize("algorithm", EVERY)
def test_every_algorithm_has_a_summary_and_a_when(algorithm):
    told = about(algorithm)
    for sentence in (told.does, told.when):
        assert sentence[:1].strip()
        assert sentence.endswith(".")
    assert bool(told.source) == ("Source:" in algorithm.__doc__)
    assert (told.source or "(2026).").endswith(").")
    assert ">>>" in told.docstring


def test_the_index_names_all(capsys):
    assert main(["explain"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for title, (_, kind) in LISTS.items():
        assert title in printed
        for name, algorithm in kind.items():
            assert f" {name}: {about(algorithm).does} " in printed
    assert "rounds ceil((n-1)/2) (n-1 messages); bytes (n-1)/n " in printed
    assert "None" not in printed


def test_one_algorithm_is_printed_in_full(capsys):
    assert main(["explain", "bruck"]) == 0
    printed = capsys.readouterr().out
    assert "bruck (all-gather, reduce-scatter)" in printed
    assert "bruck (all-to-all)" in printed
    assert "  (+1, [0])\n  (+2, [0, 1])\n" in printed
    assert "  (+1, [1, 3])\n  (+2, [2, 3])\n" in printed
    assert "ceil(log2 n) alpha + (n-1)/n B beta" in printed
    assert (
        "the sum of rank 0 is ((0, 2), (1, 3)): not balanced, so order=Tree(...) refuses" in printed
    )
    assert main(["explain", "torus"]) == 0
    assert "  (+1, [0]) in lane 0  (-1, [0]) in lane 1\n" in capsys.readouterr().out


def test_a_closed_pipe_is_no_error():
    reads, writes = os.pipe()
    os.close(reads)  # as `head` does when it has read enough
    command = [sys.executable, "-m", "ringcoll", "explain"]
    done = subprocess.run(command, cwd=HERE, stdout=writes, stderr=subprocess.PIPE, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, b"")


OWN = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import ringcoll


def program(mesh):
    total = lambda x: ringcoll.psum(x, "x", algorithm="ring")
    operand = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    return jax.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P()), (operand,)


def does_not_trace(mesh):
    return lambda x: x @ x, (jax.ShapeDtypeStruct((2, 3), jnp.float32),)


def no_program(mesh):
    return mesh


def without(mesh):
    return lambda x: x + 1, (jnp.ones(4),)


def schedule(n):
    return ringcoll.algorithms.ring(n)


def returned(mesh):
    return ringcoll.algorithms.ring(4)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of programs; topologies are eight devices of this process."""
    (tmp_path / "explained.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(overlap, "mesh_on", lambda name, axes: make_mesh(8))
    return "explained"


def test_a_program_prints_its_plans(capsys, own):
    assert main(["explain", "--function", f"{own}:program", "--topology", "v5e:4x2"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert re.split("  +", head) == ["line", "call", "form", "us", "next best", "the built-in"]
    assert re.split("  +", row) == [
        *("explained.py:10", "psum over x=8, float32[1,4]", "ring: named by the caller"),
        *("-", "-", "-"),
    ]
    assert main(["explain", "--function", f"{own}:without", "--topology", "v5e:4x2"]) == 0
    assert "calls no collective, matmul or layer of ringcoll" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("ring --function {own}:program", "--function: a program has plans, not an algorithm;"),
        ("--function {own}:does_not_trace", "cannot trace it: TypeError: dot_general requires"),
        ("--function {own}:no_program", "return a function and a tuple of its operands"),
        ("--function {own}:none", "'explained' has no 'none'"),
        ("--function {own}:schedule", "; a schedule is for draw, cost and export"),
        ("--function {own}:returned", "operands (a schedule is for draw, cost and export)"),
    ],
)
def test_what_is_no_program_is_refused_in_a_line(capsys, own, arguments, words):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", *arguments.format(own=own).split()])
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_program_is_no_schedule(capsys, own):
    with pytest.raises(SystemExit, match="2"):
        main(["draw", "psum", "--function", f"{own}:program"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "called with (4,), the sizes of the axes: " in line
    assert line.endswith("; a program is for overlap and explain")
