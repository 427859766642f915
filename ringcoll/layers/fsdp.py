"""Fully sharded data parallelism: each rank keeps a part of every parameter.

Parameters are whole only while they are used. They are gathered just before that, or under the
product that uses them. Their gradients are reduce-scattered. You may keep parameters in float32,
send them and compute in bfloat16, and sum their gradients in a third dtype.

    specs = fsdp.specs(params, "fsdp")  # base= adds to other specs, such as tensor_parallel's
    params = fsdp.shard(params, specs)

    def loss(params, batch):  # in jax.shard_map(in_specs=(specs, P(("data", "fsdp"))))
        weights = fsdp.gather(params, specs, "fsdp", dtype=jnp.bfloat16, replicas="data")
        ...

Axes can be combined. `base` has the specs of tensor parallelism over another axis. `replicas` are
axes over which ranks hold the same shards. If `axis_name` is the devices of a host, this is hybrid
sharding: parameters are gathered within a host, and only gradients of shards cross between hosts.

Gathered parameters are kept for the backward pass, like any intermediate result. To gather them
again instead, gather inside the function that is under `jax.checkpoint`, with a policy that does
not save them (`jax.checkpoint_policies.dots_saveable` saves only products).

For a stack of layers, use an ordinary `lax.scan`. `linear` on shards in it multiplies while the
kernel arrives; it is the fastest if kernels are sharded by columns (`benchmarks/pages/fsdp.md`).

For gradients inside `shard_map` under `check_vma=False` see `ringcoll.layers.tensor_parallel`. JAX
refuses forward mode (`jvp`).
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ringcoll.collectives.axes import AxisName, axes_of
from ringcoll.collectives.front_door import Pytree
from ringcoll.layers.gathered import gather, linear
from ringcoll.layers.parameters import (
    axes_in,
    check_axes,
    check_specs,
    map_with_specs,
    mesh_or_ambient,
    refusal,
    shard,
)

__all__ = ["MIN_SIZE", "gather", "linear", "shard", "specs"]

#: Leaves with fewer elements are replicated: their gather would be mostly latency.
MIN_SIZE = 1 << 12


def specs(
    params: Pytree,
    axis_name: AxisName,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    base: Pytree | None = None,
    dim: int | None = None,
    min_size: int = MIN_SIZE,
    leading: int = 0,
) -> Pytree:
    """How parameters are sharded over an axis: a tree of `PartitionSpec`s.

    Each leaf is sharded along its largest dimension that the number of ranks divides; if several
    are equal, along the first. A leaf stays whole if it is small, if it is not a float, or if there
    is no such dimension.

    Args:
        params: a pytree of arrays, or of `jax.ShapeDtypeStruct`s.
        axis_name: one axis, or several; a dimension is cut over all of them.
        mesh: the mesh; None for that of `jax.set_mesh`.
        base: specs to add to, such as those of tensor parallelism. They are kept.
        dim: the dimension to shard, if the ranks divide it, instead of the largest: -1 for kernels
            that `linear` multiplies.
        min_size: the fewest elements of a leaf that is sharded (of one layer, if stacked).
        leading: the number of first dimensions to leave whole: 1 for layers that are stacked.

    Raises:
        TypeError, ValueError: `base` does not fit, or the mesh lacks an axis.

    >>> params = {"kernel": jnp.ones((2, 8)), "scale": jnp.ones(2)}
    >>> fsdp.specs(params, "x", mesh=mesh, min_size=8)
    {'kernel': P(None, 'x'), 'scale': P()}
    """
    mesh = mesh_or_ambient("fsdp.specs", mesh)
    axes = axes_of(axis_name)
    check_axes("fsdp.specs", "axis_name is", axes, mesh.shape)
    ranks = prod(mesh.shape[axis] for axis in axes)
    entry = axes[0] if len(axes) == 1 else axes

    def spec(name: str, leaf: Any, base_spec: PartitionSpec) -> PartitionSpec:
        entries = [*base_spec, *[None] * (len(leaf.shape) - len(base_spec))]
        if any(axis in axes for there in entries for axis in axes_in(there)):
            words = f"{name}: base has it sharded over {axis_name!r} already: {base_spec}"
            raise refusal(ValueError, "fsdp.specs", words, "leave that axis out of base")
        sizes = {
            d: leaf.shape[d]
            for d in range(leading, len(leaf.shape))
            if entries[d] is None and leaf.shape[d] % ranks == 0 and leaf.shape[d]
        }
        is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
        if not is_float or not sizes or prod(leaf.shape[leading:]) < min_size:
            return base_spec
        wanted = dim + len(leaf.shape) if dim is not None and dim < 0 else dim
        to_shard = wanted if wanted in sizes else max(sizes, key=lambda d: sizes[d])
        return PartitionSpec(*[entry if d == to_shard else e for d, e in enumerate(entries)])

    if base is None:
        base = jax.tree.map(lambda _: PartitionSpec(), params)
    result = map_with_specs("fsdp.specs", spec, params, base)
    check_specs("fsdp.specs", params, result, mesh)
    return result
