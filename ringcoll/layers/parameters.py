"""Find parameters by name, and check them and their specs."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import all_leaves, keystr, tree_leaves_with_path

from ringcoll.collectives.axes import AxisName, rank_count
from ringcoll.collectives.front_door import Pytree
from ringcoll.collectives.public import bound_axes, public


def parameters(params: Any, *names: str, optional: Sequence[str] = ()) -> Any:
    """params["name"] of a mapping, params.name of anything else; an optional one may be None.

    It refuses parameters of other names, unless an object computes one of these by a property.
    """
    is_mapping = isinstance(params, Mapping)
    members = dict(params) if is_mapping else params
    read = params.get if is_mapping else lambda name: getattr(params, name, None)
    found = {name: read(name) for name in (*names, *optional)}
    if missing := [name for name in names if found[name] is None]:
        has = ", ".join(members) if is_mapping else type(params).__name__
        raise KeyError(f"no {missing[0]!r} in the parameters ({has}); add it")
    if all_leaves([members]):  # an object that is no pytree
        members = getattr(params, "__dict__", {})
    given, used = (Counter(map(id, jax.tree.leaves(tree))) for tree in (members, found))
    for path, leaf in tree_leaves_with_path(members) if used <= given else ():
        is_used = used[id(leaf)] == given[id(leaf)] or keystr(path[:1], simple=True) in found
        is_number = getattr(leaf, "weak_type", False) and not leaf.ndim  # of Python: an epsilon
        if is_parameter(leaf) and not (is_used or is_number):
            name = keystr(path, simple=True, separator="/")
            raise ValueError(f"it does not use {name!r}; pass only {', '.join(found)}")
    return found


def is_float(leaf: Any) -> bool:
    """Whether a leaf is an array of floats."""
    return jnp.issubdtype(getattr(leaf, "dtype", object), jnp.inexact)


def is_parameter(leaf: Any) -> bool:
    """Whether a leaf is an array of floats, or of frozen codes: integers of a byte or less."""
    dtype: Any = getattr(leaf, "dtype", object)
    return is_float(leaf) or (jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize == 1)


def check_bound(axis_name: AxisName, argument: str = "axis_name") -> None:
    """Raise lax's error if an axis is unbound or not hashable."""
    try:
        rank_count(axis_name)
    except (NameError, TypeError) as error:
        kind = NameError if isinstance(error, NameError) else TypeError
        raise kind(f"{argument}={axis_name!r}: {error}; {bound_axes()}") from error


def axes_in(entry: Any) -> tuple[Hashable, ...]:
    """The mesh axes that one entry of a spec names."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def map_with_specs(call: Callable, params: Pytree, specs: Pytree) -> list[Any]:
    """`call(name, leaf, spec)` for every leaf; it raises an error if the trees do not fit."""

    def checked(path: Any, leaf: Any, spec: Any) -> Any:
        name = keystr(path, simple=True, separator="/")
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"the spec of {name} is {spec!r}; pass a jax.sharding.PartitionSpec")
        if len(spec) > np.ndim(leaf):
            raise ValueError(
                f"{name} has {np.ndim(leaf)} dimensions, its spec {spec} is of {len(spec)}; "
                "make the specs from these parameters"
            )
        return call(name, leaf, spec)

    of_leaves: list[Any] = []
    whole: Any = {"is_leaf": lambda x: x is None}  # what Equinox filters out may have a spec
    try:
        jax.tree.map(lambda _, spec: of_leaves.append(spec), params, specs, **whole)
    except ValueError as error:
        raise ValueError(
            f"the specs do not match the parameters ({error}); make the specs from these parameters"
        ) from error
    pairs = zip(tree_leaves_with_path(params, **whole), of_leaves, strict=True)
    return [checked(*at, spec) for at, spec in pairs if at[1] is not None]


def check_axes(what: str, axes: Iterable[Hashable], known: Iterable[Hashable]) -> None:
    """Refuse an axis that the mesh does not have."""
    for axis in axes:
        if axis not in known:
            names = ", ".join(map(repr, known))
            raise ValueError(f"{what} {axis!r}, no axis of the mesh; choose from {names}")


def mesh_or_ambient(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    """The mesh, or that of `jax.set_mesh` if `mesh` is None."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if not mesh.axis_names:
        raise ValueError("there is no mesh; pass mesh=, or jax.set_mesh")
    return mesh


def check_specs(params: Pytree, specs: Pytree, mesh: Mesh | AbstractMesh | None) -> None:
    """Refuse specs that cannot shard these parameters over this mesh.

    It refuses them if a spec is not a `PartitionSpec`, the trees differ, a spec names an axis twice
    or one that the mesh does not have, or the ranks do not divide a dimension.
    """
    sizes = mesh_or_ambient(mesh).shape

    def check(name: str, leaf: Any, spec: PartitionSpec) -> None:
        named = [axis for entry in spec for axis in axes_in(entry)]
        check_axes(f"{name}: its spec {spec} names", named, sizes)
        if len(set(named)) < len(named):
            raise ValueError(f"{name}: its spec {spec} names an axis twice; name each axis once")
        for dim, entry in enumerate(spec):
            ranks = prod(sizes[axis] for axis in axes_in(entry))
            if np.shape(leaf)[dim] % ranks:
                raise ValueError(
                    f"{name}: dimension {dim} of its shape {np.shape(leaf)} is not divisible by "
                    f"the {ranks} ranks of {entry!r}; use a size that divides, fewer ranks, or "
                    "leave that dimension whole (in tensor_parallel only that of an embedding, or "
                    "of keys with attention(kv_heads=))"
                )

    map_with_specs(check, params, specs)


@public("layers.fsdp.", arguments=False)
def shard(params: Pytree, specs: Pytree, mesh: Mesh | None = None) -> Pytree:
    """Put each parameter on the devices that its spec names.

    Like `jax.device_put(params, specs)`, but an error names the leaf that does not fit.

    Args:
        params: a pytree of arrays; leaves that are no arrays stay as they are.
        specs: the same pytree, of `PartitionSpec`s.
        mesh: the mesh; None for that of `jax.set_mesh`.

    Raises:
        TypeError: a spec is not a `PartitionSpec`.
        ValueError: the trees differ; a spec names an axis twice, or one that the mesh does not
            have; or the ranks do not divide a dimension.

    >>> params = fsdp.shard({"w": jnp.arange(8.0)}, {"w": P("x")}, mesh)
    >>> [shard.data.tolist() for shard in params["w"].addressable_shards]
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    """
    check_specs(params, specs, mesh)

    def placed(_: str, leaf: Any, spec: PartitionSpec) -> Any:
        sharding = spec if mesh is None else NamedSharding(mesh, spec)
        return jax.device_put(leaf, sharding) if hasattr(leaf, "dtype") else leaf

    leaves = map_with_specs(placed, params, specs)
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def array_of(name: str, value: Any) -> Array:
    """An argument as an array, or a refusal."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}={value!r} is not an array; pass an array") from error


def check_alike(**arrays: Any) -> None:
    """Refuse arrays of several dtypes: after promotion, more bytes would be sent."""
    for name, x in arrays.items():
        if not hasattr(x, "ndim"):
            raise TypeError(f"{name} is a {type(x).__name__}, no array; pass an array")
    dtypes = {name: jnp.dtype(x.dtype) for name, x in arrays.items()}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} is {dtype.name}" for name, dtype in dtypes.items())
        raise TypeError(f"{found}; cast them to one dtype, as fsdp.gather(dtype=) does")
