"""README and the pages tell the truth: their code runs, and CI runs the commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringcoll.commands import explain

ROOT = Path(__file__).parent.parent
PAIR = re.compile(r"```python\n(.*?)```\n```text\n(.*?)```", re.DOTALL)
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Pages with a program, and what it prints.
PROGRAMS = ("README.md", "docs/layers.md")


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_code_prints_what_the_page_says(page):
    pairs = PAIR.findall((ROOT / page).read_text(encoding="utf-8"))
    assert pairs
    for code, expected in pairs:
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert ran.stdout == expected, ran.stderr


def test_no_program_of_a_page_is_left_out():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    found = [page for page in pages if PAIR.search(page.read_text(encoding="utf-8"))]
    assert {str(page.relative_to(ROOT)) for page in found} == set(PROGRAMS)


def test_the_tables_of_algorithms_are_those_of_explain():
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert "\n".join(explain.markdown()).strip() in page


def test_the_commands_are_what_ci_runs():
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.S)
    install, test = commands[0], commands[1]
    assert '-e ".[bench]"' in install
    assert install.endswith("python -m benchmarks")
    assert '-e ".[test]"' in test
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "python" + test.rpartition("python")[2].replace("python", "") in ci.replace('"', "")
