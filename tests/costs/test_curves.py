"""Measured curves, and their fit."""

from math import inf

import pytest

from ringcoll.costs.curves import Curve, fit_curve

SIZES = [2.0**k for k in range(10, 31)]


def test_a_curve_is_linear_between_knots_and_infinite_above():
    curve = Curve(((10.0, 1.0), (20.0, 2.0), (40.0, 3.0)))
    assert [curve(size) for size in (10, 15, 20, 30, 40)] == [1, 1.5, 2, 2.5, 3]
    assert [curve(size) for size in (0, 9.99, 40.01)] == [1, 1, inf]
    assert [Curve(((10.0, 1.0),))(size) for size in (9, 10, 11)] == [1, 1, inf]


def test_a_curve_of_three_regimes_has_few_knots():
    def seconds(size):  # a start, a slow wire, a fast one
        return 1e-5 + min(size, 2**20) / 1e9 + max(size - 2**20, 0) / 1e11

    curve, error = fit_curve((size, seconds(size)) for size in SIZES)
    assert len(curve.knots) < 10
    assert error < 0.02
    assert max(abs(curve(size) / seconds(size) - 1) for size in SIZES) < 0.1


def test_outliers_do_not_change_a_curve():
    def points():
        for i, size in enumerate(SIZES):
            yield size, (1e-5 + size / 1e9) * (5 if i in (0, 8) else 1)

    curve, _ = fit_curve(points())
    for i in (0, 8):
        assert curve(SIZES[i]) < 2 * (1e-5 + SIZES[i] / 1e9)


def test_equal_sizes_count_as_their_median():
    curve, error = fit_curve([(8, 1.0), (8, 2.0), (8, 9.0)])
    assert curve.knots == ((8, 2.0),)
    assert error == pytest.approx(7 / 9)


def test_a_curve_never_falls():
    falling = [(2.0**k, 2.0 if k < 13 else 1.0 + 2.0 ** (k - 20)) for k in range(10, 30)]
    curve, _ = fit_curve(falling)
    times = [seconds for _, seconds in curve.knots]
    assert times == sorted(times)
    assert (
        curve(2.0**10) < 1.1
    )  # the lower of two values that contradict each other, because spikes go up
