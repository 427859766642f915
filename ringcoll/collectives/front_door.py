"""From a public call to primitives: check the arguments, and bind a primitive for every leaf.

When a primitive is bound, lax gives the type of its result, before anything is sent. An error of
lax is raised again with the same exception type and lax's own words. Calls that only lax can handle
go to lax (see `_is_for_lax`). Small leaves of a pytree are bound together, so that they
share messages.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ringcoll.choose.table import LAX, Algorithm, Table
from ringcoll.collectives import choice, wires
from ringcoll.collectives.axes import check_groups
from ringcoll.collectives.by_schedule import ScheduledCollective
from ringcoll.collectives.call import Call
from ringcoll.collectives.refusals import REFUSALS
from ringcoll.collectives.tree_order import Tree, check_order
from ringcoll.runtime.primitive import Collective
from ringcoll.runtime.value_types import typed_alike, varying

Pytree = Any
_algorithm_of = partial(choice.resolve_algorithm, takes_table=True)
#: The functions that need no communication for constants.
_FOLDS_CONSTANTS = ("psum", "pmean")
#: Leaves of up to this many bytes share messages: up to this size, rounds take longer than the two
#: copies that sharing needs. Measured on CPU.
PACK_UP_TO = 1 << 18
#: The functions for which lax refuses random keys over an axis of a mesh, when it lowers them.
_REFUSES_KEYS = ("psum", "pmax", "pmin", "psum_scatter")


def bind_leaves(
    call: Call,
    x: Pytree,
    collective: Collective,
    dims: Sequence[str] = (),
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
        call: the call as the user wrote it.
        x: a pytree.
        collective: the collective of this call, still without the options below.
        dims: the names of the arguments that are dimensions; negative dimensions count from the
            last dimension of each leaf.
        algorithm, accumulate_dtype, order, wire: as the user gave them.
        force_builtin: whether only lax can do it, for any leaf.
    """
    leaves, structure = jax.tree.flatten(x)
    if call.grouped is not None:
        call.attempt(check_groups, call.grouped, call.attempt(call.rank_count))
    types = [call.attempt(jax.typeof, leaf) for leaf in leaves]
    adds_keys = call.name in _REFUSES_KEYS and any(map(_is_key, types))
    if adds_keys and {*jax.sharding.get_abstract_mesh().manual_axes} & {*call.axes}:
        raise call.refusal(TypeError, "a random key is not a number", "leave it out")
    collectives = [collective] * len(leaves)
    if dims:
        added = collective.adds_dim and not collective.tiled
        of_leaves = [[call.integer(name, t.ndim + added) for name in dims] for t in types]
        collectives = [replace(collective, dims=tuple(of_leaf)) for of_leaf in of_leaves]
    try:
        # A single leaf is bound as it was given. The bind itself traces lax's collective, but with
        # a tuple of axes. lax may refuse a list of axes, so a list is checked here.
        if len(leaves) > 1 or isinstance(call.axis_name, list):
            _check_leaves(call, leaves, collectives)
        settings: dict[str, Any] = {}
        if accumulate_dtype is not None:
            settings["accumulate_dtype"] = wide_dtype(call, accumulate_dtype, *types)
        if order is not None:
            check_order(call, order, wire)
        for_lax = [force_builtin or _is_for_lax(call, leaf, algorithm) for leaf in leaves]
        if isinstance(collective, ScheduledCollective):
            by_tree = order is not None
            settings |= dict.fromkeys(collective.tree_fields, by_tree)
            if not all(for_lax):
                request = algorithm, collective.collective, call.axes, call.grouped, by_tree
                settings["algorithm"] = call.attempt(_algorithm_of, *request)
        if wire is not None:
            settings["wire"] = call.attempt(wires.as_wire, wire)
            call.attempt(wires.check_operands, leaves, for_lax)
        results: dict[int, Any] = {}
        operands: dict[int, Array] = {}
        packs: dict[Hashable, list[int]] = defaultdict(list)  # the leaves that share messages
        for i, (leaf, own) in enumerate(zip(leaves, collectives, strict=True)):
            if for_lax[i]:
                results[i] = _by_lax(call, leaf, own, accumulate_dtype)
                continue
            array = jnp.asarray(leaf)
            as_int32 = collective.bools_as_int32 and array.dtype == bool
            operands[i] = varying(array.astype(jnp.int32) if as_int32 else array, call.axes)
            if len(leaves) == 1 and jax.typeof(operands[i]) != types[i]:
                # lax may refuse an operand that does not vary.
                _check_leaves(call, leaves, collectives)
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
        _check_leaves(call, leaves, collectives)
        raise
    return jax.tree.unflatten(structure, [results[i] for i in range(len(leaves))])


