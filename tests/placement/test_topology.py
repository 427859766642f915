"""The places of ranks: orders of a mesh, hops, links; compiling for TPUs that are not here."""

import os
import re
from itertools import pairwise, product
from math import prod

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll import overlap
from ringcoll.costs.embedding import embed, ring_order
from ringcoll.placement import gpus, topology
from ringcoll.placement.network import Network


def longest_step(order, wrap):
    """The longest step of the ring through these places."""
    network = Network(tuple(order), wrap)
    ranks = [*range(len(order)), 0]
    return max(network.hops(a, b) for a, b in pairwise(ranks))


@pytest.mark.parametrize(
    ("size", "longest"),
    [
        # Through a box with an even side, single hops.
        *((size, 1) for size in ((4, 2), (2, 4), (4, 4), (8, 8), (3, 4), (2, 2, 2), (4, 2, 3, 1))),
        *(((n,), min(2, n - 1)) for n in range(2, 9)),  # along a line and back
        ((3, 3), 4),  # the last step alone: see below
    ],
)
def test_a_ring_through_a_box_visits_every_place(size, longest):
    order = ring_order(size, (False,) * len(size))
    assert sorted(order) == list(product(*map(range, size)))
    assert longest_step(order, (False,) * len(size)) == longest
    if size == (3, 3):
        assert all(sum(map(abs, np.subtract(a, b))) == 1 for a, b in pairwise(order))
    assert longest_step(ring_order((1, 7), (True, True)), (True, True)) == 1


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        *(((4, 2), shape) for shape in ((8,), (4, 2), (2, 4))),
        *(((4, 4), shape) for shape in ((1, 16), (2, 8), (8, 2), (2, 2, 4))),
        ((2, 2, 2), (4, 2)),
        ((2, 2, 4), (4, 4)),
    ],
)
def test_each_axis_of_a_mesh_is_a_ring(size, shape):
    wrap = (False,) * len(size)
    places = embed(size, wrap, shape)
    visited = sorted(map(tuple, places.reshape(prod(size), -1).tolist()))
    assert visited == list(product(*map(range, size)))
    for axis in range(len(shape)):
        rings = np.moveaxis(places, axis, 0).reshape(shape[axis], -1, len(size))
        for ring in np.moveaxis(rings, 1, 0).tolist():
            assert longest_step([tuple(place) for place in ring], wrap) <= 2


def test_the_last_axis_has_the_shortest_steps():
    wrap = (False, False)
    for size, shape in [((4, 4), (2, 8)), ((4, 4), (4, 4)), ((8, 8), (8, 8)), ((4, 4), (4, 2, 2))]:
        first = embed(size, wrap, shape).reshape(-1, shape[-1], 2)[0].tolist()
        assert longest_step([tuple(place) for place in first], wrap) == 1
    assert embed((4, 4), wrap, (4,)) is embed((4, 4), wrap, (3, 5)) is None
    torus = embed((16, 16), (True, True), (16, 16))
    assert longest_step([tuple(place) for place in torus[:, 0].tolist()], (True, True)) == 1


@pytest.mark.parametrize(
    ("topology_name", "exact"),
    [
        ("v5e:4x2", "v5e:4x2"),
        ("v5e:8", "v5e:4x2"),
        ("v5litepod-8", "v5e:4x2"),
        ("v5litepod-32", "v5e:8x4"),
        ("v6e-1", "v6e:1x1"),
        ("v5p:8", "v5p:2x2x2"),
        ("v5p-8", "v5p:2x2x1"),  # its cores; a device has two
        ("tpu7x-8", "tpu7x:2x2x1"),  # a chip is two devices
        ("v5p:4x4x8_twisted", "v5p:4x4x8_twisted"),
        ("V5E:4X2", "v5e:4x2"),
        ("V5LitePod-8", "v5e:4x2"),
    ],
)
def test_names_of_topologies(topology_name, exact):
    assert topology._libtpu_name(topology_name) == exact


def test_an_axis_of_16_chips_compiles_for_a_ring():
    mesh = ringcoll.mesh("v5e:16x16", x=16, y=16)
    pairs = [(rank, (rank + 1) % 16) for rank in range(16)]
    step = jax.shard_map(
        lambda x: lax.ppermute(x, "x", pairs), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    x = jax.ShapeDtypeStruct((16, 2**20), "float32", sharding=NamedSharding(mesh, P("x")))
    text = overlap.compile_for("v5e:16x16", jax.jit(step), x).text
    # On a line, the last step would have 15 hops, and the compiler would not overlap it.
    assert "collective-permute-start(" in text


def test_operands_on_no_tpu_are_refused():
    with pytest.raises(ValueError, match="no operand is sharded over a mesh"):
        overlap.compile_for("v5e:4x2", abs, np.zeros(3))


def test_without_a_compiler_the_extra_is_named(monkeypatch):
    def none_registered(*args, **options):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    monkeypatch.setattr(gpus.topologies, "get_topology_desc", none_registered)
    for name in ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", *topology.ENVIRONMENT):
        monkeypatch.setenv(name, os.environ.get(name, topology.ENVIRONMENT.get(name, "1")))
    for name, extra in (("v5e:4x2", "tpu"), ("h200:8", "gpu")):
        with pytest.raises(ModuleNotFoundError, match=rf"pip install -e '.\[{extra}\]'"):
            topology.devices(name)


@pytest.mark.parametrize("name", ["a100:8", "A100-8", "mi300:4", "v7x:8", "v5:4x2", "v5:8"])
def test_kinds_without_a_compiler_are_refused_with_those_that_have_one(name):
    kind = re.split("[:-]", name)[0].lower()
    with pytest.raises(ValueError, match=rf"there is no {kind} of .*v5e:4x2, .*h200:8 .*b200") as e:
        topology.devices(name)
    assert f"such as {kind}:" not in str(e.value)


@pytest.mark.parametrize("message", ["h200", "h200:", "h200:0", "h200:4x2", "H200"])
def test_gpus_are_named_with_their_number(message):
    with pytest.raises(ValueError, match=r"does not give their number; .*h200:8"):
        topology.devices(message)
