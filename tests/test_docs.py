"""What is said about the project, and that the API's documentation can be built."""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import python

ROOT = Path(__file__).parent.parent


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


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
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert f"\nversion: {project['version']}\n" in read("CITATION.cff")
    assert re.search(r"^## (\S+?),", read("CHANGELOG.md"), re.M)[1] == project["version"]
