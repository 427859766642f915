"""What a notebook shows of a schedule, a plan or a price; text if there is no picture."""

import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from ringcoll import algorithms
from ringcoll.costs import price
from ringcoll.draw import as_svg, plan
from ringcoll.draw.notebook import price_html, schedule_svg

pytestmark = pytest.mark.quick


def test_a_schedule_shows_its_rounds():
    for kind, schedule in (
        ("all_gather", algorithms.bruck(4)),
        ("all_gather", algorithms.torus(2, 2)),
        ("all_to_all", algorithms.pairwise(4)),
    ):
        assert schedule_svg(schedule) == as_svg(plan(kind, schedule, schedule.shape))


def test_a_price_shows_every_count():
    rows = ElementTree.fromstring(price_html(price("psum", "ring", (3,)))).findall("tbody/tr")
    assert [row.find("td").text for row in rows] == ["4", "4", "4", "0", "4", "3", "4", "2"]


PROGRAM = """
import sys
from IPython.core.interactiveshell import InteractiveShell
before = sys.argv[1] == "before"
if before:
    import ringcoll
shell = InteractiveShell.instance()
import ringcoll
if before:
    shell.run_line_magic("load_ext", "ringcoll")
assert "ringcoll.draw" not in sys.modules
values = (
    ringcoll.algorithms.bruck(4),
    ringcoll.algorithms.pairwise(4),
    ringcoll.draw.plan("all_reduce", "ring", (4,)),
    ringcoll.costs.price("psum", "ring", (3,)),
    ringcoll.algorithms.ring(32),
    ringcoll.Schedule((4,), ((ringcoll.Move(1, (2,)),),)),
    ringcoll.draw.plan("all_reduce", "ring", (16,)),
)
for value in values:
    print(*shell.display_formatter.format(value)[0])
"""


@pytest.mark.parametrize("imported", ["before", "after"])
def test_ipython_shows_pictures_and_tables(imported, tmp_path):
    pytest.importorskip("IPython", reason="pip install -e '.[docs]'")
    command = [sys.executable, "-c", PROGRAM, imported]
    home = {**os.environ, "IPYTHONDIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    picture, table = "text/plain image/svg+xml", "text/plain text/html"
    assert done.stdout.splitlines() == [picture, picture, picture, table, *["text/plain"] * 3]