def bind_operands(
    call: Call,
    xs: Sequence[Any],
    collective: ScheduledCollective,
    *,
    algorithm: Algorithm,
    wire: wires.WireLike | None,
) -> Array:
    """The result of a collective whose operands have different roles.

    lax's types are checked before anything is sent. If only lax can do the call, lax does it.
    """
    if call.grouped is not None:
        call.attempt(check_groups, call.grouped, call.attempt(call.rank_count))
    if any(_is_for_lax(call, x, algorithm) for x in xs):
        return call.attempt(collective.by_lax, *xs)
    request = algorithm, collective.collective, call.axes, call.grouped
    collective = replace(collective, algorithm=call.attempt(_algorithm_of, *request))
    if wire is not None:
        call.attempt(wires.check_operands, xs[:1], [False])
        collective = replace(collective, wire=call.attempt(wires.as_wire, wire))
    return call.attempt(collective, *typed_alike(list(map(jnp.asarray, xs)), call.axes))[0]


def check_by_lax(call: Call, collective: Collective, *avals: Any) -> None:
    """Refuse operands of these types if lax refuses them."""
    as_written: Any = call.axis_name  # a primitive is bound with a tuple of axes
    call.attempt(_let_lax_type, replace(collective, axes=as_written), call.axes, *avals)


def _check_leaves(call: Call, leaves: Sequence[Any], collectives: Sequence[Collective]) -> None:
    """Raise what lax would raise for these leaves; each type of leaf is checked once."""
    types = {
        (collective.dims, jax.typeof(leaf)): collective
        for leaf, collective in zip(leaves, collectives, strict=True)
        if call.name not in _FOLDS_CONSTANTS or isinstance(leaf, jax.core.Tracer)
    }
    for (_, aval), collective in types.items():
        check_by_lax(call, collective, aval)


def _let_lax_type(collective: Collective, axes: Sequence[Hashable], *avals: Any) -> None:
    try:
        jax.make_jaxpr(collective.by_lax)(*avals)
    except AssertionError:  # an axis is not bound; the error has no message
        for axis in axes:
            lax.axis_size(axis)  # raises one with a message
        raise


def wide_dtype(call: Call, accumulate_dtype: Any, *types: Any) -> np.dtype:
    """The dtype of partial sums.

    Refused if it cannot hold every value of these types.
    """
    try:
        wide = jnp.dtype(accumulate_dtype)
    except TypeError as error:
        words = f"accumulate_dtype={accumulate_dtype!r} is not a dtype"
        raise call.refusal(TypeError, words, "pass one such as jnp.float32") from error
    for dtype in (t.dtype for t in types):
        if jnp.issubdtype(dtype, jnp.inexact) and not _holds(wide, dtype):
            words = f"accumulate_dtype={wide.name} cannot hold every {dtype.name}"
            raise call.refusal(ValueError, words, "pass a dtype with as many digits and exponents")
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


def _is_for_lax(call: Call, leaf: Any, algorithm: Algorithm) -> bool:
    """Whether only lax can do it, or does it at no cost; `ringcoll.lax` has the list."""
    if call.name in _FOLDS_CONSTANTS and not isinstance(leaf, jax.core.Tracer):
        return True
    mat = getattr(jax.typeof(leaf), "mat", None)
    if mat is not None and (mat.unreduced or mat.reduced):  # only lax handles these types
        return True
    if not call.axes or any(isinstance(axis, int) for axis in call.axes):
        return True
    if call.grouped is None or len(set(map(len, call.grouped))) <= 1:
        return False
    if not isinstance(algorithm, Table) and algorithm not in ("auto", LAX):
        words = f"algorithm={algorithm!r} needs axis_index_groups of one size"
        raise call.refusal(ValueError, words, "pass algorithm='lax', or groups of one size")
    return True


def _by_lax(call: Call, leaf: Any, collective: Collective, accumulate_dtype: Any) -> Any:
    as_written: Any = call.axis_name
    by_lax = replace(collective, axes=as_written).by_lax
    dtype = jax.typeof(leaf).dtype
    if accumulate_dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return call.attempt(by_lax, leaf)
    return call.attempt(by_lax, jnp.astype(leaf, accumulate_dtype)).astype(dtype)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _of_key(collective: Collective, key: Array) -> Array:
    """The collective for a random key: its numbers are sent in its place."""
    (numbers,) = collective(jax.random.key_data(key))
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(key))
