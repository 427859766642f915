"""The page in a real browser: it plays, however it is operated, at any width, and loads nothing."""

import pytest
from browsing import DESK, PHONE, needs_a_browser
from support import mostly_exhaustive

from ringcoll.draw import as_motion, as_page, as_svg, plan

pytestmark = needs_a_browser

PAGES = {
    "ring": ("all_reduce", "ring", (4,)),
    "lanes": ("psum", "bidirectional_ring", (8,)),
    "torus": ("all_gather", "torus", (4, 2)),
    "stages": ("pmax", "recursive_doubling", (6,)),
    "alone": ("all_to_all", "bruck", (1,)),
}


@pytest.fixture
def opened(visit, tmp_path):
    """Opens one of the pages."""

    def open_page(name, hash="", **options):
        file = tmp_path / f"{name}.html"
        file.write_text(as_page(plan(*PAGES[name])), encoding="utf-8")
        return visit(file, hash, **options)

    return open_page


def shown(page):
    """The number of the round that is shown; the list, the slider and the words must agree."""
    number = int(page.get_attribute("#stage svg", "data-shown"))
    (current,) = page.locator("[aria-current]").all()
    assert int(current.get_attribute("data-go")) == number
    assert page.locator("#round").input_value() == str(number)
    heading = page.locator("#heading").inner_text()
    assert heading.startswith(f"Round {number} of" if number else "Before the first round")
    assert page.locator("#round").get_attribute("aria-valuetext").startswith(heading)
    return number


# What a reader sees, and where, once two frames were drawn. Pixels would not do: two screenshots of
# one picture may differ.
SEEN = """async () => {
  for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame);
  const seen = [...document.querySelectorAll("#stage svg *")].filter((part) => {
    const style = getComputedStyle(part);
    return style.visibility === "visible" && Number(style.opacity) > 0;
  });
  return JSON.stringify(seen.map((part) => [part.textContent, part.getBoundingClientRect()]));
}"""


def test_keys_slider_and_buttons_step(opened):
    page = opened("ring", reduced_motion="reduce")
    assert shown(page) == 0
    pictures = [page.evaluate(SEEN)]
    for key, number in [("ArrowRight", 1), ("ArrowRight", 2), ("End", 6), ("ArrowRight", 6)]:
        page.keyboard.press(key)
        assert shown(page) == number
        pictures.append(page.evaluate(SEEN))
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
    page = opened("ring", hash="#15")
    page.keyboard.press("Space")
    page.wait_for_function("document.querySelector('#round').value === '6'")
    page.wait_for_selector("#play[aria-pressed=false]")  # once the last messages have arrived
    assert shown(page) == 6
    assert page.get_attribute("#play", "aria-label") == "Play"
    page = opened("ring", hash="#60000")
    page.keyboard.press("End")
    page.click("#play")  # from the end, again from the start
    assert shown(page) == 0
    assert page.get_attribute("#play", "aria-label") == "Pause"
    page.keyboard.press("Space")  # pressed on the button, which has the focus
    assert page.get_attribute("#play", "aria-pressed") == "false"


@pytest.mark.parametrize("name", mostly_exhaustive(["lanes", "torus", "alone"], "lanes".__eq__))
def test_nothing_is_wider_than_the_page(opened, name):
    page = opened(name)
    for width, height in (PHONE, DESK):
        page.set_viewport_size({"width": width, "height": height})
        picture, code = (page.locator(part).bounding_box() for part in (".player", ".code"))
        if width == PHONE[0]:
            assert code["y"] > picture["y"] + picture["height"]
        elif name != "torus":  # which has the whole width
            assert code["x"] > picture["x"] + picture["width"]
        box = page.locator("#stage svg").bounding_box()
        assert picture["x"] <= box["x"]
        assert box["x"] + box["width"] <= picture["x"] + picture["width"]
        lines = "(all) => all.every((e) => e.scrollWidth <= e.clientWidth)"
        assert page.locator("pre").evaluate_all(lines)
        for larger in ("true", "false"):
            page.click("#larger")
            assert page.get_attribute("#larger", "aria-pressed") == larger
            assert page.evaluate("document.documentElement.scrollWidth") == width
            if larger == "true" and width == PHONE[0] and name != "alone":
                assert page.locator("#stage svg").bounding_box()["width"] > box["width"]


LEGIBLE = """() => {
  const svg = document.querySelector("#stage svg");
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const sizes = [...svg.querySelectorAll("text")].map((e) => e.getAttribute("font-size"));
  return scale * Math.min(...sizes);
}"""
SCROLLS = """() => {
  const { scrollWidth, clientWidth, scrollLeft } = document.querySelector(".picture");
  return [scrollWidth - clientWidth, scrollLeft];
}"""


@pytest.mark.exhaustive
def test_letters_can_be_read_on_a_phone(visit, tmp_path):
    file = tmp_path / "many.html"
    file.write_text(as_page(plan("psum", "one_shot", (16,))), encoding="utf-8")
    page = visit(file, viewport={"width": PHONE[0], "height": PHONE[1]})
    assert page.evaluate(SCROLLS)[0] == 0  # all of it at once
    page.click("#larger")
    assert page.evaluate(LEGIBLE) >= 10.99
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    room, left = page.evaluate(SCROLLS)
    assert room > 100  # all of it can be reached
    assert left == pytest.approx(room / 2, abs=1)


