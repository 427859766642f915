"""Which ranks share a host: known when a program is lowered, for then its devices are.

(A trace is of a mesh of names and sizes, and may be of several meshes of devices.) A process of
JAX counts as one host: its ranks share memory, and between those of several is a network.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh

from ringcoll.manual import device_kind

T = TypeVar("T")


class OnHosts(NamedTuple):
    """How the ranks of a collective lie on hosts, as `Table.pick` asks for it.

    Attributes:
        hosts: how many.
        ranks_a_host: the most that one has.
    """

    hosts: int
    ranks_a_host: int


@lru_cache(maxsize=512)
def on_hosts(
    mesh: Mesh, axes: tuple[Hashable, ...], groups: tuple[tuple[int, ...], ...] | None = None
) -> OnHosts:
    """How the ranks over some axes of a mesh lie on hosts, or those of each group.

    Of ranks along other axes, or in other groups, those count that are on most: all run a
    collective in the same way.
    """
    hosts = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    places = [mesh.axis_names.index(axis) for axis in axes]
    ranks = np.moveaxis(hosts, places, range(-len(axes), 0))
    ranks = ranks.reshape(-1, math.prod(mesh.shape[axis] for axis in axes))
    if groups:
        ranks = ranks[:, np.array(groups)].reshape(-1, len(groups[0]))
    counts = [Counter(some.tolist()).values() for some in np.unique(ranks, axis=0)]
    return OnHosts(max(map(len, counts)), max(map(max, counts)))


def mesh_of(context: mlir.LoweringRuleContext) -> Mesh | None:
    """The devices that a program is lowered for, if they are known: there may be just a topology
    of names and sizes, as inside of another `shard_map`.
    """
    mesh = getattr(context.module_context.axis_context, "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def are_cpu_processes() -> bool:
    """Whether what is traced runs on CPUs, in several processes."""
    # In this order: to ask for processes starts the backend.
    return device_kind() == "cpu" and jax.process_count() > 1


def by_hosts(
    axes: tuple[Hashable, ...],
    within: Callable[..., T],
    between: Callable[..., T],
    *operands: Any,
) -> T:
    """`between(*operands)` where the ranks over some axes are on several hosts; else `within`.

    Which it is is a constant: the compiler takes the other away.
    """
    if not are_cpu_processes():
        return within(*operands)
    return lax.cond(_are_several.bind(axes=axes), between, within, *operands)


_are_several = Primitive("ringcoll_are_several_hosts")
_are_several.def_abstract_eval(lambda *, axes: jax.core.ShapedArray((), jnp.bool_))


def _constant(context: mlir.LoweringRuleContext, *, axes: tuple[Hashable, ...]) -> Any:
    mesh = mesh_of(context)

    def are_several() -> Array:
        return jnp.asarray(mesh is not None and on_hosts(mesh, axes).hosts > 1)

    return mlir.lower_fun(are_several, multiple_results=False)(context)


mlir.register_lowering(_are_several, _constant)
