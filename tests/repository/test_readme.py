"""README and the pages tell the truth: their code runs and prints what they say."""

import re
import subprocess
import sys
import textwrap
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest
from support import data, make_mesh, mostly_exhaustive, per_rank, python

from benchmarks.compiled import pages
from ringcoll import algorithms
from ringcoll.commands import explain
from ringcoll.runtime import engine

ROOT = Path(__file__).parents[2]
PAIR = re.compile(r"```python\n((?:(?!```).)*)```\n```text\n(.*?)```", re.DOTALL)
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [str(page.relative_to(ROOT)) for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))]
#: Pages with a program, and what it prints.
PROGRAMS = [page for page in PAGES if PAIR.search((ROOT / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", mostly_exhaustive(PROGRAMS, lambda page: page == "README.md"))
def test_the_code_prints_what_the_page_says(page):
    for code, expected in PAIR.findall((ROOT / page).read_text(encoding="utf-8")):
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert ran.stdout == expected, ran.stderr


@pytest.mark.parametrize("n", mostly_exhaustive([1, 2, 3, 5, 8], lambda n: n == 3))
def test_the_lines_of_the_first_page_are_a_gather_and_a_product(n):
    (lines,) = re.findall(r"(?<=```py\n)def all_gather_matmul.*?(?=\n```)", README, re.DOTALL)
    for module in (algorithms, engine):  # which show the same lines
        assert textwrap.indent(lines, "    ") in module.__doc__
    names = {"lax": jax.lax, "jnp": jnp}
    exec(lines, names)

    def plain(x, w):
        return jax.lax.all_gather(x, "x", tiled=True) @ w

    def with_gradients(product, x, w):
        y, pull_back = jax.vjp(product, x, w)
        return y, pull_back(jnp.cos(y))

    x, w = data((n, 2, 3)), data((n, 3, 4))
    ours, theirs = (
        per_rank(make_mesh(n), partial(with_gradients, product), x, w)
        for product in (names["all_gather_matmul"], plain)
    )
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5)


@pytest.mark.tpu_aot
@pytest.mark.exhaustive
@pytest.mark.skipif(
    find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"
)
def test_the_test_that_a_page_shows_passes(tmp_path):
    page = (ROOT / "docs" / "overlap.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```py\n((?:(?!```).)*\ndef test_.*?)```", page, re.DOTALL)
    file = tmp_path / "test_exposed.py"
    file.write_text(shown, encoding="utf-8")
    done = python("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", str(file))
    assert "1 passed" in done.stdout, done.stdout


def test_the_tables_of_algorithms_hold_what_explain_says():
    """Every line is right; an algorithm that is new need not be there: `claims --write` adds it."""
    page = ROOT / "docs" / "algorithms.md"
    (shown,) = pages.ALGORITHMS.findall(page.read_text(encoding="utf-8"))
    assert all(f"| {title} |" in shown for title in explain.LISTS)
    wrong = set(shown.strip().splitlines()) - set(explain.markdown())
    assert not wrong, "python -m benchmarks claims --write"


def test_the_drawings_are_what_the_command_prints():
    page = (ROOT / "docs" / "how.md").read_text(encoding="utf-8")
    assert page == pages.with_algorithms(page), "python -m benchmarks claims --write"
    for drawing in re.findall(r"<!-- draw (\w+ \w+ \d) -->\n```text\n", page):
        assert "python -m ringcoll draw {} --algorithm {} -n {}\n".format(*drawing.split()) in page
