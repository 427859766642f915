"""Prices against SimGrid, which runs every message."""

import pytest
from support import mostly_exhaustive

from benchmarks.__main__ import main
from benchmarks.referee import judge, referee
from ringcoll.algorithms import names
from ringcoll.schedules.schedule import SizeError


def reason():
    """Why SimGrid cannot run here; "" if it can."""
    try:
        judge.python()
    except judge.NoSimGrid as error:
        return str(error)
    return ""


SIMGRID = pytest.mark.skipif(bool(reason()), reason=reason() or "it is here")
PLACES = ("8", "4x3", "tree:4x4", "dragonfly:2x2x2x2")


def judged(place, collective, algorithm, size):
    """The price, and SimGrid's seconds over the price."""
    one = referee.named_place(place)
    paid = one.place.price(collective, algorithm)
    found = judge.seconds(collective, algorithm, one.place, size, one.network)
    return paid, found / one.place.seconds(paid)(size)


@SIMGRID
@pytest.mark.parametrize(
    "place", mostly_exhaustive(PLACES, lambda place: place in ("8", "tree:4x4"))
)
@pytest.mark.parametrize("size", [2**26, pytest.param(2**10, marks=pytest.mark.exhaustive)])
def test_prices_are_those_of_messages_that_simgrid_runs(place, size):
    for collective in ("psum", "all_to_all"):
        for algorithm in names(collective):
            try:
                paid, ratio = judged(place, collective, algorithm, size)
            except SizeError:
                continue
            limit = referee.NEAR if referee._to_neighbours(paid) else referee.FAR
            assert ratio == pytest.approx(1, abs=limit), algorithm


@SIMGRID
def test_what_a_price_leaves_out_is_found():
    _, ratio = judged("thin:3x2x3x2", "all_gather", "bruck", 2**26)
    assert ratio > 3  # ranks of a group share one link to the next group


@SIMGRID
@pytest.mark.parametrize("place", ["16", pytest.param("4x4x4", marks=pytest.mark.exhaustive)])
def test_bytes_of_near_messages_travel_beside_the_hops_of_far_ones(place):
    for collective in ("all_gather", "psum"):
        paid, ratio = judged(place, collective, "direct", 2**20)
        assert ratio == pytest.approx(1, abs=referee.NEAR)
        assert paid.uneven


def test_the_command_is_red_where_a_price_is_off(monkeypatch, capsys):
    monkeypatch.setattr(judge, "python", lambda: "python3")
    for factor, status in ((1.005, 0), (1.03, 1)):

        def off(collective, algorithm, place, nbytes, network, factor=factor):
            return factor * place.seconds(place.price(collective, algorithm))(nbytes)

        monkeypatch.setattr(judge, "seconds", off)
        command = ["referee", "--network", "8", "--algorithm", "ring", "--bytes", "1M"]
        assert main(command) == status
        assert f"{factor:.3f}" in capsys.readouterr().out
        assert main([*command, "--algorithm", "bruck"]) == 0  # not to neighbours
