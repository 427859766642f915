"""Prices worked out on paper, on machines of round numbers: where each second comes from."""

from dataclasses import replace
from math import log2

import pytest

from ringcoll.costs import Model, place_of, predict, prediction
from ringcoll.costs.counts import price_on_hosts
from ringcoll.costs.curves import Curve
from ringcoll.costs.machines import Device
from ringcoll.costs.model import seconds_on_hosts
from ringcoll.costs.wire import Wire

pytestmark = pytest.mark.quick


def machine(model, ranks_a_host=0, between="", share=1.0, curves=None):
    """A machine that nobody measured, unless `curves` are given."""
    unknown = {"what": "", "aliases": (), "based_on": "", "matmuls": {}, "error": 0.0}
    return Device(
        name="toy",
        model=model,
        ranks_a_host=ranks_a_host,
        between=between,
        switch_adds=False,
        built_in_share=share,
        curves=curves or {},
        **unknown,
    )


# -- the built-in on a torus: a start takes 2 s, a link 10 s, a byte 1 s (2 s for a collective), and
# the addition of a byte 3 s --

TORUS = machine(Model(2, 1, 3, hop=10, axes=2), share=0.5)


@pytest.mark.parametrize(
    ("collective", "nbytes", "ranks", "closed", "paid"),
    [
        ("ppermute", 840, 8, None, 2 + 10 + 840),  # at the rate of a link
        # Seven rounds on a ring of eight, half a shard of 105 bytes each way in each.
        ("all_gather", 840, 8, None, 7 * (2 + 10) + 3.5 * 105 * 2),
        ("psum_scatter", 840, 8, None, 7 * (2 + 10) + 3.5 * 105 * 2 + 7 * 105 * 3),
        ("psum", 840, 8, None, 14 * (2 + 10) + 7 * 105 * 2 + 7 * 105 * 3),
        ("pbroadcast", 840, 8, None, 14 * (2 + 10) + 7 * 105 * 2 + 7 * 105 * 3),
        # Three ranks are a line: two rounds of a shard of 280.
        ("all_gather", 840, 3, None, 2 * (2 + 10) + 2 * 280 * 2),
        ("all_gather", 840, 8, False, 7 * (2 + 10) + 7 * 105 * 2),
        # Blocks of 105 go 1 + 2 + 3 + 4 + 3 + 2 + 1 links; the farthest passes four.
        ("all_to_all", 840, 8, None, 2 + 4 * 10 + 16 * 105 * 2),
        ("ragged_all_to_all", 840, 8, None, 2 + 4 * 10 + 16 * 105 * 2),
        # Of 15 shards of 100, each of the four links of a rank carries a quarter.
        ("all_gather", 1600, (4, 4), True, 6 * (2 + 10) + 15 / 4 * 100 * 2),
        ("psum", 1600, (4, 4), True, 12 * (2 + 10) + 15 / 2 * 100 * 2 + 15 * 100 * 3),
        ("psum", 840, 1, None, 0),
    ],
)
def test_the_built_in_on_a_torus(collective, nbytes, ranks, closed, paid):
    place = place_of(ranks, TORUS)
    if closed is not None:
        place = replace(place, closed=(closed,) * len(place.shape))
    assert predict(collective, nbytes, place) == pytest.approx(paid)


@pytest.mark.parametrize(("least", "factor"), [(9, 1), (8, 2), (0, 1)])
def test_a_large_reduce_scatter_is_priced_as_an_all_reduce(least, factor):
    model = replace(TORUS.model, all_reduces=least)
    taken = predict("psum_scatter", 840, place_of(8, replace(TORUS, model=model)))
    assert taken == pytest.approx(factor * (7 * (2 + 10) + 3.5 * 105 * 2) + 7 * 105 * 3)


# -- GPUs on hosts of four: a start takes 1 us, 10 GB/s, and an added byte 0.03 ns; between hosts
# ethernet100: a start takes 20 us, and 12.5 GB/s a port, one for each rank --

SWITCH = machine(Model(1e-6, 1e-10, 3e-11, axes=0), 4, "ethernet100")
START, BYTE = 20e-6, 0.08e-9
GB = 10**9


