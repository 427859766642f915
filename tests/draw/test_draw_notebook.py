"""What a notebook shows of a schedule, a plan or a price; text if there is no picture."""

from xml.etree import ElementTree

import pytest

from ringcoll import Move, Schedule, algorithms
from ringcoll.costs import price
from ringcoll.draw import as_svg, plan

pytestmark = pytest.mark.quick


def test_a_schedule_shows_its_rounds():
    for kind, schedule in (
        ("all_gather", algorithms.bruck(4)),
        ("all_gather", algorithms.torus(2, 2)),
        ("all_to_all", algorithms.pairwise(4)),
    ):
        assert schedule._repr_svg_() == as_svg(plan(kind, schedule, schedule.shape))
    shown = plan("all_reduce", "ring", (4,))
    assert shown._repr_svg_() == as_svg(shown)


def test_what_cannot_be_drawn_shows_its_text():
    assert algorithms.ring(32)._repr_svg_() is None
    assert Schedule((4,), ((Move(1, (2,)),),))._repr_svg_() is None
    assert plan("all_reduce", "ring", (16,))._repr_svg_() is None


def test_a_price_shows_every_count():
    paid = price("psum", "ring", (3,))
    rows = ElementTree.fromstring(paid._repr_html_()).findall("tbody/tr")
    cells = [row.findall("td")[1].text for row in rows]
    assert cells == ["4", "4", "4", "0", "4", "3", "4", "2"]
