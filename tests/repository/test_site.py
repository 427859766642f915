"""The site in a real browser, from a folder: it needs no network, and a phone is wide enough.

`RINGCOLL_SITE` names a folder in which it is already built, as in CI. Otherwise it is built here,
and its notebooks are not executed.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from browsing import DESK, PHONE, needs_a_browser
from support import HERE, python

pytestmark = [
    needs_a_browser,
    pytest.mark.skipif(find_spec("material") is None, reason="pip install -e '.[docs]'"),
    pytest.mark.exhaustive,
]

PAGES = ("index", "choose", "how", "learn", "lessons/06_reading_the_schedule", "tutorials/matmuls")
PAGES += ("reference/matmuls", "reference/commands", "evidence/measured", "contributing")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if built := os.environ.get("RINGCOLL_SITE"):
        return Path(built)
    folder = tmp_path_factory.mktemp("site")
    program = (
        "import os, runpy, sys; os.environ['RINGCOLL_EXECUTE'] = 'false';"
        f"sys.argv = ['mkdocs', 'build', '--strict', '--site-dir', {str(folder)!r}];"
        "runpy.run_module('mkdocs', run_name='__main__')"
    )
    done = python("-c", program, path=HERE / "docs" / "site")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def opened(visit, site):
    """Opens pages, which must not load anything from outside the folder."""
    return lambda name: visit(site / f"{name}.html", root=site)


def test_no_page_is_wider_than_its_screen(opened):
    for name in PAGES:
        page = opened(name)
        for width, height in (PHONE, DESK):
            page.set_viewport_size({"width": width, "height": height})
            # The theme lays some of it out by scripts, after the page is there.
            page.wait_for_function(f"document.documentElement.scrollWidth === {width}")
        assert page.locator("h1").count() == 1, name


def test_search_finds_a_page_without_a_server(opened):
    page = opened("index")
    page.set_viewport_size(dict(zip(("width", "height"), DESK, strict=True)))
    page.locator("input.md-search__input").click()
    page.locator("input.md-search__input").press_sequentially("zigzag")
    page.wait_for_selector("a.md-search-result__link")
    found = [link.get_attribute("href") for link in page.locator("a.md-search-result__link").all()]
    assert any("10_attention_as_a_ring" in link for link in found)


def test_a_lesson_folds_its_solutions_and_can_be_downloaded(opened, site):
    page = opened("lessons/01_ring_by_hand")
    solutions = page.locator("details.success")
    assert solutions.count() == 2
    code = solutions.first.locator("pre").first
    assert not code.is_visible()
    solutions.first.locator("summary").click()
    assert code.is_visible()
    notebook = page.locator("a[download]").get_attribute("href")
    assert (site / "lessons" / notebook).is_file()
