"""Which ranks share a host.

This is known when a program is lowered, because its devices are known then. (A trace knows only
the names and sizes of axes, and may be used for several meshes of devices.) A process of JAX counts
as one host: its ranks share memory; between ranks of different processes there is a network.
"""

import math
from collections import Counter
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh


class HostSpread(NamedTuple):
    """How the ranks of a collective are spread over hosts, for `Table.pick`.

    Attributes:
        hosts: the number of hosts.
        ranks_a_host: the most ranks that one host has; None if all hosts have equally many.
    """

    hosts: int
    ranks_a_host: int | None


class Where(NamedTuple):
    """Where a program runs: the platform, and a mesh or what JAX knows about axes in a lowering."""

    platform: str
    axes: Any


@lru_cache(maxsize=512)
def on_hosts(
    known: Any, axes: tuple[Hashable, ...], groups: tuple[tuple[int, ...], ...] | None = None
) -> HostSpread:
    """How the ranks along some axes, or in each group of them, are spread over hosts.

    If the ranks along the axes differ from place to place, or groups differ, each number is the
    largest of them, because all ranks run a collective in the same way.

    Args:
        known: the axes of a `Where`. If only their names and sizes are known but no devices, as
            inside another `shard_map`, the ranks are assumed to be on one host.
        axes, groups: the axes and groups of the collective.
    """
    mesh = getattr(known, "mesh", known)
    if not isinstance(mesh, Mesh):
        return HostSpread(1, None)
    hosts = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    places = [mesh.axis_names.index(axis) for axis in axes]
    ranks = np.moveaxis(hosts, places, range(-len(axes), 0))
    ranks = ranks.reshape(-1, math.prod(mesh.shape[axis] for axis in axes))
    if groups:
        ranks = ranks[:, np.array(groups)].reshape(-1, len(groups[0]))
    counts = [Counter(some.tolist()).values() for some in np.unique(ranks, axis=0)]
    return HostSpread(max(map(len, counts)), max(map(max, counts)))
