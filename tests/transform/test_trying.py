"""`tried` and `python -m ringcoll try`: which forms are compiled, what is kept and printed.

Reports are fakes: the more messages a program has, the less is its total.
"""

import json
from argparse import Namespace
from importlib.util import find_spec
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
from jax import lax
from support import every_rank, make_mesh, python

from ringcoll.commands.trying import as_json, in_words, sets_for, until_ctrl_c
from ringcoll.transform.trying import NO_SITE, SPENT, Trial, quickest, tried

XS = np.ones((4, 4, 8), np.float32), np.ones((4, 8, 8), np.float32)
SETS = {"fast": {"gain": 5}, "slow": {"gain": -5}, "unknown": {"gain": "?"}}
GATHER = "all_gather over x, float32[4,8] [8,8]"
SCATTER = "psum_scatter over x, float32[16,8] [16,8] [8,8]"


def step(x, w):
    h = lax.all_gather(x, "x", tiled=True)
    return lax.psum_scatter(h @ w @ w, "x", tiled=True)


def report(total, rows=(), unpriced=(), **parts):
    parts = {"compute": 0.75 * total, "exposed": 0.25 * total} | parts
    fixed = {"unread": (), "timed": True, "title": "step on 4", "parts": parts}
    return SimpleNamespace(total=total, rows=rows, unpriced=unpriced, **fixed)


def forms(f=step, sets=SETS, exposed_line=1, **options):
    """The trials of a function; the compiler refuses one set of options, and "two_ended"."""
    program = every_rank(make_mesh(4), f, True)
    at = f"{__file__}:{step.__code__.co_firstlineno + exposed_line}"
    rows = (SimpleNamespace(source=at, exposed=1.0),)

    def report_of(form, options):
        messages = form.lower(*XS).as_text().count("collective_permute")
        return report(50 - options.get("gain", 0) - messages, rows=rows)

    return tried(program, XS, report_of, sets, **options)


def test_what_lowers_the_total_is_kept():
    trials = [*forms(exposed_line=2)]
    assert [one.name for one in trials[:6]] == [
        *("as it is", "as it is, fast", "as it is, slow", "as it is, unknown"),
        *("overlapped", "overlapped, fast"),
    ]
    assert trials[3].why.startswith("TypeError: unsupported operand")
    assert trials[4].why == "the same program as 'as it is'"  # on CPU nothing is taken by "auto"
    named = [(one.name, one.site.split(maxsplit=1)) for one in trials[6:]]
    line = step.__code__.co_firstlineno
    sites = [f"test_trying.py:{line + 2}", SCATTER], [f"test_trying.py:{line + 1}", GATHER]
    algorithms = "lax", "ring", "bidirectional_ring", "two_ended"
    assert named == [
        (f"site {n}: {name}", site) for n, site in enumerate(sites, 1) for name in algorithms
    ]
    assert trials[6].why == "the same program as 'as it is, fast'"
    best = quickest(trials)
    assert best.options == "fast"
    assert best.choices[SCATTER] != "lax" != best.choices[GATHER]
    first = quickest(trials[:10])
    assert first.choices == {SCATTER: best.choices[SCATTER], GATHER: "lax"}
    assert best.report.total < first.report.total < 45
    assert [one.site.split()[1] for one in forms(sets={}) if one.site][::4] == [
        "all_gather",
        "psum_scatter",
    ]


def test_without_a_budget_or_a_site_only_options_are_tried():
    one, *others = forms(budget=0.0)
    assert one.report.total == 50
    assert {other.why for other in others} == {SPENT}
    *_, last = forms(lambda x, w: lax.psum(x, "x") @ w)
    assert (last.why, last.report) == (NO_SITE, None)
    with pytest.raises(TypeError, match="incompatible shapes"):
        next(forms(lambda x, w: x + w[:5]))


PLAIN, RING = ("as it is", "", None, 40), {GATHER: "ring"}
OURS, GIVEN = "step = ringcoll.overlapped(step", f', choices={{\n    "{GATHER}": "ring"\n}}'
OPTIONS = 'step = jax.jit(step, compiler_options=ringcoll.overlap.OPTIONS["fast"])'


