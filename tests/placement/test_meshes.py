"""Meshes whose axes are rings of neighbours, on devices that only have coordinates."""

from dataclasses import dataclass
from itertools import product
from math import prod

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support import HERE

import ringcoll
from benchmarks.compiled.meshes import SLICES, shapes
from ringcoll import costs
from ringcoll.placement.meshes import describe

KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5p", "v6e": "TPU v6 lite"}
ALL = [(kind, tuple(map(int, size.split("x")))) for kind in KINDS for size in SLICES[kind]]


@dataclass(frozen=True)
class Chip:
    """All that an order asks a device of a TPU."""

    id: int
    coords: tuple[int, ...]
    device_kind: str
    slice_index: int = 0
    platform: str = "tpu"
    process_index: int = 0
    core_on_chip: int = 0


def chips(kind, size, slices=1):
    places = [place[::-1] for place in product(*(range(n) for n in (*size, 1)[2::-1]))]
    return [
        Chip(s * len(places) + i, place, KINDS[kind], s)
        for s in range(slices)
        for i, place in enumerate(places)
    ]


@pytest.mark.parametrize(("kind", "size"), ALL)
def test_no_hop_is_longer_than_those_of_make_mesh(kind, size):
    """An axis may have longer hops only if a later one has shorter ones."""
    for shape in shapes(prod(size)):
        found = ringcoll.mesh(devices=chips(kind, size), **dict(zip("abc", shape, strict=False)))
        assert {*found.devices.flat} == {*chips(kind, size)}
        described = describe(found)
        ours = [axis.hops for axis in described.axes.values()]
        usual = [axis.hops for axis in described.usual.values()] or ours
        assert max(ours) <= max(usual)
        assert ours[::-1] <= usual[::-1]
        assert ours[-1] == (1 if shape[-1] > 2 or 2 in size else ours[-1])


def test_the_axis_with_the_most_bytes_gets_the_shortest_hops():
    axes, devices = {"model": 8, "data": 16}, chips("v6e", (8, 16))
    last = describe(ringcoll.mesh(devices=devices, **axes)).axes
    assert (last["model"].hops, last["data"].hops) == (2, 1)
    found = ringcoll.mesh(devices=devices, weights={"model": 2, "data": 1}, **axes)
    most = describe(found).axes
    assert (most["model"].hops, most["data"].hops) == (1, 4)
    named_last = ringcoll.mesh(devices=devices, data=16, model=8)
    np.testing.assert_array_equal(found.devices.T, named_last.devices)
    assert str(describe(named_last)) in (HERE / "docs/meshes.md").read_text(encoding="utf-8")


def test_slices_are_outermost():
    devices = chips("v5e", (4, 4), slices=4)
    found = ringcoll.mesh(devices=devices, data=2, fsdp=4, model=8).devices
    numbers = np.vectorize(lambda device: device.slice_index)(found)
    np.testing.assert_array_equal(
        numbers, np.broadcast_to(np.arange(4).reshape(2, 2, 1, 1), (2, 2, 2, 8)).reshape(2, 4, 8)
    )
    within = describe(ringcoll.mesh(devices=devices[:16], fsdp=2, model=8)).axes
    assert within["model"].hops == 1
    assert "places are not known" in str(describe(ringcoll.mesh(devices=devices, model=64)))


def test_parts_of_a_slice():
    """A box anywhere is a ring; an axis of a part does not close."""
    devices = chips("v5e", (4, 4))
    corner = [device for device in devices if min(device.coords[:2]) >= 2]
    assert describe(ringcoll.mesh(devices=corner, x=4)).axes["x"].hops == 1
    cube = [device for device in chips("v5p", (4, 4, 8)) if device.coords[2] >= 4]
    hops = [
        axis.hops for axis in describe(ringcoll.mesh(devices=cube, a=4, b=4, c=4)).axes.values()
    ]
    assert max(hops) > 1
    two = [Chip(0, (0, 0, 0), KINDS["v5e"], 0), Chip(1, (1, 0, 0), KINDS["v5e"], 1)]
    assert describe(ringcoll.mesh(devices=two, x=2)).axes["x"].place is None
    cores = [Chip(i, (i, 0, 0), KINDS["v4"], core_on_chip=1) for i in range(2)]
    assert ringcoll.mesh(devices=cores, x=2).shape == {"x": 2}


