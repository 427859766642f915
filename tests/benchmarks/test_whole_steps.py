"""Whole steps: all forms compute the same, and the page is what the figures give."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from support import mostly_exhaustive

from benchmarks.__main__ import main
from benchmarks.compiled import whole
from benchmarks.compiled.whole_steps import BY, OURS, OVERLAPPED, program
from benchmarks.machines.measured import page_text

#: Sums of float32 in a different order differ by about 1e-6 of the largest element.
TOLERANCE = 1e-4
NAMES = list(whole.STEPS)


def tiny(name):
    step = whole.STEPS[name]
    heads = step.layer in ("block", "context")
    sizes = {"width": 1024 if heads else 64, "hidden": 2048 if step.layer == "attention" else 64}
    return replace(step, tokens=(8, 64), vocabulary=64 * bool(step.vocabulary), **sizes)


def values(step, like):
    """Weights and tokens of order one; all experts get as many tokens, in every layer."""
    rng = np.random.default_rng(0)
    weights, x = jax.tree.map(lambda of: rng.standard_normal(of.shape) * of.size**-0.25, like)
    if step.layer == "experts":  # tokens choose by their first features, and results are small
        weights = jax.tree.map(lambda of: 0.1 * of, weights)
        router = weights["layers"]["router"]
        router[:] = 0
        router[:, :8] = np.tile(np.eye(8), router.shape[2] // 8)
        x[..., :8] += 2 * np.resize(np.eye(8), (*x.shape[:2], 8))
    return jax.tree.map(
        lambda x, of: jax.device_put(x.astype(of.dtype), of.sharding), (weights, x), like
    )


@pytest.mark.parametrize("name", mostly_exhaustive(NAMES, "fsdp2-tp4-mlp8192".__eq__))
def test_all_forms_of_a_step_have_the_same_loss_and_gradients(name):
    step = tiny(name)
    kinds = (AxisType.Auto,) * len(step.axes)
    mesh = jax.make_mesh((*step.axes.values(),), (*step.axes,), axis_types=kinds)
    plain = None
    for form in (*step.forms, BY + "ring"):
        function, like = program(step, form, mesh, jnp.float32)
        found = jax.tree.leaves(jax.jit(function)(*values(step, like)))
        plain = plain or found
        for expected, actual in zip(plain, found, strict=True):
            largest = np.abs(expected).max()
            assert 0 < largest < np.inf
            assert np.abs(np.asarray(actual) - expected).max() < TOLERANCE * largest, form


def found(form, total, topology="v5p:2x2x2", options=whole.NONE, step="tp8-mlp8192"):
    which = whole.Which(step, topology, form, options)
    figures = {"total": total, "exposed": total / 10, "jax": "1", "libtpu": "2"}
    return which, {"which": which._asdict(), **figures}


def test_the_page_is_what_the_figures_give():
    recorded = json.loads(whole.FIGURES.read_text("utf-8"))
    rows = {whole.Which(**row["which"]): row for row in recorded}
    assert all(map(whole.is_program, rows))
    page = whole.PAGE.read_text("utf-8")
    assert page == page_text(page, whole.tables(rows), whole.notes(rows))


def test_what_we_lose_stands_first_and_counts_if_it_is_much():
    v5p = [found("plain", 100.0), found("plain", 90.0, options=whole.SPARSE)]
    v5p += [
        found(form, us, options=whole.SPARSE) for form, us in ((OURS, 100.0), (OVERLAPPED, 60.0))
    ]
    v5e = [found("plain", 100.0, "v5e:4x2"), found(OURS, 102.0, "v5e:4x2")]
    every, means, of_overlapped, forms = whole.tables(dict([*v5e, *v5p]))
    assert every.title == "steps: 2, of which ours is more than 3% slower in 1"
    cells = ("plain, sparse cores", "90, 10.0%", "100, 10.0%", "0.900", "60, 10.0%")
    assert every.rows[0] == ("tp8-mlp8192", "v5p:2x2x2", *cells)
    assert every.rows[1][-2:] == ("0.980", "")
    assert means.rows[0] == ("all", "0.939", "2", "1")
    assert of_overlapped.rows == [("1.500", "1", "0")]
    assert forms.rows == [
        ("plain", "2", "1", "1.054"),
        ("plain, sparse cores", "1", "1", "1.000"),
    ]


def test_a_program_or_a_refusal_is_recorded(tmp_path, monkeypatch, capsys):
    for name in ("FIGURES", "PAGE"):
        copy = tmp_path / getattr(whole, name).name
        copy.write_bytes(getattr(whole, name).read_bytes())
        monkeypatch.setattr(whole, name, copy)
    _, row = found("plain", 3.0)
    figures = iter([row])
    monkeypatch.setattr(whole, "compiled", lambda *of: next(figures))
    flags = ["whole", "--only", "tp8-mlp8192", "--topology", "v5p:2x2x2", "--set", "none"]
    assert main([*flags, "--form", "plain", "--write"]) == 0
    assert main([*flags, "--form", "compiler", "--write"]) == 1
    assert "failed tp8-mlp8192 v5p:2x2x2 compiler none: StopIteration" in capsys.readouterr().out
    assert "3, 10.0%" in (page := whole.PAGE.read_text("utf-8"))
    assert "- refused: tp8-mlp8192 v5p:2x2x2 compiler none: " in page
