"""From a public call to primitives: check the arguments, and bind a primitive for every leaf.

When a primitive is bound, lax gives the type of its result, before anything is sent. If lax refuses
the call, its error is raised. Calls that only lax can handle go to lax (see `is_for_lax`). Small
leaves of a pytree are bound together, so that they share messages.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ringcoll.choose.table import Table
from ringcoll.collectives.axes import AxisName, check_groups, rank_count
from ringcoll.collectives.public import REFUSALS, integer
from ringcoll.runtime.primitive import Collective
from ringcoll.runtime.value_types import varying
from ringcoll.schedules.registry import LAX

Pytree = Any
#: Leaves of up to this many bytes share messages: up to this size, rounds take longer than the two
#: copies that sharing needs. Measured on CPU.
PACK_UP_TO = 1 << 18


def bind_leaves(
    x: Pytree, axis_name: AxisName, collective: Collective, dims: Sequence[tuple[str, Any]] = ()
) -> Pytree:
    """The results for every leaf: by ringcoll, or by lax if only lax can do it.

    Nothing is sent before all leaves are known to be right.

    Args:
        x: a pytree.
        axis_name: as the user gave it.
        collective: the collective of this call, with the options as the user gave them.
        dims: the arguments that are dimensions, with their names; negative dimensions count from
            the last dimension of each leaf.
    """
    leaves, structure = jax.tree.flatten(x)
    if collective.groups is not None:
        check_groups(collective.groups, rank_count(axis_name))
    # lax refuses random keys over an axis of a mesh too, but only when it lowers the call.
    keys = [jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key) for x in leaves]
    adds_keys = collective.adds_numbers and any(keys)
    if adds_keys and {*jax.sharding.get_abstract_mesh().manual_axes} & {*collective.axes}:
        raise TypeError("a random key is not a number; leave it out")
    only_lax = [is_for_lax(collective, leaf) for leaf in leaves]
    each = [collective.resolved(leaves, only_lax)] * len(leaves)
    if dims:
        added = collective.adds_dim and not collective.tiled
        for i, aval in enumerate(map(jax.typeof, leaves)):
            numbers = (integer(name, dim, aval.ndim + added) for name, dim in dims)
            each[i] = replace(each[i], dims=tuple(numbers))
    # A single leaf is bound as it was given. The bind itself traces lax's collective, but with a
    # tuple of axes. lax may refuse a list of axes, so a list is checked here.
    if len(leaves) > 1 or isinstance(axis_name, list):
        _check_leaves(leaves, axis_name, each)
    try:
        results = _bound(leaves, axis_name, each, only_lax)
    except (*REFUSALS, AssertionError):  # if lax refuses the call too, raise lax's error
        _check_leaves(leaves, axis_name, each)
        raise
    return jax.tree.unflatten(structure, results)


def _bound(
    leaves: Sequence[Any], axis_name: AxisName, each: Sequence[Any], only_lax: Sequence[bool]
) -> list[Any]:
    """Bind the collective of each leaf, or one for several small leaves that share messages."""
    results: dict[int, Any] = {}
    operands: dict[int, Array] = {}
    packs: dict[Hashable, list[int]] = defaultdict(list)  # the leaves that share messages
    for i, (leaf, own) in enumerate(zip(leaves, each, strict=True)):
        if only_lax[i]:
            results[i] = own.by_lax_alone(leaf, axis_name)
            continue
        array = jnp.asarray(leaf)
        as_int32 = own.bools_as_int32 and array.dtype == bool
        operands[i] = varying(array.astype(jnp.int32) if as_int32 else array, own.axes)
        if len(leaves) == 1 and jax.typeof(operands[i]) != jax.typeof(leaf):
            _check_leaves(leaves, axis_name, each)  # lax may refuse one that does not vary
        shares = own.packs and own.sums.packs and is_small(operands[i])
        packs[operands[i].dtype if shares else i].append(i)
    for first, *others in packs.values():  # packed ones have no dims
        members = [operands[i] for i in (first, *others)]
        if jnp.issubdtype(members[0].dtype, jax.dtypes.prng_key):
            results[first] = _of_key(each[first], *members)
        else:
            results |= zip((first, *others), each[first](*members), strict=True)
    return [results[i] for i in range(len(leaves))]


def check_by_lax(axis_name: AxisName, collective: Collective, *avals: Any) -> None:
    """Raise what lax raises for operands of these types."""
    as_written: Any = axis_name  # a primitive is bound with a tuple of axes
    try:
        jax.make_jaxpr(replace(collective, axes=as_written).by_lax)(*avals)
    except AssertionError:  # an axis is not bound; the error has no message
        rank_count(axis_name)  # raises one with a message
        raise


def _check_leaves(
    leaves: Sequence[Any], axis_name: AxisName, collectives: Sequence[Collective]
) -> None:
    """Raise what lax would raise for these leaves; each type of leaf is checked once."""
    types = {
        (collective.dims, jax.typeof(leaf)): collective
        for leaf, collective in zip(leaves, collectives, strict=True)
        if not collective.folds_constants or isinstance(leaf, jax.core.Tracer)
    }
    for (_, aval), collective in types.items():
        check_by_lax(axis_name, collective, aval)


def is_small(x: Array) -> bool:
    """Whether an array may share messages.

    It must be small, hold plain numbers, and not be sharded over any other axis.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or not isinstance(x.size, int):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    alone = set(mesh.axis_names) == set(mesh.manual_axes)
    return alone and x.size * x.dtype.itemsize <= PACK_UP_TO


def is_for_lax(collective: Collective, leaf: Any) -> bool:
    """Whether only lax can do it, or does it at no cost; `ringcoll.lax` has the list."""
    if collective.is_only_lax:
        return True
    if collective.folds_constants and not isinstance(leaf, jax.core.Tracer):
        return True
    # lax cannot lower most of these. Made tiled, they would be lowered, and may end the process.
    if not collective.tiled and not isinstance(jax.typeof(leaf).size, int):
        return True
    mat = getattr(jax.typeof(leaf), "mat", None)
    if mat is not None and (mat.unreduced or mat.reduced):  # only lax handles these types
        return True
    if not collective.axes or any(isinstance(axis, int) for axis in collective.axes):
        return True
    if collective.groups is None or len(set(map(len, collective.groups))) <= 1:
        return False
    algorithm = getattr(collective, "algorithm", LAX)
    if not isinstance(algorithm, Table) and algorithm not in ("auto", LAX):
        raise ValueError(f"algorithm={algorithm!r} needs groups of one size; pass those, or 'lax'")
    return True


def _of_key(collective: Collective, key: Array) -> Array:
    """The collective for a random key: its numbers are sent in its place."""
    (numbers,) = collective(jax.random.key_data(key))
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(key))
