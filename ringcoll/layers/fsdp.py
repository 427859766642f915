"""Fully sharded data parallelism: each rank keeps a part of every parameter.

Parameters are whole only where they are used: gathered just before, or under the product that
they are a factor of, and their gradients are reduce-scattered. They may be kept in float32,
travel and compute in bfloat16, and be summed in a dtype of one's choice.

    specs = fsdp.specs(params, "fsdp")  # or on top of others: base=tensor_parallel's
    params = fsdp.shard(params, specs)

    def loss(params, batch):  # in jax.shard_map(in_specs=(specs, P(("data", "fsdp"))))
        weights = fsdp.gather(params, specs, "fsdp", dtype=jnp.bfloat16, replicas="data")
        ...

Axes may be many: sharded over one, tensor-parallel over another (`base`), and replicated over a
third (`replicas`): hosts with a fast network within are gathered inside only, and what crosses
between them is the gradient of a shard.

Gathered parameters are kept for the backward pass as any intermediate result is. To gather them
again, gather inside of what is under `jax.checkpoint`, with a policy that does not save them
(`jax.checkpoint_policies.dots_saveable` saves products alone); or use `scan_layers`, which has
them on the wire while another layer computes.

Gradients inside `shard_map` under `check_vma=False`: as said in `ringcoll.layers.tensor_parallel`.
"""

from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ringcoll.calls import AxisName, Pytree, axes_of
from ringcoll.layers.gathered import Gathered as Gathered
from ringcoll.layers.gathered import gather as gather
from ringcoll.layers.gathered import linear as linear
from ringcoll.layers.parameters import (
    axes_in,
    check_specs,
    map_with_specs,
    mesh_or_ambient,
    refusal,
)
from ringcoll.layers.parameters import shard as shard
from ringcoll.layers.scan import scan_layers as scan_layers

#: Leaves of fewer elements are replicated: their gather would be all latency.
MIN_SIZE = 1 << 12


def specs(
    params: Pytree,
    axis_name: AxisName,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    base: Pytree | None = None,
    min_size: int = MIN_SIZE,
    leading: int = 0,
) -> Pytree:
    """How parameters are sharded over an axis: a tree of `PartitionSpec`s.

    Of each leaf the largest dimension that divides by the ranks, of equal ones the first; none
    of a leaf that is small, or of which no dimension divides: that one stays whole on every
    rank, as its spec shows.

    Args:
        params: a pytree of arrays, or of `jax.ShapeDtypeStruct`s.
        axis_name: one axis, or several, over all of which a dimension is cut.
        mesh: None for that of `jax.set_mesh`.
        base: specs to add to, as those of tensor parallelism: what they shard is left as it is.
        min_size: the fewest elements of a leaf that is sharded (of one layer, if stacked).
        leading: how many dimensions to leave whole: 1 for layers that are stacked.

    Raises:
        TypeError, ValueError: `base` does not fit, or the mesh lacks an axis.
    """
    mesh = mesh_or_ambient("fsdp.specs", mesh)
    axes = axes_of(axis_name)
    for axis in axes:
        if axis not in mesh.shape:
            known = ", ".join(map(repr, mesh.shape))
            words = f"{axis!r} is no axis of the mesh"
            raise refusal(ValueError, "fsdp.specs", words, f"choose from {known}")
    ranks = prod(mesh.shape[axis] for axis in axes)
    entry = axis_name if isinstance(axis_name, str) or len(axes) != 1 else axes[0]

    def spec(name: str, leaf: Any, given: PartitionSpec) -> PartitionSpec:
        entries = [*given, *[None] * (len(leaf.shape) - len(given))]
        if any(axis in axes for there in entries for axis in axes_in(there)):
            words = f"{name}: base has it sharded over {axis_name!r} already: {given}"
            raise refusal(ValueError, "fsdp.specs", words, "leave that axis out of base")
        sizes = {
            dim: leaf.shape[dim]
            for dim in range(leading, len(leaf.shape))
            if entries[dim] is None and leaf.shape[dim] % ranks == 0 and leaf.shape[dim]
        }
        if not sizes or prod(leaf.shape[leading:]) < min_size:
            return given
        largest = max(sizes, key=lambda dim: sizes[dim])
        return PartitionSpec(*[entry if d == largest else e for d, e in enumerate(entries)])

    if base is None:
        base = jax.tree.map(lambda _: PartitionSpec(), params)
    made = map_with_specs("fsdp.specs", spec, params, base)
    check_specs(params, made, mesh, function="fsdp.specs")
    return made