@pytest.mark.parametrize(
    ("collective", "nbytes", "ranks", "paid"),
    [
        # On one host: rounds of a shard of 0.25 GB, which are 25 ms.
        ("ppermute", GB, 4, 1e-6 + 0.1),
        ("all_gather", GB, 4, 3 * (1e-6 + 0.025)),
        ("psum_scatter", GB, 4, 3 * (1e-6 + 0.025) + 3 / 4 * 0.03),
        ("psum", GB, 4, 6 * (1e-6 + 0.025) + 3 / 4 * 0.03),
        ("all_to_all", GB, 4, 3 * (1e-6 + 0.025)),
        # On two and on four: each rank has a port of its own.
        ("ppermute", GB, 8, START + GB * BYTE),
        ("all_gather", GB, 8, 7 * START + GB * BYTE * 7 / 8 / 4),
        ("psum_scatter", GB, 8, 7 * START + GB * BYTE * 7 / 8 / 4),
        ("all_to_all", GB, 8, 7 * START + GB * BYTE / 2),
        ("all_to_all", GB, 16, 15 * START + GB * BYTE * 3 / 4),
        ("psum", GB, 8, 2 * START + GB * BYTE / 4),  # two hosts swap their sums
        ("psum", GB, 16, 4 * START + GB * BYTE * 2 / 4),  # a tree of four: two sums
        ("psum", GB, 11, 2 * log2(3) * START + GB * BYTE * 2 / (11 / 3)),  # 4, 4 and 3 ranks
        ("psum", 0, 8, 1e-6 + 2 * START),  # at least a start within the hosts
    ],
)
def test_the_built_in_on_hosts(collective, nbytes, ranks, paid):
    assert predict(collective, nbytes, place_of(ranks, SWITCH)) == pytest.approx(paid)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "paid"),
    [
        # Shards of 0.1 GB take 10 ms within; a host's four ports together carry 50 GB/s: 2 ms.
        ("ring", 8, 7 * (1e-6 + 0.01)),
        ("ring", (2, 4), (START + 4 * 0.002) + 3 * (1e-6 + 2 * 0.01)),
        # A rank sends three shards within the host and four to the other: 16 by the host's ports.
        ("direct", 8, 4 * START + 16 * 0.002),
    ],
)
def test_an_algorithm_on_hosts_that_share_their_ports(algorithm, ranks, paid):
    assert predict("all_gather", 0.8 * GB, place_of(ranks, SWITCH), algorithm) == pytest.approx(
        paid
    )


def test_a_round_on_hosts_takes_the_longer_of_the_two_networks():
    inner, outer = Model(1, 0.5, 10), Model(5, 1, 0)
    # 7 rounds of a shard within and between; 7 shards are added.
    paid = price_on_hosts("psum_scatter", "ring", (8,), 2)
    assert seconds_on_hosts(paid, 1, inner, outer) == 7 * 6 + 10 * 7
    assert seconds_on_hosts(paid, 1, Model(9, 0, 0), outer) == 7 * 9
    # A round of four messages by the port; three within hosts, of two shards each.
    paid = price_on_hosts("all_gather", "ring", (2, 4), 2)
    assert seconds_on_hosts(paid, 1, inner, outer) == (5 + 4) + 3 * (1 + 0.5 * 2)
    # Stages of whole vectors: 8 shards each, and four ranks send them by one port.
    paid = price_on_hosts("psum", "recursive_doubling", (8,), 2)
    assert seconds_on_hosts(paid, 1, inner, outer) == (5 + 32) + 2 * (1 + 4) + 10 * 24


def test_ranks_alone_on_their_hosts_are_a_ring_on_the_network():
    alone = replace(SWITCH, ranks_a_host=1)
    ring = 14 * (START + GB / 8 * BYTE)
    assert predict("psum", GB, place_of(8, alone)) == pytest.approx(ring)
    assert predict("ppermute", GB, place_of(8, alone)) == pytest.approx(START + GB * BYTE)
    assert predict("psum", GB, place_of(8, SWITCH, hosts=8), "ring") == pytest.approx(ring)


def test_a_curve_serves_collectives_that_send_as_much():
    curves = {("all_gather", False): {4: Curve(((0.0, 1.0), (100.0, 5.0)))}}
    known = machine(SWITCH.model, 4, "ethernet100", curves=curves)
    for collective in ("all_gather", "psum_scatter", "all_to_all"):
        assert predict(collective, 50, place_of(4, known)) == 3
    assert predict("psum", 50, place_of(4, known)) == predict("psum", 50, place_of(4, SWITCH))


