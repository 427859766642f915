"""The pages agree with the repository: links, commands, versions, figures, tables and code."""

import json
import re
import shlex
import textwrap
import tomllib
from functools import partial
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest
from support import data, make_mesh, mostly_exhaustive, per_rank, python

import benchmarks.__main__ as measuring
import ringcoll
import ringcoll.__main__ as saying
from benchmarks.collectives import sweep
from benchmarks.compiled import grid, pages, recorded_claims, steps, whole
from ringcoll import algorithms, costs
from ringcoll.commands import arguments, explain
from ringcoll.runtime import run as running

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/pages/*.md"),
    )
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
#: `[text](target)`, `![text](target)` and `[label]: target`.
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
#: A program, and what it prints.
PAIR = re.compile(r"```python\n((?:(?!```).)*)```\n+```text\n(.*?)```", re.DOTALL)
PROGRAMS = sorted(name for name, text in PAGES.items() if PAIR.search(text))


def anchors(text):
    """The names that a heading can be linked by, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def dead_links(name, text):
    """The links of a page inside the repository that lead nowhere."""
    for target in ("".join(found) for found in LINK.findall(FENCED.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        if not path.exists() or (anchor and anchor not in anchors(path.read_text("utf-8"))):
            yield target


@pytest.mark.parametrize("name", sorted(PAGES))
def test_links_lead_somewhere(name):
    assert list(dead_links(name, PAGES[name])) == []


def test_the_index_lists_every_page():
    linked = {"".join(found) for found in LINK.findall(PAGES["docs/README.md"])}
    there = {name for name in PAGES if "/" in name} - {"docs/README.md"}
    known = {f"docs/{link}" if "../" not in link else link.removeprefix("../") for link in linked}
    assert there == known


@pytest.mark.parametrize("file", ["examples/lessons/ring.svg", "examples/lessons/tour.svg"])
def test_a_committed_picture_is_what_its_command_draws(file, tmp_path):
    (command,) = {
        tuple(words) for words in (param.values for param in commands()) if words[-1] == file
    }
    drawn = tmp_path / "drawn.svg"
    assert saying.main([*command[1:-1], str(drawn)]) == 0
    assert drawn.read_text("utf-8") == (ROOT / file).read_text("utf-8")


def claimed(**flags):
    """The claim for a program of the newest JAX."""
    (found,) = (
        claim
        for claim in recorded_claims.load()
        if claim.jax.startswith("0.12") and flags.items() <= {*claim.which.flags}
    )
    return found


def test_the_picture_has_the_claimed_figures():
    form = {"form": "all_gather_matmul", "shape": "8192x8192x28672", "direction": "forward"}
    plain, ours = (
        claimed(**form, topology="v5e:4x2", algorithm=name) for name in ("plain", "auto")
    )
    figures = [(f"{one.total_us:.0f}", f"{one.exposed_percent:.1f}") for one in (plain, ours)]
    picture = (ROOT / "benchmarks/pages/timeline.svg").read_text("utf-8")
    assert re.findall(r"total (?:\d+ to )?(\d+) us = .*? us \(([\d.]+)%\)", picture) == figures


def test_readme_begins_with_a_whole_step():
    rows = {
        whole.Which(**row["which"]): row for row in json.loads(whole.FIGURES.read_text("utf-8"))
    }
    plain, ours, pieces = (
        rows["tp8-mlp8192", "v5e:4x2", form, whole.NONE]
        for form in ("plain", whole.OVERLAPPED, whole.PIECES)
    )
    figures = [
        (f"{row['total'] / 1e3:.1f}", f"{row['exposed'] / row['total']:.1%}")
        for row in (plain, ours)
    ]
    assert re.findall(r"# ([\d.]+) ms, ([\d.]+%) exposed", PAGES["README.md"]) == figures
    assert f"cut into pieces, takes {pieces['total'] / 1e3:.1f} ms" in PAGES["README.md"]


def test_readme_has_the_gains_of_the_grid():
    rows = json.loads(grid.PAGE.with_suffix(".json").read_text("utf-8"))
    (every,) = (line for line in grid.gains(rows) if line.startswith("| all |"))
    plain, best, faster, equal, slower = re.findall(r"[\d.]+", every)
    gains = f"| {plain} | {best}: {faster} faster, {equal} equal, {slower} slower |"
    assert gains in PAGES["README.md"]


def test_readme_has_the_gain_of_whole_steps():
    rows = json.loads(whole.FIGURES.read_text("utf-8"))
    _, means, of_overlapped, _ = whole.tables({whole.Which(**row["which"]): row for row in rows})
    _, mean, steps, slower = means.rows[0]
    of_steps = f"[{steps} whole steps](benchmarks/pages/whole.md) of four layers, with gradients"
    gain = f"| {float(mean):.2f}: {slower} slower by more than 3 % |"
    assert f"{of_steps} | {gain}" in PAGES["README.md"]
    mean, steps, slower = of_overlapped.rows[0]
    overlapped = f"{steps} of them, plain, under `overlapped` | {float(mean):.2f}: {slower} slower"
    assert overlapped in PAGES["README.md"]
    chips = (f"{float(mean):.2f} ({name.partition(':')[0]})" for name, mean, *_ in means.rows[1:5])
    assert "By chip, whole steps are {}, {}, {} and {}".format(*chips) in PAGES["README.md"]


def test_readme_has_how_many_published_steps_the_report_is_near():
    near, judged = re.search(r", (\d+) of (\d+) near", steps.tables(steps.read())[0].title).groups()
    assert (
        f"[{near} of the {judged} training steps](benchmarks/pages/steps.md)" in PAGES["README.md"]
    )


def test_the_functions_of_the_table_for_loops_exist():
    calls = re.findall(r"`(?:with )?ringcoll\.([\w.]+)\(", PAGES["docs/choose.md"])
    assert len(calls) > 20
    for call in calls:
        found = ringcoll
        for name in call.split("."):
            found = getattr(found, name)
        assert callable(found)


def commands():
    """Each command of ringcoll and of the benchmarks on a page, but for those with a NAME in it."""
    for name, text in PAGES.items():
        blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
        lines = [line.partition("  #")[0].strip() for line in blocks.splitlines()]
        inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCED.sub("", text))]
        for line in (*lines, *inline):
            if re.match(r"python -m (ringcoll|benchmarks|examples)\b", line):
                words = shlex.split(line.partition(";")[0])[2:]
                if not any(re.fullmatch(r"[A-Z]+(:[A-Z]+)?", word) for word in words):
                    yield pytest.param(*words, id=f"{name}: {' '.join(words)}")


@pytest.mark.parametrize("words", [pytest.param(p.values, id=p.id) for p in commands()])
def test_commands_can_be_typed(monkeypatch, words):
    module, *flags = words
    if module.startswith("examples"):
        assert find_spec(module)
        return
    if module == "ringcoll" and len(flags) < 2:  # the command by its name
        assert {*flags} <= {*saying.COMMANDS}
        return
    typed = []
    for each in (*saying.COMMANDS.values(), *measuring.COMMANDS.values(), sweep):
        monkeypatch.setattr(each, "run", lambda args: typed.append(args) or 0)
    monkeypatch.setattr(arguments, "check_files", lambda args: None)
    assert {"ringcoll": saying, "benchmarks": measuring}[module].main(flags) == 0
    assert typed


def test_the_page_of_auto_has_what_its_command_prints(capsys):
    page = PAGES["docs/auto.md"]
    command, printed = re.search(
        r"```sh\npython -m ringcoll (.*)\n```\n```text\n(.*?)```", page, re.S
    ).groups()
    assert saying.main(command.split()) == 0
    assert capsys.readouterr().out == printed


def test_bounds_and_bytes_of_the_precision_page_are_those_of_the_model():
    rows = re.findall(r"^\| `(.+) \|$", PAGES["docs/precision.md"], re.MULTILINE)
    assert rows
    narrow, wide = float(jnp.finfo(jnp.bfloat16).eps), float(jnp.finfo(jnp.float32).eps)
    for row in rows:
        names, *cells = row.split(" | ")
        for algorithm in re.findall(r"\w+", names):
            call = "psum_scatter", algorithm, (8,)
            price = costs.price(*call)
            assert cells == [
                str(costs.roundings(*call)),
                f"{costs.error_bound(*call, narrow):.3f}",
                f"{float(price.sent / 8):.3f}",
                f"{costs.error_bound(*call, narrow, wide):.4f}",
                f"{float((2 * price.sent - price.raw) / 8):.3f}",
            ]


def test_gains_of_a_wire_on_the_precision_page_are_those_of_the_model():
    """The built-in's seconds without a wire, over those with one, by each algorithm."""
    rows = re.findall(r"^\| (v5\w) ([\dx]+) \| (.+) \|$", PAGES["docs/precision.md"], re.MULTILINE)
    assert len(rows) == 2
    for device, shape, cells in rows:
        ranks = tuple(map(int, shape.split("x")))
        place = costs.place_of(ranks, device)
        call = partial(costs.predict, "psum", 2**26, place, dtype="bfloat16")
        algorithms = "lax", "direct", "torus", "hamiltonian"
        gains = [call() / call(algorithm=name, wire="int8") for name in algorithms]
        assert cells == " | ".join(f"{gain:.2f}" for gain in gains)


def test_the_version_is_the_same_everywhere():
    assert f"\nversion: {ringcoll.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.search(r"^## (\S+?),", PAGES["CHANGELOG.md"], re.M)[1] == ringcoll.__version__


def test_the_command_is_the_module_and_says_its_version(capsys):
    scripts = PROJECT["project"]["scripts"]
    command = EntryPoint("ringcoll", scripts["ringcoll"], "console_scripts")
    assert command.load() is saying.main
    with pytest.raises(SystemExit) as end:
        saying.main(["--version"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"ringcoll {ringcoll.__version__}, jax {jax.__version__}, Python ")


# -- code, and what is written by commands --


@pytest.mark.parametrize("page", mostly_exhaustive(PROGRAMS, lambda page: page == "docs/learn.md"))
def test_the_code_prints_what_the_page_says(page):
    for code, expected in PAIR.findall(PAGES[page]):
        ran = python("-c", code)
        assert ran.stdout == expected, ran.stderr


@pytest.mark.parametrize("n", mostly_exhaustive([1, 2, 3, 5, 8], lambda n: n == 3))
def test_the_lines_of_the_first_page_are_a_collective_and_a_product(n):
    ring = r"(?<=```py\n)def all_gather_matmul.*?(?=\n```)"
    lines, recipes = re.findall(ring, PAGES["README.md"], re.DOTALL)
    for module in (algorithms, running):  # which show the same lines
        assert textwrap.indent(lines, "    ") in module.__doc__
    ring, ours = ({"lax": jax.lax, "jnp": jnp, "jax": jax, "ringcoll": ringcoll} for _ in range(2))
    exec(lines, ring)
    exec(recipes, ours)

    def gathered(x, w):
        return jax.lax.all_gather(x, "x", tiled=True) @ w

    def scattered(x, w):
        return jax.lax.psum_scatter(x @ w, "x", tiled=True)

    def with_gradients(product, x, w):
        y, pull_back = jax.vjp(product, x, w)
        return y, pull_back(jnp.sign(y - 5))  # exact

    x, w = data((n, 2 * n, 3)) % 5, data((n, 3, 4)) % 7
    for product, plain in (
        (ring["all_gather_matmul"], gathered),
        (partial(ours["all_gather_matmul"], axis="x"), gathered),
        (partial(ours["matmul_reduce_scatter"], axis="x"), scattered),
    ):
        found, right = (
            per_rank(make_mesh(n), partial(with_gradients, one), x, w) for one in (product, plain)
        )
        chex.assert_trees_all_equal(found, right)


@pytest.mark.tpu_aot
@pytest.mark.exhaustive
@pytest.mark.skipif(
    find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"
)
def test_the_test_that_a_page_shows_passes(tmp_path):
    example = r"```py\n((?:(?!```).)*\ndef test_.*?)```"
    (shown,) = re.findall(example, PAGES["docs/overlap.md"], re.DOTALL)
    file = tmp_path / "test_exposed.py"
    file.write_text(shown, encoding="utf-8")
    done = python("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", str(file))
    assert "1 passed" in done.stdout, done.stdout


def test_the_tables_of_algorithms_hold_what_explain_says():
    """Every line is right; an algorithm that is new need not be there: `claims --write` adds it."""
    (shown,) = pages.ALGORITHMS.findall(PAGES["docs/algorithms.md"])
    assert all(f"| {title} |" in shown for title in explain.LISTS)
    wrong = set(shown.strip().splitlines()) - set(explain.markdown())
    assert not wrong, "python -m benchmarks claims --write"


def test_the_drawings_are_what_the_command_prints():
    page = PAGES["docs/how.md"]
    for drawn in (page, PAGES["docs/overlap.md"]):  # which has the table of options
        assert drawn == pages.with_algorithms(drawn), "python -m benchmarks claims --write"
    for drawing in re.findall(r"<!-- draw (\w+ \w+ \d) -->\n```text\n", page):
        assert "python -m ringcoll draw {} --algorithm {} -n {}\n".format(*drawing.split()) in page