@pytest.mark.parametrize(
    ("trials", "file", "lines"),
    [
        (
            [("slow", "", None, 41)],
            None,
            "nothing that was tried is quicker than the step as it is",
        ),
        (
            [("fast", "fast", None, 30), ("overlapped", "fast", {}, 31)],
            None,
            f"the built-in wins: no form of overlapped is quicker than 'fast':\n{OPTIONS}",
        ),
        ([("fast", "fast", None, 30)], None, f"the quickest is 'fast':\n{OPTIONS}"),
        ([("ours", "", {}, 30)], "c.json", f"the quickest is 'ours':\n{OURS})"),
        ([("ours", "", RING, 30)], None, f"the quickest is 'ours':\n{OURS}{GIVEN})"),
        (
            [("ours", "fast", RING, 30)],
            "c.json",
            f"the quickest is 'ours':\n{OURS}, choices='c.json')\n{OPTIONS}",
        ),
    ],
)
def test_the_lines_to_write(trials, file, lines):
    made = [Trial(*one, report=report(total * 1e-6)) for *one, total in (PLAIN, *trials)]
    assert "\n".join(in_words(made, file)).split("\n\n")[-1] == lines


def test_the_table_hides_nothing():
    left = Trial("site 1: ring", choices=RING, site=f"a.py:1 {GATHER}", why="RuntimeError: no")
    kernel = Trial("kernel", report=report(20e-6, host=2e-6, unpriced=("my_kernel",)))
    trials = [Trial("as it is", report=report(40e-6)), left, kernel]
    assert "\n".join(in_words(trials)).splitlines()[:-2] == [
        *("step on 4", ""),
        "form      total us  compute us  exposed us  host us  times as fast",
        "kernel          20          15           5        2          2.000",
        "as it is        40          30          10        0          1.000",
        "",
        "the row of a site is the quickest form until then, with another algorithm there:",
        f"site 1: a.py:1 {GATHER}",
        "site 1: ring: RuntimeError: no",
        "not priced, so totals are too low: my_kernel",
    ]
    _, second, third = json.loads(as_json(trials))
    assert (second["why"], second["report"], second["choices"]) == (left.why, None, RING)
    assert third["report"]["total"] == 20e-6


def test_ctrl_c_keeps_what_there_is():
    def stopped():
        raise KeyboardInterrupt
        yield

    args = Namespace(interrupted=False)
    with pytest.raises(KeyboardInterrupt):
        until_ctrl_c(args, stopped())
    assert not args.interrupted
    first = [*islice(forms(), 2)]
    assert until_ctrl_c(args, chain(first, stopped())) == first
    assert args.interrupted


def test_sets_are_for_the_chip_and_no_default():
    assert "sparse cores" in sets_for("TPU v6 lite")
    assert {"sparse cores", "windowed einsum", "vmem 96 MiB"}.isdisjoint(sets_for("TPU v5 lite"))
    assert sets_for("NVIDIA unknown") == {}


@pytest.mark.tpu_aot
@pytest.mark.skipif(find_spec("libtpu") is None, reason="no libtpu: pip install -e '.[tpu]'")
def test_a_real_compiler(tmp_path):
    file = tmp_path / "choices.json"
    command = "try --example all_gather_then_matmul --shape 2048x2048x40960 --json --write"
    done = python("-m", "ringcoll", *command.split(), str(file))
    assert done.returncode == 0, done.stderr
    trials = {one["name"]: one for one in json.loads(done.stdout)}
    assert trials["site 1: lax"]["why"] == "the same program as 'as it is'"
    totals = {name: one["report"]["total"] for name, one in trials.items() if one["report"]}
    assert {"as it is, collective matmuls", "site 1: ring"} < totals.keys()
    assert totals["overlapped"] < totals["as it is"]
    best = trials[min(totals, key=totals.get)]["choices"]
    assert json.loads(file.read_text()) == best if best else not file.exists()
