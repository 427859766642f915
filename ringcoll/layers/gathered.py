"""Gather parameters where they are used, and reduce-scatter their gradients."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ringcoll.choose.table import Algorithm
from ringcoll.collectives.all_gather import all_gather, psum_scatter
from ringcoll.collectives.axes import AxisName, axes_of
from ringcoll.collectives.front_door import Pytree
from ringcoll.collectives.wires import Wire, WireLike, as_wire
from ringcoll.layers.linear import kernel_and_bias, rank_count, with_bias
from ringcoll.layers.parameters import (
    axes_in,
    check_axes,
    check_bound,
    errors_of,
    map_with_specs,
    refusal,
)
from ringcoll.layers.replicas import SumOptions, copied, copied_with, narrowed
from ringcoll.matmuls.functions import all_gather_matmul
from ringcoll.matmuls.options import GatherOptions, with_options
from ringcoll.runtime.value_types import is_checked


@dataclass(frozen=True)
class _Gathering:
    """How to gather one leaf along `dim`, and to reduce its gradient; `own` is its dtype."""

    axes: tuple[Hashable, ...]
    dim: int
    algorithm: Algorithm
    wire: Wire | None
    gradient_wire: Wire | None
    dtype: np.dtype
    own: np.dtype
    reduce_dtype: np.dtype


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
    Leaves that are whole already are used as they are. Leaves that are not floats (a random key)
    are returned unchanged.

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
            leaf is not of floats; under `check_vma=True`, a leaf that a spec shards is the same on
            all ranks.

    Source: Rajbhandari et al., "ZeRO" (2020); Zhao et al., "PyTorch FSDP" (2023).

    >>> params, specs = {"w": jnp.arange(8.0), "b": jnp.ones(1)}, {"w": P("x"), "b": P()}
    >>> def layer(params, x):
    ...     whole = fsdp.gather(params, specs, "x", dtype=jnp.bfloat16)
    ...     return x * whole["w"].sum() + whole["b"]
    >>> print(ranks(layer, (specs, P("x")))(params, jnp.arange(4.0)))
    [ 1. 29. 57. 85.]
    """
    axes = axes_of(axis_name)
    everywhere = (*axes, *axes_of(replicas))
    codes, gradient_codes = (w if w is None else as_wire(w) for w in (wire, gradient_wire))
    check_bound("fsdp.gather", axis_name)
    check_bound("fsdp.gather", replicas, "replicas")

    dims = list[int | None]()

    def find_dim(name: str, leaf: Array, spec: PartitionSpec) -> None:
        dim = _gathered_dim(name, spec, axes)
        dims.append(dim)
        if dim is None:
            return
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            words = f"{name}: its spec {spec} shards it, and it is {leaf.dtype}"
            raise refusal(TypeError, "fsdp.gather", words, "leave this leaf whole")
        if is_checked() and not {*axes} <= jax.typeof(leaf).mat.varying:
            words = f"{name}: its spec {spec} shards it, but it is the same on all ranks here"
            cure = "pass the specs that jax.shard_map has in in_specs"
            raise refusal(ValueError, "fsdp.gather", words, cure)

    map_with_specs("fsdp.gather", find_dim, params, specs)
    leaves, structure = jax.tree.flatten(params)
    # A gradient is rounded to the dtype of its parameter after it is summed, and not before.
    leaves = [
        leaf.astype(jnp.promote_types(leaf.dtype, narrowed(leaf.dtype, dtype)))
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
        else leaf
        for leaf in leaves
    ]
    # Leaves that are sharded over an axis already vary over it: `copied` skips them.
    summed: SumOptions = {**options, "reduce_dtype": options["reduce_dtype"] or dtype}
    if gradient_codes:
        sharded = [i for i, dim in enumerate(dims) if dim is not None]
        copies = copied_with([leaves[i] for i in sharded], everywhere, gradient_codes, **summed)
        for i, copy in zip(sharded, copies, strict=True):
            leaves[i] = copy
    leaves = copied(leaves, everywhere, **summed)

    def whole(leaf: Array, dim: int | None) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        to = narrowed(leaf.dtype, dtype)
        if dim is None:
            return leaf.astype(to)
        sums = narrowed(to, options["reduce_dtype"])
        gathering = _Gathering(
            axes, dim, options["algorithm"], codes, gradient_codes, to, leaf.dtype, sums
        )
        with errors_of("fsdp.gather"):
            return _gathered(gathering, leaf)

    return jax.tree.unflatten(structure, map(whole, leaves, dims))


def _gathered_dim(name: str, spec: PartitionSpec, axes: tuple[Hashable, ...]) -> int | None:
    """The dimension that a spec shards over the gathered axes; None if there is none."""
    known = jax.sharding.get_abstract_mesh().axis_names
    gathered = None
    for dim, entry in enumerate(spec):
        sharding_axes = axes_in(entry)
        check_axes("fsdp.gather", f"{name}: its spec {spec} names", sharding_axes, known)
        if sharding_axes == axes and axes:
            gathered = dim
        elif set(sharding_axes) & set(axes):
            words = f"{name}: its spec {spec} has {entry!r}, and the gather is over {axes}"
            cure = "pass axis_name as the spec has it, or shard another dimension"
            raise refusal(ValueError, "fsdp.gather", words, cure)
    return gathered


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(options: _Gathering, x: Array) -> Array:
    return all_gather(
        x.astype(options.dtype),
        options.axes,
        axis=options.dim,
        tiled=True,
        algorithm=options.algorithm,
        wire=options.wire,
    )


def _gathered_backward(options: _Gathering, _: None, ct: Array) -> tuple[Array]:
    mine = psum_scatter(
        ct.astype(options.reduce_dtype),
        options.axes,
        scatter_dimension=options.dim,
        tiled=True,
        algorithm=options.algorithm,
        wire=options.gradient_wire,
    )
    return (mine.astype(options.own),)


_gathered.defvjp(lambda options, x: (_gathered(options, x), None), _gathered_backward)


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
    check_bound("fsdp.linear", axis_name)
    check_bound("fsdp.linear", replicas, "replicas")
    n, features = rank_count(axis_name), x.shape[-1]
    if kernel.ndim != 2 or kernel.shape[0] not in (features, features // n):
        words = f"x is {x.shape}, the kernel {kernel.shape} on each of {n} ranks"
        cure = "pass a kernel of [d, f/n] or [d/n, f], where d are the features of x"
        raise refusal(ValueError, "fsdp.linear", words, cure)
    matrix = copied(kernel, replicas).astype(x.dtype)
    with errors_of("fsdp.linear"):
        y = all_gather_matmul(
            x,
            matrix,
            axis_name,
            operand=1,
            dimension=-1 if kernel.shape[0] == features else -2,
            **options,
        )
    return with_bias("fsdp.linear", y, copied(bias, (*axes_of(axis_name), *axes_of(replicas))))
