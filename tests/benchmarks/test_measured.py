"""Published measurements, the table in JAX's wheel for CUDA, and the error of the model."""

import json
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import pytest

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


@pytest.fixture(scope="module")
def judged():
    """The published points that the model is to foretell."""
    return [one for one in points.read()[0] if not measured.why_left_out(one)]


def test_the_model_is_as_near_as_the_page_says(judged):
    """The goal: a median error of 10 % from 1 MiB on, 25 % below, and 20 % for each machine."""
    assert len(judged) > 1000
    errors = [(one, measured.off(one)) for one in judged]
    assert median(off for one, off in errors if one.bytes >= MIB) < 0.05
    assert median(off for one, off in errors if one.bytes < MIB) < 0.1
    for device in {one.device for one in judged}:
        assert median(off for one, off in errors if one.device == device) < 0.2, device


def test_the_model_knows_the_faster(judged):
    right, pairs = measured.winners(judged)
    assert pairs > 50
    assert right / pairs > 0.95


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
