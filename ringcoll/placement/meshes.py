"""Meshes whose axes are rings of neighbours: `mesh` orders the devices, `describe` prints how.

A ring waits in every round for its longest hop, so the order of the devices decides its speed.
"""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import gcd, prod
from numbers import Integral, Real
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ringcoll.costs.embedding import embed
from ringcoll.costs.machines import find
from ringcoll.costs.places import Place
from ringcoll.costs.prediction import seconds_of
from ringcoll.io.text import bytes_in_words, seconds_in_words
from ringcoll.placement import topology as topologies
from ringcoll.placement.topology import network

#: The bytes of the all-gather whose time `describe` prints.
_BYTES = 2**26


def mesh(
    topology: str | None = None,
    /,
    *,
    devices: Sequence[Any] | None = None,
    axis_types: tuple[AxisType, ...] | None = None,
    weights: Mapping[str, float] | None = None,
    **axes: int,
) -> Mesh:
    """A mesh in which each axis is a ring of neighbours, where the chips of the TPUs allow it.

    The last axis is a box of chips, the axis before it a box of such boxes, and so on. In a box
    with an even side, the chips form a ring of single hops:

        4 x 4 chips as (2, 8)   0 1 2 3
                                7 6 5 4
                                8 9 a b
                                f e d c

    The last axis gets the shortest hops, and the others the shortest that are left. Several slices
    are along the first axes. Chips that form no box keep their order; CPUs and GPUs have that of
    `jax.make_mesh`, by process. The devices are taken for a whole slice: of a part of one, an axis
    may be taken for a ring that is none. `ringcoll.describe` prints what a mesh is like.

    Args:
        topology: chips that need not be here, to compile for: a kind and a size, such as
            "v5e:4x2", "v5p:2x2x2" or "h200:8", or a kind and a number, such as "v5litepod-8".
        devices: the devices; None: those of the topology or, without one, `jax.devices()`.
        axis_types: as for `jax.make_mesh`, which makes all axes explicit by default.
        weights: the bytes that travel along each axis. The axis with the most gets the shortest
            hops. None: the last one does.
        axes: the name and size of each axis, major first; without any, one axis x of all devices.

    Raises:
        TypeError: the topology is not a string.
        ModuleNotFoundError: the compiler for the topology is not installed (the extra tpu or gpu).
        ValueError: the sizes are not integers above 0, or do not multiply to the number of devices;
            the topology is not known; topology and devices are given; a device is given twice, or
            devices are of several kinds; weights are not of these axes; or slices are of different
            sizes, or do not divide the axes.

    >>> on_tpus = ringcoll.mesh("v5e:4x4", data=2, model=8)
    >>> [(*device.coords[:2],) for device in on_tpus.devices[0]]  # around the first box
    [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1), (1, 0)]
    """
    if topology is not None and not isinstance(topology, str):
        raise TypeError(f"ringcoll.mesh: {topology!r} is no topology; name one such as 'v5e:4x2'")
    if topology is not None and devices is not None:
        raise ValueError(f"ringcoll.mesh({topology!r}, devices=...): give one of the two")
    here = jax.devices() if devices is None else np.ravel(np.array(devices, object)).tolist()
    found = here if topology is None else topologies.devices(topology)
    kinds = sorted({device.device_kind for device in found})
    if len(kinds) > 1 or len(set(found)) < len(found):
        words = f"{len(found)} devices, {len(set(found))} different ones, of kinds {kinds}"
        raise ValueError(f"ringcoll.mesh: {words}; pass devices= of one kind, each once")
    axes = axes or {"x": len(found)}
    shape, names = tuple(axes.values()), tuple(axes)
    are_sizes = all(isinstance(size, Integral) and size > 0 for size in shape)
    if not are_sizes or prod(shape) != len(found):
        there = "there are" if topology is None else f"{topology} has"
        raise ValueError(
            f"ringcoll.mesh: axes {axes}, but {there} {len(found)} devices; let the sizes be 1 or "
            "more, and multiply to that, or pass devices="
        )
    weights = dict.fromkeys(names, 0.0) if weights is None else weights
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        raise ValueError(f"ringcoll.mesh: weights={weights!r} are not of the axes {names}")
    if not all(isinstance(weight, Real) and weight >= 0 for weight in weights.values()):
        raise ValueError(f"ringcoll.mesh: weights={weights!r} are not bytes; pass 0 or more")
    first_to_last = sorted(range(len(shape)), key=lambda axis: weights[names[axis]])
    if found[0].platform != "tpu":
        return jax.make_mesh(shape, names, axis_types, devices=found)
    ordered = _in_rings(found, shape, first_to_last)
    explicit = (AxisType.Explicit,) * len(shape)  # as `jax.make_mesh`
    return Mesh(ordered, names, axis_types=explicit if axis_types is None else axis_types)


