"""The README tells the truth: its code runs, and CI runs its commands."""

import re
import subprocess
import sys
from pathlib import Path

from ringcoll.commands import explain

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_code_prints_what_the_readme_says():
    pairs = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", README, re.S)
    assert pairs
    for code, expected in pairs:
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert ran.stdout == expected, ran.stderr


def test_the_tables_of_algorithms_are_those_of_explain():
    assert "\n".join(explain.markdown()).strip() in README


def test_the_commands_are_what_ci_runs():
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.S)
    install, test = commands[0], commands[1]
    assert '-e ".[bench]"' in install
    assert install.endswith("python -m benchmarks")
    assert '-e ".[test]"' in test
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "python" + test.rpartition("python")[2].replace("python", "") in ci.replace('"', "")