def test_a_measured_wire_prices_each_message():
    """Three rounds of a shard of 50 bytes, each 2 s."""
    known = machine(replace(SWITCH.model, wire=Curve(((0.0, 1.0), (100.0, 3.0)))), 4, "ethernet100")
    assert predict("ppermute", 50, place_of(4, known)) == 2
    for algorithm in ("lax", "ring"):
        assert predict("all_gather", 200, place_of(4, known), algorithm) == 3 * 2


@pytest.mark.parametrize(
    ("collective", "curves", "paid"),
    [
        # Of the 5 s of 100 bytes, 4 s are sent, and three times as long here: half is 1 + 6.
        ("all_gather", {}, 7),
        # Here ranks send the sums too: 100 bytes are 2 x 3/4 x 300 s.
        ("psum", {}, 1 + 450 / 2),
        # Measured on two ranks: 2 s of any size. Four take 1/1 and 13/7 as long as two.
        ("all_gather", {2: Curve(((0.0, 2.0), (100.0, 2.0)))}, (2 + 2 * 13 / 7) / 2),
    ],
)
def test_curves_of_the_machine_that_another_is_based_on(monkeypatch, collective, curves, paid):
    of_base = {n: Curve(((0.0, 1.0), (100.0, n + 1.0))) for n in (2, 4)}
    known = {(name, False): of_base for name in ("all_gather", "psum")}
    base = machine(replace(SWITCH.model, beta=1), 4, "ethernet100", curves=known)
    monkeypatch.setattr(prediction, "MACHINES", {"base": replace(base, switch_adds=True)})
    own = {(collective, False): curves} if curves else {}
    slower = machine(replace(SWITCH.model, beta=3), 4, "ethernet100", curves=own)
    place = place_of(4, replace(slower, based_on="base"))
    assert predict(collective, 50, place) == pytest.approx(paid)


# -- wires: a byte of the main memory takes 1 s, an addition three --


@pytest.mark.parametrize(
    ("collective", "kept", "moved", "added"),
    [
        # Of 1024 bytes on four ranks, codes of bfloat16 are 528. If the memory next to the core
        # keeps codes and sums, the operand is read and the result written.
        ("all_gather", True, 256 + 1024, 0),
        ("psum_scatter", True, 1024 + 256, 0),
        ("psum", True, 2048, 0),
        ("all_to_all", True, 2048, 0),
        # If not, each vector is read or written as values and as codes.
        ("all_gather", False, 1.25 * (1024 + 528), 0),
        ("psum_scatter", False, 2 * (1024 + 528), 0.75 * 2048),
        ("psum", False, 3.25 * (1024 + 528), 0.75 * 2048),
        ("all_to_all", False, 2 * (1024 + 528), 0),
    ],
)
def test_the_work_of_a_wire(collective, kept, moved, added):
    # 528 bytes of codes and 128 float32 of a sum are 1040.
    model = Model(0, 0, 3, near_bytes=1040 if kept else 1039)
    taken = prediction.encoding_seconds(collective, 4, 1024, 2, Wire("int8"), model)
    assert taken == moved + 3 * added


def test_a_wire_sends_its_codes_and_scales():
    """Of 1280 bytes of float32, a block of 32 is 36 bytes: 360 in all, on a ring of four."""
    ring = machine(Model(0, 1, 0, axes=0), 4, "ethernet100")
    wire = Wire("int8", 32)
    assert wire.ratio(4) == 36 / 128
    by_ring = predict("all_gather", 1280, place_of(4, ring), "ring", wire=wire)
    assert by_ring == predict("all_gather", 1280, place_of(4, ring), wire=wire) == 3 / 4 * 360
    # The built-in exchanges, then gathers.
    summed = predict("psum", 1280, place_of(4, ring), wire=wire)
    assert summed == predict("pmean", 1280, place_of(4, ring), wire=wire) == 2 * 3 / 4 * 360
    assert predict("psum_scatter", 1280, place_of(4, ring), wire=wire) == 3 / 4 * 360
    assert (wire.nbytes(64), wire.nbytes(65), wire.nbytes(1)) == (72, 3 * (22 + 4), 5)


@pytest.mark.parametrize(
    ("dtype", "half_a_step"),
    [("int8", 0.5 / 127), ("float8_e4m3fn", 16 / 448), ("float8_e5m2", 4096 / 57344)],
)
def test_a_code_errs_by_half_a_step_of_its_block(dtype, half_a_step):
    assert Wire(dtype).error == pytest.approx(half_a_step * 65 / 64)  # 1/64 for rounding twice