def _in_rings(
    devices: Sequence[Any], shape: tuple[int, ...], first_to_last: Sequence[int]
) -> np.ndarray:
    """The devices of a mesh of this shape: slices outermost, then boxes of chips."""
    slices = defaultdict(list)
    for device in devices:
        slices[getattr(device, "slice_index", 0)].append(device)
    outer, left = [], len(slices)
    for size in shape:
        outer.append(gcd(size, left))
        left //= outer[-1]
    sizes = {len(some) for some in slices.values()}
    if left > 1 or len(sizes) > 1:
        raise ValueError(
            f"ringcoll.mesh: {len(slices)} slices of {sizes} devices do not divide the axes {shape}"
        )
    inner = [size // count for size, count in zip(shape, outer, strict=True)]
    boxes = [_in_boxes(slices[number], inner, first_to_last) for number in sorted(slices)]
    whole = np.array(boxes, object).reshape(*outer, *inner)
    pairs = [axis for i in range(len(shape)) for axis in (i, len(shape) + i)]
    return whole.transpose(pairs).reshape(shape)


def _in_boxes(
    devices: Sequence[Any], shape: Sequence[int], first_to_last: Sequence[int]
) -> np.ndarray:
    """The devices of one slice, such that each axis is a box of chips; as given, if none is."""
    chips, ordered = network(devices), np.empty(len(devices), object)
    ordered[:] = devices
    order = [shape[axis] for axis in first_to_last]
    if chips is None or (places := embed(chips.size, chips.wrap, order)) is None:
        return ordered.reshape(shape)
    at = dict(zip(chips.places, devices, strict=True))
    ordered[:] = [at[tuple(place)] for place in places.reshape(-1, len(chips.size)).tolist()]
    return ordered.reshape(places.shape[:-1]).transpose(np.argsort(first_to_last))


@dataclass(frozen=True)
class MeshAxis:
    """Where the ranks of one axis of a mesh are.

    Attributes:
        size: the number of ranks.
        hops: the links that the longest step of its ring passes, from a rank to the next; 0 if it
            is not known, as on CPUs and GPUs.
        shares: the axes whose rings use some of the same links.
        place: the ranks as `costs.predict` takes them; None if their places are not known.
    """

    size: int
    hops: int = 0
    shares: tuple[str, ...] = ()
    place: Place | None = None

    @property
    def seconds(self) -> float:
        """The model's time of an all-gather of 64 MiB by a ring both ways; 0 if unknown."""
        if self.place is None:
            return 0.0
        return seconds_of("all_gather", self.place, "bidirectional_ring")(_BYTES)


@dataclass(frozen=True)
class Description:
    """What a mesh is like: a line for each axis.

    Attributes:
        axes: its axes, by name.
        usual: those of the mesh that `jax.make_mesh` makes; empty if it makes none.
    """

    axes: Mapping[str, MeshAxis]
    usual: Mapping[str, MeshAxis]

    def __str__(self) -> str:
        lines = []
        for name, axis in self.axes.items():
            if axis.size == 1:
                words = "no hops"
            elif not axis.hops:
                words = "places are not known (CPUs, GPUs, several slices); the order is as given"
            else:
                far = f"hops of up to {axis.hops} links"
                words = "a ring of single hops" if axis.hops == 1 else far
            if axis.hops and axis.place:
                words += f", links shared with {', '.join(axis.shares) or 'no axis'}; "
                words += f"all-gather of {bytes_in_words(_BYTES)} {seconds_in_words(axis.seconds)}"
                if usual := self.usual.get(name):
                    words += f" (jax.make_mesh: {seconds_in_words(usual.seconds)})"
            lines.append(f"{name}={axis.size}: {words}")
        return "\n".join(lines)


def describe(mesh: Mesh) -> Description:
    """What the axes of a mesh are like, beside those of `jax.make_mesh` on the same devices.

    Print it: for each axis the longest hop, the axes with which it shares links, and the model's
    time of an all-gather of 64 MiB. Or read `describe(mesh).axes["model"].hops`.

    Args:
        mesh: any mesh. Only TPUs of one slice have places on a network.

    >>> axes = ringcoll.describe(ringcoll.mesh("v5e:4x4", data=2, model=8)).axes
    >>> axes["data"].hops, axes["model"].hops  # model is a ring of neighbours
    (2, 1)
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"ringcoll.describe: {mesh!r} is no mesh; pass a jax.sharding.Mesh")
    usual = None
    if network(mesh.devices.flat) is not None:
        devices = sorted(mesh.devices.flat, key=attrgetter("id"))
        # `jax.make_mesh` raises or warns where it has no order, or no better one, for these axes.
        refused = suppress(AssertionError, NotImplementedError, ValueError)
        with warnings.catch_warnings(action="ignore"), refused:
            usual = jax.make_mesh(mesh.devices.shape, mesh.axis_names, devices=devices)
    return Description(_axes(mesh), _axes(usual) if usual else {})


def _axes(mesh: Mesh) -> dict[str, MeshAxis]:
    chips = network(mesh.devices.flat)
    if chips is None:
        return {name: MeshAxis(size) for name, size in mesh.shape.items()}
    ranks, kind = np.arange(mesh.size).reshape(mesh.devices.shape), None
    with suppress(ValueError):  # the rates of v2 and v3 are not known
        kind = find(mesh.devices.flat[0].device_kind)
    rings, steps, links = {}, {}, {}
    for axis, (name, size) in enumerate(mesh.shape.items()):
        rings[name] = np.moveaxis(ranks, axis, -1).reshape(-1, size)
        pairs = np.stack([rings[name], np.roll(rings[name], -1, 1)], -1).reshape(-1, 2)
        steps[name] = [(a, b) for a, b in pairs.tolist() if a != b]
        links[name] = {*chips.load(steps[name]), *chips.load((b, a) for a, b in steps[name])}
    found = {}
    for name, size in mesh.shape.items():
        hops = max((chips.hops(a, b) for a, b in steps[name]), default=0)
        shares = tuple(o for o in links if o != name and links[o] & links[name])
        places = tuple(tuple(chips.places[rank] for rank in ring) for ring in rings[name].tolist())
        where: dict[str, Any] = {"network": chips.size, "closed": chips.wrap, "places": places}
        place = Place(kind, (size,), **where) if kind else None
        found[name] = MeshAxis(size, hops, shares, place)
    return found
