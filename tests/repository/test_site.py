"""The site in a real browser, from a folder: nothing is asked of a network, or wider than a phone.

`RINGCOLL_SITE` names a folder in which it is built already, as CI does; else it is built here, and
its notebooks are not executed.
"""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import HERE, python

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
MISSING = [] if find_spec("playwright") else ["playwright: pip install 'ringcoll[browser]'"]
MISSING += [] if find_spec("material") else ["mkdocs-material: pip install 'ringcoll[docs]'"]
MISSING += [] if CHROMIUM else ["chromium: Debian's package of that name"]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"no {'; no '.join(MISSING)}"),
    pytest.mark.exhaustive,
]

PAGES = ("index", "choose", "how", "learn", "lessons/06_reading_the_schedule", "tutorials/matmuls")
PAGES += ("reference/matmuls", "reference/commands", "evidence/measured", "contributing")
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 800}


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


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def opened(browser, site):
    """Opens pages, of which none may ask for anything outside the folder, nor complain."""
    context, wrong = browser.new_context(), []

    def guard(route):
        if route.request.url.startswith((site.as_uri(), "data:", "blob:")):
            route.continue_()
        else:
            wrong.append(route.request.url)
            route.abort()

    context.route("**/*", guard)
    page = context.new_page()
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))

    def open_page(name):
        page.goto((site / f"{name}.html").as_uri())
        return page

    yield open_page
    context.close()
    assert wrong == []


def test_no_page_is_wider_than_its_screen(opened):
    for name in PAGES:
        page = opened(name)
        for size in (PHONE, DESK):
            page.set_viewport_size(size)
            assert page.evaluate("document.documentElement.scrollWidth") == size["width"], name
        assert page.locator("h1").count() == 1, name


def test_search_finds_a_page_without_a_server(opened):
    page = opened("index")
    page.set_viewport_size(DESK)
    page.locator("input.md-search__input").click()
    page.locator("input.md-search__input").press_sequentially("zigzag")
    page.wait_for_selector("a.md-search-result__link")
    found = [link.get_attribute("href") for link in page.locator("a.md-search-result__link").all()]
    assert any("10_attention_as_a_ring" in link for link in found)


def test_it_is_light_or_dark(opened):
    page = opened("choose")
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = [page.evaluate(f"[{scheme}, {ground}]")]
    page.locator("form[data-md-component=palette] label:visible").click()
    seen.append(page.evaluate(f"[{scheme}, {ground}]"))
    assert [name for name, _ in seen] == ["default", "slate"]
    assert seen[0][1] != seen[1][1]


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


def test_the_reference_shows_shapes_errors_and_examples(opened):
    page = opened("reference/matmuls")
    section = page.locator(".doc-object").filter(
        has=page.locator("[id='ringcoll.all_gather_einsum']")
    )
    words = section.first.inner_text()
    for part in ("[b, s/n, d]", "ValueError", "Source", ">>> "):
        assert part in words
    assert section.first.locator(".highlight .gp").count()  # the prompt of a doctest, in colour


def test_pictures_are_drawn(opened):
    page = opened("how")
    sizes = page.evaluate("[...document.querySelectorAll('article img')].map(i => i.naturalWidth)")
    assert len(sizes) == 7
    assert all(sizes)
