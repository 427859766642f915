"""Published measurements, the table in JAX's wheel for CUDA, and the error of the model."""

import json
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import pytest

from benchmarks.__main__ import main
from benchmarks.machines import fit, measured, points, wheel
from ringcoll.costs.machines import FOLDER

MIB = 2**20


def installed():
    """The version of the wheel; "" if it is not installed."""
    try:
        return version(wheel.WHEEL)
    except PackageNotFoundError:
        return ""


#: The curves are of the table in one version of the wheel; others have another, or none.
OF_THE_WHEEL = pytest.mark.skipif(
    installed() != "0.12.0.1", reason=f"needs {wheel.WHEEL} 0.12.0.1: pip install -e '.[gpu]'"
)


def test_the_points_are_read():
    found, untimed = points.read()
    assert (len(found), untimed) == (1246, 1)
    assert {one.hosts for one in found if one.device == "a100"} == {2, 8, 128}


def test_the_model_is_as_near_as_the_page_says():
    """The goal: a median error of 10 % from 1 MiB on, 25 % below, and 20 % for each machine."""
    found, _ = points.read()
    judged = [one for one in found if not one.why_left_out]
    assert len(judged) > 1000
    errors = [(one, measured.off(one)) for one in judged]
    assert median(off for one, off in errors if one.bytes >= MIB) < 0.05
    assert median(off for one, off in errors if one.bytes < MIB) < 0.1
    for device in {one.device for one in judged}:
        assert median(off for one, off in errors if one.device == device) < 0.2, device


def test_the_model_knows_the_faster():
    found, _ = points.read()
    right, pairs = measured.winners([one for one in found if not one.why_left_out])
    assert pairs > 50
    assert right / pairs > 0.95


def test_the_model_carries_to_what_was_not_fitted():
    """Curves carry to other numbers of ranks, within hosts better than between hosts."""
    found, _ = points.read()
    judged = [one for one in found if not one.why_left_out]
    errors = {
        what: median(
            abs(measured.model_seconds_on(one, device) / one.seconds - 1) for one, device in some
        )
        for what, some in measured.held_out(judged).items()
    }
    ranks = [error for (_, without), error in errors.items() if without.startswith("ranks")]
    assert median(ranks) < 0.2
    assert max(ranks) < 0.4
    assert errors["h100", "source xxrjun/nccl-tests-cluster"] < 0.1
    assert {errors[name, "several hosts"] < 0.7 for name in ("a100", "gh200")} == {True}


def test_the_command_prints_errors(capsys):
    assert main(["measured", "--device", "v5p,gloo"]) == 0
    printed = capsys.readouterr().out
    assert "error by machine" in printed
    assert "v5p" in printed
    with pytest.raises(SystemExit):
        main(["measured", "--device", "abacus"])


def test_a_message_of_no_protocol_buffer_is_refused():
    with pytest.raises(ValueError, match="no message"):
        wheel._fields(b"\x07\x01")
    assert wheel._fields(b"\x08\x96\x01\x12\x02hi") == [(1, 150), (2, b"hi")]


@OF_THE_WHEEL
def test_the_table_in_the_wheel():
    inside = wheel.points()
    counts = {name: sum(one.device == name for one in inside) for name in wheel.KEYS.values()}
    assert counts["h100"] == counts["b200"] == 330
    published = [one for one in points.read()[0] if one.source.startswith("XLA:GPU")]
    of = {(o.device, o.collective, o.ranks, o.bytes, round(o.seconds * 1e7)) for o in inside}
    same = [
        o
        for o in published
        if any((o.device, o.collective, o.ranks, o.bytes, round(o.seconds * 1e7) + d) in of
               for d in range(-9, 10))
    ]  # fmt: skip
    assert len(same) > 0.9 * len(published)


@OF_THE_WHEEL
def test_the_curves_are_those_that_the_command_fits():
    for name, curves in fit.fit_curves(fit.everything()).items():
        kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["curves"]
        knots = [(c["collective"], c["ranks"], c["hosts"], c["knots"]) for c in kept]
        assert [(c["collective"], c["ranks"], c["hosts"], c["knots"]) for c in curves] == knots


@OF_THE_WHEEL
def test_the_page_is_what_the_command_writes():
    page = measured.PAGE.read_text(encoding="utf-8")
    found, notes = measured.everything()
    assert page == measured.page_text(page, measured.tables(found), notes)


@OF_THE_WHEEL
def test_the_matmuls_are_those_that_the_command_fits():
    measured = wheel.matmuls()
    cube = 2 * 4096**3
    best = {one.device: one.flops / one.seconds / 1e12 for one in measured if one.flops == cube
            and one.dtype == "bfloat16"}  # fmt: skip
    assert best == pytest.approx({"h100": 780, "b200": 1417}, rel=0.01)
    for name, fitted in fit.fit_matmuls(measured).items():
        kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["matmuls"]
        assert kept == fitted
        assert max(one["error"] for one in kept) < 0.15
