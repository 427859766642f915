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
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ringcoll.choose.table import Algorithm, Table
from ringcoll.collectives import choice, wires
from ringcoll.collectives.axes import AxisName, check_groups, rank_count
from ringcoll.collectives.by_schedule import ScheduledCollective
from ringcoll.collectives.public import REFUSALS, integer
from ringcoll.collectives.tree_order import Tree, check_order
from ringcoll.runtime.primitive import Collective
from ringcoll.runtime.value_types import varying
from ringcoll.schedules.registry import LAX

Pytree = Any
#: Leaves of up to this many bytes share messages: up to this size, rounds take longer than the two
#: copies that sharing needs. Measured on CPU.
PACK_UP_TO = 1 << 18


def bind_leaves(
    x: Pytree,
    axis_name: AxisName,
    collective: Collective,
    dims: Sequence[tuple[str, Any]] = (),
    *,
    algorithm: Algorithm = "auto",
    accumulate_dtype: DTypeLike | None = None,
    order: Tree | None = None,
    wire: wires.WireLike | None = None,
    force_builtin: bool = False,
) -> Pytree:
    """The results for every leaf: by ringcoll, or by lax if only lax can do it.

    Nothing is sent before all leaves are known to be right.

    Args:
        x: a pytree.
        axis_name: as the user gave it.
        collective: the collective of this call, still without the options below.
        dims: the arguments that are dimensions, with their names; negative dimensions count from
            the last dimension of each leaf.
        algorithm, accumulate_dtype, order, wire: as the user gave them.
        force_builtin: whether only lax can do it, for any leaf.
    """
    leaves, structure = jax.tree.flatten(x)
    if collective.groups is not None:
        check_groups(collective.groups, rank_count(axis_name))
    types = list(map(jax.typeof, leaves))
    # lax refuses random keys over an axis of a mesh too, but only when it lowers the call.
    adds_keys = collective.adds_numbers and any(map(_is_key, types))
    if adds_keys and {*jax.sharding.get_abstract_mesh().manual_axes} & {*collective.axes}:
        raise TypeError("a random key is not a number; leave it out")
    collectives = [collective] * len(leaves)
    if dims:
        added = collective.adds_dim and not collective.tiled
        for i, t in enumerate(types):
            numbers = (integer(name, dim, t.ndim + added) for name, dim in dims)
            collectives[i] = replace(collective, dims=tuple(numbers))
    try:
        # A single leaf is bound as it was given. The bind itself traces lax's collective, but with
        # a tuple of axes. lax may refuse a list of axes, so a list is checked here.
        if len(leaves) > 1 or isinstance(axis_name, list):
            _check_leaves(leaves, axis_name, collectives)
        settings: dict[str, Any] = {}
        if accumulate_dtype is not None:
            settings["accumulate_dtype"] = wide_dtype(accumulate_dtype, *types)
        if order is not None:
            check_order(order, wire, collective.axes, collective.groups)
        for_lax = [force_builtin or is_for_lax(collective, leaf, algorithm) for leaf in leaves]
        if isinstance(collective, ScheduledCollective):
            by_tree = order is not None
            settings |= dict.fromkeys(collective.tree_fields, by_tree)
            if not all(for_lax):
                request = algorithm, collective.collective, collective.axes, collective.groups
                chosen = choice.resolve_algorithm(*request, by_tree, takes_table=True)
                settings["algorithm"] = chosen
        if wire is not None:
            settings["wire"] = wires.as_wire(wire)
            wires.check_operands(leaves, for_lax)
        results: dict[int, Any] = {}
        operands: dict[int, Array] = {}
        packs: dict[Hashable, list[int]] = defaultdict(list)  # the leaves that share messages
        for i, (leaf, own) in enumerate(zip(leaves, collectives, strict=True)):
            if for_lax[i]:
                results[i] = _by_lax(leaf, axis_name, own, accumulate_dtype)
                continue
            array = jnp.asarray(leaf)
            as_int32 = collective.bools_as_int32 and array.dtype == bool
            operands[i] = varying(array.astype(jnp.int32) if as_int32 else array, own.axes)
            if len(leaves) == 1 and jax.typeof(operands[i]) != types[i]:
                # lax may refuse an operand that does not vary.
                _check_leaves(leaves, axis_name, collectives)
            # With a wire, leaves do not share messages: in one message, they would share scales.
            shares = collective.packs and wire is None and is_small(operands[i])
            packs[operands[i].dtype if shares else i].append(i)
        for members in packs.values():
            first = members[0]
            bound = replace(collectives[first], **settings)  # packed ones have no dims
            if _is_key(operands[first]):
                results[first] = _of_key(bound, operands[first])
            else:
                results |= zip(members, bound(*(operands[i] for i in members)), strict=True)
    except (*REFUSALS, AssertionError):  # if lax refuses the call too, raise lax's error
        _check_leaves(leaves, axis_name, collectives)
        raise
    return jax.tree.unflatten(structure, [results[i] for i in range(len(leaves))])


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


