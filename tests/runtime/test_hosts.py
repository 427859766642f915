"""Which ranks share a host: on meshes of devices of several processes, and where none is known."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import make_mesh

from ringcoll import lax
from ringcoll.choose.table import Table, TableRow
from ringcoll.runtime.hosts import on_hosts

FOUR_OF_TWO = np.arange(8).reshape(4, 2) // 2


class Device(SimpleNamespace):
    """The attributes of a device that a mesh needs; each device is one of its own."""

    platform = device_kind = "cpu"
    __hash__ = object.__hash__


def mesh_on(processes):
    """x and y, of devices of these processes."""
    devices = [Device(id=i, process_index=p) for i, p in enumerate(np.ravel(processes).tolist())]
    return Mesh(np.array(devices).reshape(np.shape(processes)), ("x", "y"))


@pytest.mark.parametrize(
    ("processes", "axes", "groups", "expected"),
    [
        (FOUR_OF_TWO, "x", None, (4, 1)),
        (FOUR_OF_TWO, "y", None, (1, 2)),
        (FOUR_OF_TWO, "xy", None, (4, 2)),
        (FOUR_OF_TWO, "yx", None, (4, 2)),
        (FOUR_OF_TWO.T, "x", None, (1, 2)),
        (
            np.zeros((4, 2), int),
            "xy",
            None,
            (1, 8),
        ),  # a mesh of one process, inside a mesh of several
        ([[0, 0, 0, 1]], "y", None, (2, 3)),
        ([[0, 0, 1, 1], [2, 2, 2, 3]], "y", None, (2, 3)),  # the most of either
        ([[0, 0, 1, 1]], "y", ((0, 1), (2, 3)), (1, 2)),
        ([[0, 0, 1, 1]], "y", ((0, 2), (1, 3)), (2, 1)),
        ([[0, 1], [0, 1]], "xy", ((0, 2), (1, 3)), (1, 2)),
        ([[0, 1], [0, 1]], "yx", ((0, 2), (1, 3)), (2, 1)),  # ranks count in the order of axes
    ],
)
def test_how_ranks_lie_on_hosts(processes, axes, groups, expected):
    assert on_hosts(mesh_on(processes), tuple(axes), groups) == expected


def test_unknown_devices_are_one_host():
    """Inside of another `shard_map`, where a program is lowered for names and sizes alone."""
    table = Table(
        (
            TableRow("psum", "cpu", "recursive_doubling", hosts=(1, 2)),
            TableRow("psum", "cpu", "ring"),
        )
    )

    def inner(x):
        return lax.psum(x, "y", algorithm=table)

    def outer(x):
        return jax.shard_map(inner, in_specs=P("y"), out_specs=P(), axis_names={"y"})(x)

    mesh = make_mesh(2, 4)
    mapped = jax.shard_map(outer, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    x = jax.ShapeDtypeStruct((16,), np.float32, sharding=NamedSharding(mesh, P("x")))
    text = jax.jit(mapped).lower(x).as_text()
    assert text.count("stablehlo.collective_permute") == 2  # by recursive doubling of four ranks
