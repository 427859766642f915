"""Lessons and tutorials as notebooks: they can be opened anywhere, and fold their solutions."""

import ast
import re
import sys

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import HERE

from ringcoll import learn

pytest.importorskip("jupytext", reason="pip install -e '.[docs]'")
pytest.importorskip("nbclient", reason="pip install -e '.[docs]'")
sys.path.insert(0, str(HERE / "docs" / "site"))
import links
import notebooks

SOURCES = sorted((HERE / "examples").glob("lessons/[0-9]*.py"))
SOURCES += sorted(p for p in (HERE / "examples").glob("tutorials/*.py") if p.stem != "__init__")
#: The contents of the wheel; Colab does not have the rest of the repository.
THERE = {"ringcoll", "jax", "numpy", *sys.stdlib_module_names}
#: Modules of JAX that import packages which JAX does not install.
NEEDS_MORE = ("visualize_array_sharding(", "visualize_sharding(")
#: And packages that a notebook may use if it asks for an extra.
BY_EXTRA = {"[examples]": {"flax", "optax"}}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_needs_nothing_but_the_wheel(source):
    cells = notebooks.read(source).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    nodes = [*ast.walk(ast.parse(code))]
    names = [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    extra = BY_EXTRA.get(notebooks.EXTRAS.get(source.stem, ""), set())
    assert {name.split(".")[0] for name in names} <= THERE | extra
    assert not any(name in code for name in NEEDS_MORE)
    assert "start(8)" in code or source.stem == "mesh_chooser"  # which runs nothing


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_has_two_exercises_with_folded_solutions(source):
    notebook = notebooks.read(source)
    opened = notebooks.for_readers(notebook, source.stem, "https://host/us/ringcoll")
    text = "\n".join(cell.source for cell in opened.cells if cell.cell_type == "markdown")
    assert re.findall(r"^## Exercise (\d)", text, re.M) == ["1", "2"]
    solutions = [cell.source for cell in notebook.cells if notebooks.is_solution(cell)]
    assert len(solutions) == 2
    assert all(re.search(r"\b(claim|assert|agree|both|row|run)\b", code) for code in solutions)
    code = "\n".join(cell.source for cell in opened.cells if cell.cell_type == "code")
    assert not any(solution in code for solution in solutions)
    assert text.count("<details>") == text.count("</details>") == 2
    assert opened.cells[0].source.endswith('@ git+https://host/us/ringcoll"\n')


def test_without_an_address_the_first_cell_asks_for_a_wheel(monkeypatch):
    cell = notebooks.for_readers(notebooks.read(SOURCES[0]), "06_reading_the_schedule", "").cells[0]
    code = cell.source.replace("    %pip install --quiet ", "    asked += f")
    run = {"asked": []}
    exec(code, run)  # it is installed
    assert run["asked"] == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="write the path of its wheel into RINGCOLL"):
        exec(code, run)
    exec(code.replace('RINGCOLL = ""', 'RINGCOLL = "ringcoll.whl"'), run)
    assert "".join(run["asked"]) == "ringcoll.whl[tpu]"


def test_links_are_those_of_the_site():
    text = "[a](docs/limits.md) ![b](benchmarks/pages/timeline.svg) [c](ringcoll/lax.py) [d](#e)"
    wanted = "[a](limits.md) ![b](evidence/timeline.svg) {} [d](#e)"
    assert links.rewritten(text, "README.md", "") == wanted.format("c")
    there = "[c](https://host/us/blob/main/ringcoll/lax.py)"
    assert links.rewritten(text, "README.md", "https://host/us") == wanted.format(there)
    assert links.rewritten("```\n[a](b)\n```", "README.md", "") == "```\n[a](b)\n```"


def test_what_to_restart_is_said():
    words = r"start: JAX has started with 8 cpu device\(s\), and 9 are needed; restart it"
    with pytest.raises(RuntimeError, match=words):
        learn.start(9)


def test_ways_are_compared_on_every_device():
    mesh = learn.make_mesh(x=4)
    right = np.arange(8.0, dtype=np.float32)
    wrong = learn.place(mesh, right + (right == 7), P("x"))
    with pytest.raises(AssertionError, match=r"sums: ours is 1\.0e\+00 off numpy"):
        learn.agree("sums", numpy=right, ours=wrong)
