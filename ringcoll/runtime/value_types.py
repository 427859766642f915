"""Questions to JAX about values and meshes inside `shard_map`.

Under `check_vma=True`, the type of every value has the set of mesh axes over which it *varies*. A
value that does not vary over an axis is the same on all ranks of the axis. `lax.pcast` makes such a
value varying at no cost.

Sets of axes are sorted, so that a program is lowered to the same text in every process.
"""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def is_checked() -> bool:
    """Whether values are typed here: inside `shard_map` with `check_vma=True`."""
    manual = sorted(jax.sharding.get_abstract_mesh().manual_axes, key=str)
    # A rank's own number varies over its axis. Its type says so only if types are checked.
    return any(axis in jax.typeof(lax.axis_index(axis)).mat.varying for axis in manual)


def device_kind() -> str | None:
    """The `device_kind` of the mesh's devices; None if it is not known."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "device_kind", None)


def type_in_words(x: Any) -> str:
    """The dtype and the shape of an array: "float32[8,2]"."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def varying(x: Array, axes: Sequence[Hashable]) -> Array:
    """x, typed as varying over `axes` if types are checked."""
    missing = sorted({*axes} - jax.typeof(x).mat.varying, key=str)
    typed = tuple(a for a in missing if a in jax.typeof(lax.axis_index(a)).mat.varying)
    return lax.pcast(x, typed, to="varying") if typed else x


def tree_varying(tree: Any, axes: Sequence[Hashable]) -> Any:
    """A pytree of arrays, each typed as `varying` over the axes."""
    return jax.tree.map(lambda x: varying(x, axes), tree)


def with_common_axes(xs: Sequence[Array], axes: Sequence[Hashable]) -> list[Array]:
    """The arrays, typed as varying over `axes` and every axis over which any of them varies."""
    types = [jax.typeof(x).mat.varying for x in xs]
    return [varying(x, (*axes, *frozenset().union(*types))) for x in xs]


def sharded_dims(x: Array | jax.core.ShapedArray) -> tuple[int, ...]:
    """The dimensions of x, or of its type, that are sharded over explicit axes of the caller."""
    aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    return tuple(i for i, axis in enumerate(aval.sharding.spec) if axis is not None)


def explicit_spec(x: Array) -> PartitionSpec | None:
    """How x is sharded over explicit mesh axes of the caller; None if there are none."""
    sharding = jax.typeof(x).sharding
    return sharding.spec if AxisType.Explicit in sharding.mesh.axis_types else None


def varying_like(x: Array, typed: Array | jax.core.ShapedArray) -> Array:
    """x, varying over axes, and sharded over explicit ones, as an array or a type is."""
    aval = typed if isinstance(typed, jax.core.ShapedArray) else jax.typeof(typed)
    if jax.sharding.get_abstract_mesh().explicit_axes and explicit_spec(x) != aval.sharding.spec:
        x = jax.reshard(x, aval.sharding.spec)
    return varying(x, tuple(aval.mat.varying))


def empty(
    shape: Sequence[int],
    like: Array | jax.core.ShapedArray,
    axes: Sequence[Hashable],
    beside: Array,
) -> Array:
    """A buffer to be overwritten, with the dtype, explicit sharding and type of `like`.

    `like` is an array or the type of one. If `shape` has more dimensions, the first ones are not
    sharded. The buffer is made where `beside` is computed: JAX would take one that depends on
    nothing out of a scan, and each turn would copy it.
    """
    aval = like if isinstance(like, jax.core.ShapedArray) else jax.typeof(like)
    spec = PartitionSpec(*[None] * (len(shape) - aval.ndim), *aval.sharding.spec)
    mesh = jax.sharding.get_abstract_mesh()
    out = NamedSharding(mesh, spec) if mesh.explicit_axes else None  # then a type names its mesh
    buffer = _empty.bind(beside, shape=tuple(shape), dtype=aval.dtype, out_sharding=out)
    return varying(buffer, (*axes, *aval.mat.varying))


def zeros(aval: jax.core.ShapedArray) -> Array:
    """Zeros of a type: its shape, dtype, explicit sharding and the axes over which it varies."""
    return varying_like(jnp.zeros(aval.shape, aval.dtype), aval)


def _lowered_empty(ctx, beside, **params):
    # In a program for several platforms, XLA compiles branches that send for every platform, and
    # CPU cannot compile the `lax.empty` of TPU and GPU.
    is_for_several = ctx.module_context.shape_poly_state.has_platform_index_argument
    make = jnp.zeros if is_for_several else lax.empty
    return mlir.lower_fun(lambda _: make(**params), False)(ctx, beside)


#: `lax.empty`, which is zeros in a program that is lowered for several platforms.
_empty = Primitive("ringcoll_empty")
_empty.def_impl(lambda _, **params: lax.empty(**params))
_empty.def_abstract_eval(
    lambda _, **params: jax.make_jaxpr(partial(lax.empty, **params))().out_avals[0]
)
mlir.register_lowering(_empty, _lowered_empty)
ad.primitive_jvps[_empty] = lambda xs, _, **params: (
    buffer := _empty.bind(*xs, **params),
    ad.Zero(jax.typeof(buffer).to_tangent_aval()),
)
batching.primitive_batchers[_empty] = lambda xs, _, **params: (
    _empty.bind(*xs, **params),
    None,  # not mapped
)
