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

For a stack of layers, use an ordinary `lax.scan`. On chips with sparse cores (TPU v5p, v6e, tpu7x),
compile it with `ringcoll.overlap.OPTIONS["sparse cores"]`. Then built-in gathers travel under the
layer before, those of `gather` and of `linear`. On others, such as v5e, `linear` is faster than
`gather`: it multiplies while the kernel arrives (`benchmarks/pages/whole.md`).

For gradients inside `shard_map` under `check_vma=False` see `ringcoll.layers.tensor_parallel`. JAX
refuses forward mode (`jvp`).
"""

from collections.abc import Hashable
from functools import partial
from math import prod
from typing import Any, Unpack

import jax
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from ringcoll.collectives.all_gather import all_gather, psum_scatter
from ringcoll.collectives.axes import AxisName, axes_of, rank_count
from ringcoll.collectives.front_door import Pytree
from ringcoll.collectives.public import public
from ringcoll.collectives.sums import WireLike, sums_of
from ringcoll.layers.linear import kernel_and_bias, with_bias
from ringcoll.layers.parameters import (
    axes_in,
    check_axes,
    check_bound,
    check_specs,
    is_float,
    is_parameter,
    map_with_specs,
    mesh_or_ambient,
    shard,
)
from ringcoll.layers.replicas import SumOptions, narrowed, shared
from ringcoll.matmuls.functions import all_gather_matmul
from ringcoll.matmuls.options import GatherOptions, with_options
from ringcoll.runtime.value_types import is_checked

__all__ = ["MIN_SIZE", "gather", "linear", "shard", "specs"]

#: Leaves with fewer elements are replicated: their gather would be mostly latency.
MIN_SIZE = 1 << 12


@public("layers.fsdp.", arguments=False)
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
    are equal, along the first. A leaf stays whole if it is small, if it is not an array of floats
    or of bytes (frozen codes, as int8 and int4), or if there is no such dimension.

    Args:
        params: a pytree of arrays, or of `jax.ShapeDtypeStruct`s; other leaves are whole.
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
    mesh = mesh_or_ambient(mesh)
    axes = axes_of(axis_name)
    check_axes("axis_name is", axes, mesh.shape)
    ranks = prod(mesh.shape[axis] for axis in axes)
    entry = axes[0] if len(axes) == 1 else axes

    def spec(name: str, leaf: Any, base_spec: PartitionSpec) -> PartitionSpec:
        shape = np.shape(leaf)
        entries = [*base_spec, *[None] * (len(shape) - len(base_spec))]
        if any(axis in axes for there in entries for axis in axes_in(there)):
            raise ValueError(
                f"{name}: base has it sharded over {axis_name!r} already: {base_spec}; leave that "
                "axis out of base"
            )
        sizes = {
            d: shape[d]
            for d in range(leading, len(shape))
            if entries[d] is None and shape[d] % ranks == 0 and shape[d]
        }
        if not is_parameter(leaf) or not sizes or prod(shape[leading:]) < min_size:
            return base_spec
        wanted = dim + len(shape) if dim is not None and dim < 0 else dim
        to_shard = wanted if wanted in sizes else max(sizes, key=lambda d: sizes[d])
        return PartitionSpec(*[entry if d == to_shard else e for d, e in enumerate(entries)])

    if base is None:
        base = jax.tree.map(lambda _: PartitionSpec(), params)
    of_leaves = map_with_specs(spec, params, base)
    result = jax.tree.unflatten(jax.tree.structure(params), of_leaves)
    check_specs(params, result, mesh)
    return result


@with_options("layers.fsdp.")
def gather(
    params: Pytree,
    specs: Pytree,
    axis_name: AxisName,
    *,
    dtype: DTypeLike | None = None,
    replicas: AxisName = (),
    wire: WireLike | None = None,
    gradient_wire: WireLike | None = None,
    **options: Unpack[SumOptions],
) -> Pytree:
    """The whole parameters, gathered from each rank's shards; inside `jax.shard_map`.

    `w: [d/n, f] -> [d, f]` for each leaf, along the dimension where its spec has `axis_name`.
    Leaves that are whole already are used as they are. Bytes (frozen codes) keep their dtype, and
    have no gradient. Other leaves that are not floats (a random key) are returned unchanged.

    Args:
        params: a rank's shards.
        specs: the specs of the parameters, as `jax.shard_map` has them in `in_specs`.
        axis_name: the axis over which they are gathered.
        dtype: the dtype of real floats in the result and on the wire; None for that of the
            parameters.
        replicas: further axes over which ranks have other data but the same shards.
        wire: what the messages of the gather hold (see `ringcoll.Wire`); each shard is encoded
            once, after it is cast to `dtype`. None for numbers of `dtype`.
        gradient_wire: what messages hold when the gradients of sharded leaves are summed; each
            rank's gradient is encoded once, and added in float32. The gradients of whole leaves,
            which are small, are not encoded.

    Options: `ringcoll.layers.SumOptions`; the gather has the same algorithm as the sums.

    Steps and bytes: an `all_gather` for each leaf that is sharded; with a wire, one byte per
    element and 4 bytes per block.

    Gradient: a `psum_scatter` over `axis_name`, then a `psum` of the shard over `replicas`, with
    small leaves packed; for leaves that are whole, a `psum` over both. It has the parameters'
    dtype. Under `check_vma=False` the edge of `shard_map` sums over axes on which a parameter is
    whole.

    Raises:
        NameError: an axis is not bound.
        TypeError, ValueError: the specs do not fit the parameters, or name an axis that the mesh
            does not have; a dimension is sharded over both `axis_name` and another axis; a sharded
            leaf is of wide integers; under `check_vma=True`, a leaf that a spec shards is the same
            on all ranks.

    Source: Rajbhandari et al., "ZeRO" (2020); Zhao et al., "PyTorch FSDP" (2023).

    >>> params, specs = {"w": jnp.arange(8.0), "b": jnp.ones(1)}, {"w": P("x"), "b": P()}
    >>> def layer(params, x):
    ...     whole = fsdp.gather(params, specs, "x", dtype=jnp.bfloat16)
    ...     return x * whole["w"].sum() + whole["b"]
    >>> print(ranks(layer, (specs, P("x")))(params, jnp.arange(4.0)))
    [ 1. 29. 57. 85.]
    """
    codes, gradient_codes = (sums_of(wire=w).wire for w in (wire, gradient_wire))
    check_bound(axis_name)
    check_bound(replicas, "replicas")
    axes, algorithm = axes_of(axis_name), options["algorithm"]
    dims = map_with_specs(partial(_gathered_dim, axes), params, specs)
    leaves, structure = jax.tree.flatten(params)
    # A gradient is rounded to the dtype of its parameter after it is summed, and not before.
    leaves = [
        leaf.astype(max(narrowed(leaf.dtype, dtype), leaf.dtype, key=lambda dtype: dtype.itemsize))
        if is_float(leaf)
        else leaf
        for leaf in leaves
    ]
    # Leaves that are sharded over an axis already vary over it: their sums are over the replicas.
    summed: SumOptions = {**options, "reduce_dtype": options["reduce_dtype"] or dtype}
    wires = [None if dim is None else gradient_codes for dim in dims]
    leaves = shared(leaves, (*axes, *axes_of(replicas)), wires=wires, **summed)

    def whole(leaf: Array, dim: int | None) -> Array:
        how: Any = {"axis_name": axes, "tiled": True, "algorithm": algorithm}
        if not is_float(leaf):
            return leaf if dim is None else all_gather(leaf, axis=dim, **how)
        own, to = leaf.dtype, narrowed(leaf.dtype, dtype)
        if dim is None:
            return leaf.astype(to)
        sums = narrowed(to, options["reduce_dtype"])

        @jax.custom_vjp
        def gathered(x: Array) -> Array:
            return all_gather(x.astype(to), axis=dim, wire=codes, **how)

        def scattered(_: None, ct: Array) -> tuple[Array]:
            ct = ct.astype(sums)
            return (
                psum_scatter(ct, scatter_dimension=dim, wire=gradient_codes, **how).astype(own),
            )

        gathered.defvjp(lambda x: (gathered(x), None), scattered)
        return gathered(leaf)

    return jax.tree.unflatten(structure, list(map(whole, leaves, dims)))


def _gathered_dim(
    axes: tuple[Hashable, ...], name: str, leaf: Array, spec: PartitionSpec
) -> int | None:
    """The dimension that a spec shards over the gathered axes; None if there is none."""
    known = jax.sharding.get_abstract_mesh().axis_names
    gathered = None
    for dim, entry in enumerate(spec):
        sharding_axes = axes_in(entry)
        check_axes(f"{name}: its spec {spec} names", sharding_axes, known)
        if sharding_axes == axes and axes:
            gathered = dim
        elif set(sharding_axes) & set(axes):
            raise ValueError(
                f"{name}: its spec {spec} has {entry!r}, and the gather is over {axes}; pass "
                "axis_name as the spec has it, or shard another dimension"
            )
    if gathered is None:
        return None
    if not is_parameter(leaf):
        raise TypeError(
            f"{name}: its spec {spec} shards it, and it is {leaf.dtype}; leave this leaf whole"
        )
    if is_checked() and not {*axes} <= jax.typeof(leaf).mat.varying:
        raise ValueError(
            f"{name}: its spec {spec} shards it, but it is the same on all ranks here; pass the "
            "specs that jax.shard_map has in in_specs"
        )
    return gathered


@with_options("layers.fsdp.")
def linear(
    params: Any,
    x: Array,
    axis_name: AxisName,
    *,
    replicas: AxisName = (),
    **options: Unpack[GatherOptions],
) -> Array:
    """x @ kernel + bias, multiplied while the kernel arrives.

    `x: [..., d], kernel: [d, f/n] or [d/n, f], bias: [f] -> [..., f]`. The kernel travels in the
    dtype of x. If the kernel is sharded by columns, results are put side by side; if by rows,
    they are added up. Columns are the better choice.

    On chips with sparse cores, "auto" is the built-in gather, and then the product. If you compile
    without `overlap.OPTIONS["sparse cores"]`, name an algorithm: "bidirectional_ring".

    Options: `ringcoll.GatherOptions`. Steps and bytes: those of `all_gather_matmul` with
    `operand=1`.

    Gradient: for the kernel an `einsum_reduce_scatter`, under its own product; for operands that
    are the same on all ranks of `axis_name` and `replicas`, a `psum`.

    Raises:
        ValueError: the kernel is no shard of a matrix that fits x; or the bias does not fit.

    >>> params, specs = {"kernel": jnp.ones((2, 4))}, {"kernel": P(None, "x")}
    >>> linear = partial(fsdp.linear, axis_name="x", algorithm="ring")
    >>> print(ranks(linear, (specs, P("x")))(params, jnp.arange(8.0).reshape(4, 2))[:, 0])
    [ 1.  5.  9. 13.]
    """
    kernel, bias = kernel_and_bias(params)
    check_bound(axis_name)
    check_bound(replicas, "replicas")
    n, features = rank_count(axis_name), x.shape[-1]
    if kernel.ndim != 2 or kernel.shape[0] not in (features, features // n):
        raise ValueError(
            f"x is {x.shape}, the kernel {kernel.shape} on each of {n} ranks; pass a kernel of "
            "[d, f/n] or [d/n, f], where d are the features of x"
        )
    matrix = shared(kernel, replicas).astype(x.dtype)
    dim = -1 if kernel.shape[0] == features else -2
    y = all_gather_matmul(x, matrix, axis_name, operand=1, dim=dim, **options)
    return with_bias(y, shared(bias, (*axes_of(axis_name), *axes_of(replicas))))
