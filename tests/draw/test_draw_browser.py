"""Drawings in a real browser: colours, reduced motion, contrast, and their view boxes."""

import pytest
from browsing import needs_a_browser

from ringcoll.draw import as_motion, as_svg, plan

pytestmark = needs_a_browser


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


PICTURES = [("all_reduce", "ring", (4,)), ("psum", "bidirectional_ring", (8,))]
PICTURES += [("all_gather", "torus", (4, 2)), ("pmax", "recursive_doubling", (6,))]
PICTURES += [("all_to_all", "bruck", (1,)), ("psum", "direct", (8,)), ("psum", "torus", (2, 2, 2))]
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