def wide_dtype(accumulate_dtype: Any, *types: Any) -> np.dtype:
    """The dtype of partial sums.

    Refused if it cannot hold every value of these types.
    """
    try:
        wide = jnp.dtype(accumulate_dtype)
    except TypeError as error:
        raise TypeError(
            f"accumulate_dtype={accumulate_dtype!r} is not a dtype; pass one such as jnp.float32"
        ) from error
    for dtype in (t.dtype for t in types):
        if jnp.issubdtype(dtype, jnp.inexact) and not _holds(wide, dtype):
            raise ValueError(
                f"accumulate_dtype={wide.name} cannot hold every {dtype.name}; pass a dtype with "
                "as many digits and exponents"
            )
    return wide


def _holds(wide: Any, dtype: Any) -> bool:
    """Whether every value of `dtype`, floating or complex, is a value of `wide`."""
    if not jnp.issubdtype(wide, jnp.inexact):
        return False
    if jnp.issubdtype(wide, jnp.complexfloating) != jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    w, d = jnp.finfo(wide), jnp.finfo(dtype)
    return w.nmant >= d.nmant and w.maxexp >= d.maxexp and w.minexp <= d.minexp


def is_small(x: Array) -> bool:
    """Whether an array may share messages.

    It must be small, hold plain numbers, and not be sharded over any other axis.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or not isinstance(x.size, int):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    alone = set(mesh.axis_names) == set(mesh.manual_axes)
    return alone and x.size * x.dtype.itemsize <= PACK_UP_TO


def is_for_lax(collective: Collective, leaf: Any, algorithm: Algorithm) -> bool:
    """Whether only lax can do it, or does it at no cost; `ringcoll.lax` has the list."""
    if collective.folds_constants and not isinstance(leaf, jax.core.Tracer):
        return True
    mat = getattr(jax.typeof(leaf), "mat", None)
    if mat is not None and (mat.unreduced or mat.reduced):  # only lax handles these types
        return True
    if not collective.axes or any(isinstance(axis, int) for axis in collective.axes):
        return True
    if collective.groups is None or len(set(map(len, collective.groups))) <= 1:
        return False
    if not isinstance(algorithm, Table) and algorithm not in ("auto", LAX):
        raise ValueError(f"algorithm={algorithm!r} needs groups of one size; pass those, or 'lax'")
    return True


def _by_lax(leaf: Any, axis_name: Any, collective: Collective, accumulate_dtype: Any) -> Any:
    by_lax = replace(collective, axes=axis_name).by_lax
    dtype = jax.typeof(leaf).dtype
    if accumulate_dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return by_lax(leaf)
    return by_lax(jnp.astype(leaf, accumulate_dtype)).astype(dtype)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _of_key(collective: Collective, key: Array) -> Array:
    """The collective for a random key: its numbers are sent in its place."""
    (numbers,) = collective(jax.random.key_data(key))
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(key))
