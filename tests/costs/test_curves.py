"""Measured curves: fitted, and carried to numbers of ranks that were not measured."""

import pytest

from ringcoll.costs.curves import Curve, Way, across, down_to, fit_curve

SIZES = [2.0**k for k in range(10, 31)]


def test_a_curve_is_flat_below_linear_between_and_goes_on_at_its_rate():
    curve = Curve(((10.0, 1.0), (20.0, 2.0), (40.0, 3.0)))
    assert [curve(size) for size in (0, 10, 15, 30, 40)] == [1, 1, 1.5, 2.5, 3]
    assert curve(70) == pytest.approx(5)  # by 2 for 30, as between the first and the last
    assert Curve(((10.0, 1.0),))(99) == 1


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


def test_a_curve_is_extended_down_to_the_start():
    curve = Curve(((8.0, 3.0), (16.0, 5.0)))
    assert down_to(curve, 0.1)(0) == 1
    assert down_to(curve, 2.0)(0) == 2
    assert down_to(curve, 9.0)(0) == 3
    assert down_to(curve, 0.1)(12) == curve(12)
    assert down_to(Curve(((8.0, 3.0),)), 1.0)(0) == 3


def test_between_numbers_of_ranks_the_logarithm_is_a_line():
    curves = {n: Curve(((1.0, n**0.5), (2.0, 2 * n**0.5))) for n in (4, 16)}
    assert across(curves, 4)(1) == 2
    assert across(curves, 8)(2) == pytest.approx(2 * 8**0.5)
    assert across(curves, 64)(1) == pytest.approx(8)  # on a switch the slope goes on
    falling = {4: Curve(((1.0, 2.0),)), 16: Curve(((1.0, 1.0),))}
    assert across(falling, 64)(1) == 1  # but no further down
    assert across({4: curves[4]}, 16)(1) == pytest.approx(2 * 5 / 3)  # the start: log 32 / log 8


def test_rings_of_other_sizes_have_equal_steps():
    def ring(n):  # n-1 steps of 1 + bytes / n
        return Curve(tuple((size, (n - 1) * (1 + size / n)) for size in (1.0, 1e3, 1e6, 1e9)))

    curves = {n: ring(n) for n in (4, 16)}
    for n, size in [(8, 1e4), (2, 1e4), (512, 1e6)]:
        carried = across(curves, n, Way.RING, 4)(size)
        assert carried == pytest.approx((n - 1) * (1 + size / n), rel=1e-3)


def test_starts_and_bytes_grow_differently_over_hosts():
    curves = {16: Curve(((0.0, 3.0), (1e6, 4.0)))}  # 4 hosts of 4
    tree = {n: across(curves, n, Way.TREE, 4) for n in (8, 32, 1024)}
    assert [tree[n](0) for n in tree] == pytest.approx([2, 4, 9])  # log2 of twice the hosts
    assert [tree[n](1e6) - tree[n](0) for n in tree] == pytest.approx([0.5, 1, 1])
    direct = {n: across(curves, n, Way.DIRECT, 4) for n in (8, 64)}
    assert [direct[n](0) for n in direct] == pytest.approx([3 * 7 / 15, 3 * 63 / 15])
    crossing = [direct[n](1e6) - direct[n](0) for n in direct]
    assert crossing == pytest.approx([(1 / 2) / (3 / 4), (15 / 16) / (3 / 4)])