TIME = "document.querySelector('#stage svg').getCurrentTime() / 2.4"
WHERE = """() => [...document.querySelectorAll("[data-round='1'] [data-at]")].map((message) => {
  const { x, y } = message.getBoundingClientRect();
  return [Math.round(x), Math.round(y)];
})"""


@pytest.mark.exhaustive
def test_messages_move_and_stop_on_their_arrows(opened):
    page = opened("ring", hash="#6000")  # a machine may be slow, too
    page.keyboard.press("ArrowRight")
    seen = []
    for time in (1.12, 1.24, 1.36):
        page.wait_for_function(f"{TIME} > {time}")
        seen.append((page.evaluate(TIME), page.evaluate(WHERE)))
    times = [time for time, _ in seen]
    assert 1 < times[0] < times[1] < times[2] < 2
    assert page.locator(".parked").count() == 0
    assert seen[1][1] != seen[2][1]
    page.keyboard.press("End")
    assert page.locator(".parked > g").count() == 4
    assert page.evaluate(TIME) == pytest.approx(6.995)


def test_motion_is_reduced_on_request(opened):
    page = opened("ring", hash="#60000", reduced_motion="reduce")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(TIME) == pytest.approx(1.995)
    assert page.locator(".parked > g").count() == 4
    page.keyboard.press("Space")  # plays: the next round, shown at once
    assert shown(page) == 2
    assert page.evaluate(TIME) == pytest.approx(2.995)


@pytest.mark.parametrize(
    ("name", "cell"),
    mostly_exhaustive([("ring", 2), ("stages", 0)], lambda name, _: name == "ring"),
)
def test_one_shard_is_followed(opened, name, cell):
    page = opened(name, reduced_motion="reduce")
    page.keyboard.press("ArrowRight")
    faint = """(whom) => [...document.querySelectorAll("#stage [data-of]")].every((part) =>
      part.classList.contains("aside") === !part.dataset.of.split(" ").includes(whom))"""
    cells = page.locator(f"[data-follow='{cell}']:visible")
    cells.first.click()
    assert page.input_value("#follow") == str(cell)
    assert page.evaluate(faint, str(cell))
    assert page.locator("#stage .aside").count() > 0
    page.select_option("#follow", "1")
    assert page.evaluate(faint, "1")
    page.select_option("#follow", "")
    assert page.locator("#stage .aside").count() == 0


@pytest.mark.exhaustive
def test_an_animation_follows_the_color_scheme_and_reduced_motion(browser, tmp_path):
    file = tmp_path / "film.svg"
    file.write_text(as_motion(plan("psum", "ring", (3,))), encoding="utf-8")
    look = """() => [
      getComputedStyle(document.querySelector("rect")).fill,
      ...[".moving", ".still"].map((of) => getComputedStyle(document.querySelector(of)).display),
    ]"""
    for scheme, motion, seen in (
        ("light", "no-preference", ["rgb(255, 255, 255)", "inline", "none"]),
        ("dark", "reduce", ["rgb(28, 32, 41)", "none", "inline"]),
    ):
        page = browser.new_page(color_scheme=scheme, reduced_motion=motion)
        page.goto(file.as_uri())
        assert page.evaluate(look) == seen
        page.close()


@pytest.mark.exhaustive
def test_text_has_enough_contrast(browser):
    """Also those that have no colour of their own, such as the names of ranks."""
    contrast = """() => {
      const light = (colour) => {
        const [r, g, b] = colour.match(/\\d+/g).map((part) => {
          const share = part / 255;
          return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
      };
      const paper = light(getComputedStyle(document.querySelector("svg > rect")).fill);
      const ratios = [...document.querySelectorAll("text[font-weight='600']")].map((text) => {
        const ink = light(getComputedStyle(text).fill);
        return Math.max(ink / paper, paper / ink);
      });
      return Math.min(...ratios);
    }"""
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        for picture in (as_svg(plan("psum", "ring", (3,))), as_motion(plan("psum", "ring", (3,)))):
            page.set_content(picture)
            assert page.evaluate(contrast) > 4.5, scheme  # WCAG 2.2, AA
        page.close()


PICTURES = [*PAGES.values(), ("psum", "direct", (8,)), ("psum", "torus", (2, 2, 2))]
PICTURES += [("all_to_all", "bruck", (4, 3)), ("psum", "bruck", (2,)), ("pmin", "torus", (4, 4))]


@pytest.mark.exhaustive
def test_drawings_fit_their_view_box(browser):
    page = browser.new_page()
    drawn = [(shown, as_svg(plan(*shown))) for shown in PICTURES]
    drawn += [(shown, as_motion(plan(*shown))) for shown in PICTURES[:3]]
    for shown, picture in drawn:
        page.set_content(picture)
        assert page.evaluate("""() => {
          const svg = document.querySelector("svg"), ground = svg.querySelector("rect");
          ground.remove();
          svg.querySelector(".still")?.remove();
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
