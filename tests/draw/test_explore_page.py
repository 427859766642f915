"""The page of `explore`: it shows what is chosen, at the prices of `predict`."""

import pytest
from browsing import needs_a_browser

from ringcoll.__main__ import main
from ringcoll.costs import place_of, predict
from ringcoll.draw import explore
from ringcoll.draw.explore import SIZES, as_explorer
from ringcoll.io.text import bytes_in_words, seconds_in_words
from ringcoll.schedules.registry import names


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    page_file = tmp_path_factory.mktemp("explore") / "explore.html"
    assert main(["explore", "--html", str(page_file), "--ranks", "4,2x2"]) == 0
    return page_file


def settled(page, collective, algorithm, ranks):
    page.wait_for_function(f"document.body.dataset.shown === '{collective}|{algorithm}|{ranks}'")


def times(page):
    """The times in the table, by algorithm."""
    rows = page.locator("#prices tbody tr").all()
    return {row.get_attribute("data-name"): row.locator("td").first.inner_text() for row in rows}


@needs_a_browser
def test_prices_equal_those_of_predict(visit, file):
    page = visit(file)
    settled(page, "psum", "ring", "4")
    for collective, algorithm, ranks, machine, power in (
        ("psum", "halving_doubling", "4", "v5e", 26),
        ("all_gather", "torus", "2x2", "v5p", 20),
        ("psum_scatter", "bruck", "4", "b200", 10),
    ):
        for name, value in (("collective", collective), ("ranks", ranks)):
            page.select_option(f"#{name}", value)
        page.select_option("#algorithm", algorithm)
        page.select_option("#machine", machine)
        page.locator("#bytes").fill(str(SIZES.index(2**power)))
        settled(page, collective, algorithm, ranks)
        shape = tuple(map(int, ranks.split("x")))
        on = shape[0] if len(shape) == 1 else shape
        wanted = {
            name: seconds_in_words(predict(collective, 2**power, place_of(on, machine), name))
            for name in ("lax", *names(collective))
            if name in times(page)
        }
        assert times(page) == wanted
        assert len(wanted) >= 3
        assert page.locator("#time").inner_text() == wanted[algorithm]
        assert page.locator("#bytes-said").inner_text() == bytes_in_words(2**power)
        least = page.locator("#prices tbody tr").first
        assert least.locator("td").last.inner_text() == "fastest"
        assert page.locator("#code").inner_text().startswith("@listed(")
        assert "alpha" in page.locator("#formula").inner_text()
        (drawn,) = page.locator("#stage svg").all()
        assert drawn.get_attribute("data-shown") == "0"
        count = page.locator("ol [data-go]").count() - 1
        assert page.locator("#counted").inner_text().startswith(f"{count} round")
    assert page.evaluate("location.hash").endswith("machine=b200&bytes=1K")


@needs_a_browser
def test_crossovers_equal_those_of_cost(visit, file, capsys):
    page = visit(file, "#collective=psum&ranks=4&machine=v5e")
    settled(page, "psum", "ring", "4")
    assert main(["cost", "psum", "-n", "4", "--device", "v5e"]) == 0
    line = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("4  "))
    parts = [part.strip() for part in line.removeprefix("4").split("|")]
    ranges = page.locator("#ranges").inner_text()
    ours = [range for range in ranges.split(", ") if "built-in" not in range]
    assert ours[0] == f"Fastest: {parts[0].split(' = ')[0]}"
    assert parts[1] in ranges  # the first crossover, to the byte as it is written


@needs_a_browser
def test_the_url_keys_and_clicks_select(visit, file):
    chosen = "#collective=psum&algorithm=bruck&ranks=4&machine=v6e&bytes=256K&round=2"
    page = visit(file, chosen, reduced_motion="reduce")
    settled(page, "psum", "bruck", "4")
    assert page.get_attribute("#stage svg", "data-shown") == "2"
    assert page.locator("h1").inner_text() == "all-reduce by bruck on 4 ranks"
    page.keyboard.press("ArrowRight")
    assert page.locator("#heading").inner_text() == "Round 3 of 4"
    page.locator("#prices button", has_text="one_shot").press("Enter")
    settled(page, "psum", "one_shot", "4")
    page.focus("#collective")
    page.keyboard.press("ArrowDown")  # the list takes the key, not the player
    settled(page, "all_gather", "ring", "4")
    assert page.input_value("#collective") == "all_gather"
    page.locator("#bytes").press("ArrowRight")
    assert page.locator("#bytes-said").inner_text() == "512K"
    assert page.get_attribute("#stage svg", "data-shown") == "0"
    page.locator("[data-follow='1']:visible").first.click()
    assert page.input_value("#follow") == "1"


@pytest.mark.exhaustive
@needs_a_browser
def test_a_late_response_does_not_replace_the_last_choice(visit, file):
    page = visit(file, "#collective=psum&algorithm=ring&ranks=4")
    settled(page, "psum", "ring", "4")
    page.evaluate("""() => {
      const plain = Response.prototype.json;
      let asked = 0;
      window.late = false;
      Response.prototype.json = async function () {
        const made = await plain.call(this);
        if (asked++) return made;
        await new Promise((done) => { window.release = done; });
        setTimeout(() => { window.late = true; }, 50);  // after what waited for it
        return made;
      };
    }""")
    page.select_option("#algorithm", "bruck")
    page.wait_for_function("'release' in window")
    page.select_option("#algorithm", "one_shot")
    settled(page, "psum", "one_shot", "4")
    page.evaluate("release()")
    page.wait_for_function("late")
    settled(page, "psum", "one_shot", "4")
    assert page.locator("h1").inner_text() == "all-reduce by one_shot on 4 ranks"


@needs_a_browser
def test_a_machine_without_a_price_is_named(visit, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(explore, "COLLECTIVES", {"all_to_all": "all-to-all"})
    page_file = tmp_path / "explore.html"
    assert main(["explore", "--html", str(page_file), "-n", "2x2x2"]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {page_file}, ")
    page = visit(page_file, "#machine=v5e")
    settled(page, "all_to_all", "pairwise", "2x2x2")
    assert page.locator("#time").inner_text() == "no price"
    assert "v5e has no 2x2x2 ranks" in page.locator("#nothing").inner_text()
    page.select_option("#machine", "v5p")
    assert page.locator("#time").inner_text() != "no price"


@pytest.mark.quick
def test_ranks_that_have_no_picture_are_refused(tmp_path, capsys):
    file = str(tmp_path / "a.html")
    for ranks, message in (
        ("32", "ranks 32: pictures can show 2 to 16 ranks"),
        ("1", "ranks 1: pictu"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["explore", "--html", file, "--ranks", ranks])
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="no ranks to choose from"):
        as_explorer([])
