"""Every tutorial runs, in a process of its own, and prints what it is there to show.

The tutorials compare their results themselves, and raise if one is wrong.
"""

import os
import runpy
import sys

import pytest
from support import HERE, mostly_exhaustive, python

FOLDER = HERE / "examples" / "tutorials"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
NEEDS = {"nnx_strategies": ("flax", "optax")}
#: What stands in its output.
WORDS = {
    "arrays": (
        "0               0 1 2 3\n",
        "all_to_all: lax = ringcoll, exactly",
        "[30, 31, 32, 33]",
    ),
    "classifier": ("lax.pmean", "28 collective-permute"),
    "collectives": (
        "softmax over a sharded dimension: expected = lax = ringcoll, except",
        "rows to columns: expected = lax = ringcoll, exactly",
        "different random numbers on each rank",
        "[2, 16] on each device; the first has [ 1. -1. -2.",
    ),
    "constraints": (
        "hidden is P('x', 'y'), result is P('x',)",
        "numpy = jit = jit with each constraint = ringcoll, exactly",
    ),
    "dense_layer": (
        "gradient by W: one device = automatic = explicit = manual = ringcoll",
        "ShardingTypeError",
        "6 collective-permute",
    ),
    "explicit_types": (
        "float32[16@y,8@x]",
        "ShardingTypeError: Contracting dimensions are sharded",
        "cure: jnp.matmul(a, b, out_sharding=P())",
    ),
    "layouts": ("one device = jit = ringcoll in all 9 layouts, exactly", "times as long"),
    "leaving_pmap": ("pmap = jit = shard_map = ringcoll = pmap, replaced exactly",),
    "matmuls": (
        "A[I_X, J] B[J, K_Y] -> C[I_X, K_Y]: numpy = jit = lax = ringcoll, exactly",
        "A[I, J_X] B[J_X, K] -> C[I_X, K]: numpy = jit = lax = ringcoll, exactly",
        "180 + 180 = 360",
    ),
    "mesh_chooser": ("8.03 G weights", "does not fit into 16 GB", "kv-heads 8 by 16", "--fsdp"),
    "nnx_strategies": (
        "2-D    ringcoll 4.0537",
        "data      8 x 1      402688",
        "tensor: the same; FSDP: [width, features] has P(None, 'data')",
    ),
    "profiling": ("ringcoll.psum(ring)/reduce_scatter/round 7", "ui.perfetto.dev"),
    "resharding": ("a permutation: numpy = jit = ringcoll = device_put, exactly", "all-to-all"),
    "strategies": ("2-D: loss 145.111, and gradients: alone = jit = ringcoll, exactly", "14392"),
}


def run(monkeypatch, name, *arguments):
    """Without LLVM's optimisations, because short programs then take less time in all."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    monkeypatch.setenv("XLA_FLAGS", flags)
    return python("-W", "error", "-m", f"examples.tutorials.{name}", *map(str, arguments))


def test_the_index_has_every_tutorial():
    index = (HERE / "docs" / "learn.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"](../examples/tutorials/{name}.py): " in index] == NAMES
    assert sorted(WORDS) == NAMES


@pytest.mark.parametrize("name", mostly_exhaustive(NAMES, lambda name: name == "collectives"))
def test_a_tutorial_runs_and_prints_its_results(name, tmp_path, monkeypatch):
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module, reason="pip install -e '.[examples]'")
    arguments = ("--output", tmp_path) if name == "profiling" else ()
    done = run(monkeypatch, name, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [words for words in WORDS[name] if words not in done.stdout] == []


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--fsdp"], 0, "the fastest that fits: 64 x 1"),
        (["--devices", "0"], 2, "--devices 0: give 1 or more"),
    ],
)
def test_a_mesh_is_chosen_or_refused(flags, status, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mesh_chooser", *flags])
    ended = 0
    try:
        runpy.run_module("examples.tutorials.mesh_chooser", run_name="__main__")  # it runs nothing
    except SystemExit as error:
        ended = error.code
    assert ended == status
    assert words in "".join(capsys.readouterr())
