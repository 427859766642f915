"""The project's version, command and metadata."""

import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import jax
import pytest

import ringcoll
from ringcoll import __main__

ROOT = Path(__file__).parents[2]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads(read("pyproject.toml"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "ringcoll/__init__.py"
    assert read("ringcoll/__init__.py").count(f'\n__version__ = "{ringcoll.__version__}"') == 1
    assert f"\nversion: {ringcoll.__version__}\n" in read("CITATION.cff")
    assert re.search(r"^## (\S+?),", read("CHANGELOG.md"), re.M)[1] == ringcoll.__version__


def test_the_command_is_the_module_and_says_its_version(capsys):
    scripts = tomllib.loads(read("pyproject.toml"))["project"]["scripts"]
    command = EntryPoint("ringcoll", scripts["ringcoll"], "console_scripts")
    assert command.load() is __main__.main
    with pytest.raises(SystemExit) as end:
        __main__.main(["--version"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"ringcoll {ringcoll.__version__}, jax {jax.__version__}, Python ")
