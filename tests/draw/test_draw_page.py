"""The page in a real browser: it plays, by any hand, at any width, and asks for nothing."""

import shutil
from importlib.util import find_spec

import pytest

from ringcoll.draw import as_page, as_svg, plan

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
MISSING = [] if find_spec("playwright") else ["playwright: pip install 'ringcoll[browser]'"]
MISSING += [] if CHROMIUM else ["chromium: Debian's package of that name"]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no {'; no '.join(MISSING)}")

PAGES = {
    "ring": ("all_reduce", "ring", (4,)),
    "lanes": ("psum", "bidirectional_ring", (8,)),
    "torus": ("all_gather", "torus", (4, 2)),
    "stages": ("pmax", "recursive_doubling", (6,)),
    "alone": ("all_to_all", "bruck", (1,)),
}
PHONE, DESK = (390, 844), (1280, 800)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens pages, of which none may have asked for anything but its file, nor complained."""
    contexts, wrong = [], []

    def open_page(name, hash="", **options):
        file = tmp_path / f"{name}.html"
        file.write_text(as_page(plan(*PAGES[name])), encoding="utf-8")
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()

        def guard(route):
            if route.request.url.startswith(file.as_uri()):
                route.continue_()
            else:
                wrong.append(route.request.url)
                route.abort()

        context.route(lambda url: not url.startswith("data:"), guard)
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"{file.as_uri()}{hash}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def shown(page):
    """The number of the round that is seen, which the list, the slider and the words agree on."""
    (frame,) = page.locator(".frame:visible").all()
    number = int(frame.get_attribute("data-frame"))
    (current,) = page.locator("[aria-current]").all()
    assert int(current.get_attribute("data-go")) == number
    assert page.locator("#round").input_value() == str(number)
    heading = page.locator("#heading").inner_text()
    assert heading.startswith(f"Round {number} of" if number else "Before the first round")
    assert page.locator("#round").get_attribute("aria-valuetext").startswith(heading)
    return number


def test_every_way_of_stepping(opened):
    page = opened("ring")
    assert shown(page) == 0
    pictures = [page.locator(".picture").screenshot()]
    for key, number in [("ArrowRight", 1), ("ArrowRight", 2), ("End", 6), ("ArrowRight", 6)]:
        page.keyboard.press(key)
        assert shown(page) == number
        pictures.append(page.locator(".picture").screenshot(animations="disabled"))
    assert len(set(pictures)) == 4
    for key, number in [("ArrowLeft", 5), ("Home", 0), ("ArrowLeft", 0)]:
        page.keyboard.press(key)
        assert shown(page) == number
    page.locator("#round").fill("3")
    assert shown(page) == 3
    page.locator("#round").press("ArrowRight")  # once, not by the slider and the page
    assert shown(page) == 4
    for button, number in [("#on", 5), ("#back", 4), ("#first", 0), ("[data-go='2']", 2)]:
        page.click(button)
        assert shown(page) == number
    page.locator("#back").press("Space")  # a button that is pressed, not the page that plays
    assert shown(page) == 1
    page.keyboard.press("ArrowRight")
    assert "r−1: its sum of shard r+2" in page.locator("#said").inner_text()  # noqa: RUF001
    assert page.locator("#phase").inner_text() == "reduce-scatter"


def test_play_reaches_the_end_and_can_be_paused(opened):
    page = opened("ring", hash="#delay=15")
    page.keyboard.press("Space")
    page.wait_for_function("document.querySelector('#round').value === '6'")
    assert shown(page) == 6
    assert page.get_attribute("#play", "aria-pressed") == "false"
    assert page.get_attribute("#play", "aria-label") == "Play"
    page = opened("ring", hash="#delay=60000&round=6")
    page.click("#play")  # from the end, again from the start
    assert shown(page) == 0
    assert page.get_attribute("#play", "aria-label") == "Pause"
    assert shown(opened("ring", hash="#round=2.5")) == 2
    assert shown(opened("ring", hash="#round=nine")) == 0
    assert shown(opened("ring", hash="#round=-3")) == 0
    page.keyboard.press("Space")  # pressed on the button, which has the focus
    assert page.get_attribute("#play", "aria-pressed") == "false"


@pytest.mark.parametrize("name", ["lanes", "torus", "alone"])
def test_nothing_is_wider_than_the_page(opened, name):
    page = opened(name)
    for width, height in (PHONE, DESK):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        picture, code = (page.locator(part).bounding_box() for part in (".player", ".code"))
        if width == PHONE[0]:
            assert code["y"] > picture["y"] + picture["height"]
        elif name != "torus":  # which has the whole width
            assert code["x"] > picture["x"] + picture["width"]


def test_motion_is_reduced_on_request(opened):
    name = "getComputedStyle(document.querySelector('.frame')).animationName"
    assert opened("ring").evaluate(name) == "appear"
    assert opened("ring", reduced_motion="reduce").evaluate(name) == "none"


PICTURES = [*PAGES.values(), ("psum", "direct", (8,)), ("psum", "torus", (2, 2, 2))]
PICTURES += [("all_to_all", "bruck", (4, 3)), ("psum", "bruck", (2,)), ("pmin", "torus", (4, 4))]


def test_nothing_drawn_is_cut_off(browser):
    page = browser.new_page()
    for shown in PICTURES:
        page.set_content(as_svg(plan(*shown)))
        assert page.evaluate("""() => {
          const svg = document.querySelector("svg"), ground = svg.querySelector("rect");
          ground.remove();
          const all = svg.getBBox(), view = svg.viewBox.baseVal;
          return all.x >= 0 && all.y >= 0 && all.x + all.width <= view.width
            && all.y + all.height <= view.height;
        }"""), shown
        assert page.evaluate("""() => [...document.querySelectorAll("text[font-weight='600']")]
          .slice(1).every((text) => {
            const box = text.previousElementSibling.getBBox(), said = text.getBBox();
            return said.x >= box.x && said.x + said.width <= box.x + box.width;
          })"""), f"the name of a rank of {shown} is wider than its box"
    page.close()
