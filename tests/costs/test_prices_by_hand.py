"""Prices worked out on paper, on machines of round numbers: where each second comes from."""

from dataclasses import replace
from math import inf

import pytest

from ringcoll.costs import Model, place_of, predict
from ringcoll.costs.curves import Curve
from ringcoll.costs.machines import Device
from ringcoll.costs.prediction import encoding_seconds
from ringcoll.costs.wire import Wire

pytestmark = pytest.mark.quick


def machine(model, ranks_a_host=0):
    """A machine that nobody measured."""
    unknown = {"what": "", "aliases": (), "matmuls": {}, "error": 0.0}
    return Device(
        name="toy",
        model=model,
        ranks_a_host=ranks_a_host,
        curves={},
        **unknown,
    )


# -- the built-in on a torus: a start takes 2 s, a link 10 s, a byte 1 s (2 s for a collective, 4 s
# for an all-reduce), and the addition of a byte 3 s --

TORUS = machine(Model(2, 1, 3, hop=10, axes=2, built_in=0.5, built_in_sum=0.25))


@pytest.mark.parametrize(
    ("collective", "nbytes", "ranks", "closed", "paid"),
    [
        ("ppermute", 840, 8, None, 2 + 10 + 840),  # at the rate of a link
        # Seven rounds on a ring of eight, half a shard of 105 bytes each way in each.
        ("all_gather", 840, 8, None, 7 * (2 + 10) + 3.5 * 105 * 2),
        ("psum_scatter", 840, 8, None, 7 * (2 + 10) + 3.5 * 105 * 2 + 7 * 105 * 3),
        ("psum", 840, 8, None, 14 * (2 + 10) + 7 * 105 * 4 + 7 * 105 * 3),
        ("pbroadcast", 840, 8, None, 14 * (2 + 10) + 7 * 105 * 4 + 7 * 105 * 3),
        # Three ranks are a line: two rounds of a shard of 280.
        ("all_gather", 840, 3, None, 2 * (2 + 10) + 2 * 280 * 2),
        ("all_gather", 840, 8, False, 7 * (2 + 10) + 7 * 105 * 2),
        # Blocks of 105 go 1 + 2 + 3 + 4 + 3 + 2 + 1 links; the farthest passes four.
        ("all_to_all", 840, 8, None, 2 + 4 * 10 + 16 * 105 * 2),
        ("ragged_all_to_all", 840, 8, None, 2 + 4 * 10 + 16 * 105 * 2),
        # Of 15 shards of 100, each of the four links of a rank carries a quarter.
        ("all_gather", 1600, (4, 4), True, 6 * (2 + 10) + 15 / 4 * 100 * 2),
        ("psum", 1600, (4, 4), True, 12 * (2 + 10) + 15 / 2 * 100 * 4 + 15 * 100 * 3),
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
    assert taken == pytest.approx(factor * 7 * (2 + 10) + factor**2 * 3.5 * 105 * 2 + 7 * 105 * 3)


# -- GPUs on hosts of four: a message takes 1 s and 1 s for 50 bytes, from 10 to 100 bytes --

MESSAGE = Curve(((10.0, 1.2), (100.0, 3.0)))
SWITCH = machine(Model(0.5, 0.1, 0, axes=0, wire=MESSAGE), 4)
#: The same, of which nobody measured a message.
DUMB = machine(Model(inf, 0.1, 0, axes=0), 4)
GATHER = Curve(((10.0, 5.0), (110.0, 7.0)))


@pytest.mark.parametrize(
    ("device", "collective", "algorithm", "nbytes", "ranks", "paid"),
    [
        (SWITCH, "all_gather", "lax", 60, 4, 6),
        (SWITCH, "all_gather", "lax", 9, 4, 5),
        (SWITCH, "all_gather", "lax", 111, 4, None),
        (SWITCH, "all_gather", "lax", 60, 3, None),
        (SWITCH, "all_gather", "lax", 60, (2, 4), 9),
        (SWITCH, "all_gather", "lax", 60, (4, 2), None),
        (SWITCH, "psum_scatter", "lax", 60, 4, None),
        (SWITCH, "ppermute", "lax", 50, 2, 2),
        (SWITCH, "ppermute", "lax", 50, 8, None),
        (SWITCH, "ppermute", "lax", 101, 4, None),
        (SWITCH, "all_gather", "ring", 200, 4, 3 * 2),  # three rounds of a shard of 50 bytes
        (SWITCH, "all_gather", "ring", 150, 3, 2 * 2),
        (SWITCH, "all_gather", "ring", 400, 4, 3 * 3),
        (SWITCH, "all_gather", "ring", 404, 4, None),
        (SWITCH, "all_gather", "ring", 200, (2, 4), None),
        (SWITCH, "psum", "lax", 60, 1, 0),
        (DUMB, "all_gather", "lax", 60, 4, 6),
        (DUMB, "all_gather", "ring", 200, 4, None),
        (DUMB, "ppermute", "lax", 50, 4, None),
    ],
)
def test_on_gpus_nothing_lies_outside_what_was_measured(
    device, collective, algorithm, nbytes, ranks, paid
):
    curves = {("all_gather", 4, 1): GATHER, ("all_gather", 8, 2): Curve(((60.0, 9.0),))}
    place = place_of(ranks, replace(device, curves=curves))
    found = predict(collective, nbytes, place, algorithm)
    assert found == (paid if paid is None else pytest.approx(paid))


def test_ranks_alone_on_their_hosts_are_a_ring_on_the_network():
    alone = machine(Model(20, 0.1, 0, axes=0), 1)
    assert predict("psum", 80, place_of(8, alone)) == pytest.approx(14 * (20 + 80 / 8 * 0.1))
    assert predict("ppermute", 80, place_of(8, alone)) == pytest.approx(20 + 80 * 0.1)


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
    model = Model(0, 0, 3, vmem_bytes=1040 if kept else 1039)
    taken = encoding_seconds(collective, 4, 1024, 2, Wire("int8"), model)
    assert taken == moved + 3 * added


def test_a_wire_sends_its_codes_and_scales():
    """Of 1280 bytes of float32, a block of 32 is 36 bytes: 360 in all, on a ring of four."""
    ring = machine(Model(0, 1, 0, axes=0), 1)
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
