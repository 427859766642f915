"""What is said about the project, and that the API's documentation can be built."""

import re
import tomllib
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest
from support import python

import ringcoll
from ringcoll import __main__

ROOT = Path(__file__).parents[2]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("pdoc") is None, reason="no pdoc: pip install 'ringcoll[docs]'")
def test_api_documentation_is_built_without_a_warning(tmp_path):
    command = re.search(r"^python (-W error -m pdoc .*) -o \S+$", read("CONTRIBUTING.md"), re.M)
    done = python(*command[1].split(), "-o", tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    page = (tmp_path / "ringcoll.html").read_text(encoding="utf-8")
    assert 'id="all_gather_matmul"' in page
    assert 'id="psum_scatter"' in page


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
    said = capsys.readouterr().out
    assert said.startswith(f"ringcoll {ringcoll.__version__}, jax {jax.__version__}, Python ")


def test_hosted_ci_runs_ours():
    assert "- run: bash .ci/run" in read(".github/workflows/ci.yml")
