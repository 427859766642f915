"""Every tutorial runs, in a process of its own.

The tutorials compare their results themselves, and raise if one is wrong.
"""

import runpy
import sys

import pytest
from support import HERE, mostly_exhaustive, python

FOLDER = HERE / "examples" / "tutorials"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
NEEDS = {"nnx_strategies": ("flax", "optax")}


def test_the_index_has_every_tutorial():
    index = (HERE / "docs" / "learn.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"](../examples/tutorials/{name}.py): " in index] == NAMES


@pytest.mark.parametrize("name", mostly_exhaustive(NAMES, lambda name: name == "collectives"))
def test_a_tutorial_runs(name, tmp_path):
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module, reason="pip install -e '.[examples]'")
    arguments = ("--output", str(tmp_path)) if name == "profiling" else ()
    done = python("-W", "error", "-m", f"examples.tutorials.{name}", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


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