def test_types_and_the_order_of_other_devices_are_those_of_make_mesh():
    for options in ({}, {"axis_types": (AxisType.Auto, AxisType.Explicit)}):
        usual = jax.make_mesh((2, 4), ("a", "b"), **options)
        found = ringcoll.mesh(a=2, b=4, **options)
        assert found == usual
        assert ringcoll.mesh(devices=chips("v5e", (4, 2)), a=2, b=4, **options).axis_types == (
            usual.axis_types
        )
    assert ringcoll.mesh().shape == {"x": 8}
    assert "places are not known" in str(describe(ringcoll.mesh(a=2, b=4)))


def test_chips_that_are_no_box_keep_their_order():
    devices = chips("v5e", (4, 2))[:6]
    assert [*ringcoll.mesh(devices=devices, x=6).devices] == devices


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ringcoll.mesh(a=3), "axes {'a': 3}, but there are 8 devices; let the sizes be 1"),
        (lambda: ringcoll.mesh("v5e:2x2", devices=[]), "give one of the two"),
        (lambda: ringcoll.mesh(a=8, weights={"b": 1}), "are not of the axes"),
        (lambda: ringcoll.mesh(a=8, weights={"a": float("nan")}), "are not bytes; pass 0 or more"),
        (lambda: ringcoll.mesh(devices=[]), "axes {'x': 0}, but there are 0 devices; let"),
        (lambda: ringcoll.mesh(a=-2, b=-4), "axes {'a': -2, 'b': -4}, but there are 8 devices"),
        (lambda: ringcoll.mesh(a=8.0), "axes {'a': 8.0}, but there are 8 devices; let"),
        (lambda: ringcoll.mesh(8), "8 is no topology; name one such as 'v5e:4x2'"),
        (lambda: describe("x"), "'x' is no mesh; pass a jax.sharding.Mesh"),
        (
            lambda: ringcoll.mesh(devices=jax.devices()[:1] * 4),
            "4 devices, 1 different ones, of kinds",
        ),
        (
            lambda: ringcoll.mesh(devices=[*chips("v5e", (4, 1)), *chips("v6e", (4, 1))], a=8),
            "of kinds .'TPU v5 lite', 'TPU v6 lite'.; pass devices= of one kind",
        ),
        (lambda: ringcoll.mesh(devices=np.array(jax.devices()).reshape(2, 4), a=8), None),
        (lambda: ringcoll.mesh(devices=chips("v5e", (2, 2), 3), a=12), None),
        (lambda: ringcoll.mesh(devices=chips("v5e", (2, 2), 4), a=2, b=8), None),
        (
            lambda: ringcoll.mesh(devices=chips("v5e", (2, 2), 2)[:6], a=2, b=3),
            "2 slices of {2, 4}",
        ),
    ],
)
def test_refused(call, message):
    if message:
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    else:
        call()


def test_prices_are_those_of_the_places():
    """By hand: 7 rounds; on the ring of v6e's 2 x 4 box each link carries one half of a shard."""
    devices = chips("v6e", (8, 16))
    ring = describe(ringcoll.mesh(devices=devices, data=16, model=8)).axes["model"].place
    line = describe(ringcoll.mesh(devices=devices, model=8, data=16)).axes["model"].place
    model = ring.device.model
    shard = 2**20
    alone = costs.predict("all_gather", 8 * shard, ring, "ring")
    assert alone == pytest.approx(7 * (model.alpha + model.hop + shard * model.beta))
    paid = line.price("all_gather", "ring")
    assert (paid.hops, paid.link, paid.startups) == (14, 7, 7)
    paid = line.price("all_gather", "bidirectional_ring")
    assert (paid.hops, paid.link) == (14, 7)


def test_cost_has_the_places_of_the_last_axis():
    for kind, size, ranks in (("v6e", (4, 8), 8), ("v5e", (4, 4), 8), ("v5p", (2, 2, 4), 8)):
        devices = chips(kind, size)
        found = ringcoll.mesh(devices=devices, data=len(devices) // ranks, model=ranks)
        of_mesh = describe(found).axes["model"].place
        of_cost = costs.place_of(ranks, kind, network="x".join(map(str, size)))
        for algorithm in ("ring", "two_ended", "bruck", "lax"):
            one, other = (costs.predict("psum", 2**24, p, algorithm) for p in (of_mesh, of_cost))
            assert one == pytest.approx(other)
