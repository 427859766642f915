"""Drop-ins that leave the same on every rank: psum, pmean, pmax, pmin, pbroadcast.

What all have in common is said in `ringcoll.collectives`. Below, n is the number of
ranks and s the bytes of x.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringcoll.bodies import AllReduce, Pbroadcast, Pmax, Pmin, Psum
from ringcoll.calls import AxisName, Call, Groups, Pytree
from ringcoll.table import Algorithm


def psum(
    x: Pytree,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
    accumulate_dtype: Any = None,
) -> Pytree:
    """The sum of all ranks' x, on every rank, in the same bits.

    `x: [a, b] -> [a, b]`; replicated under `check_vma=True`. Booleans are summed as
    int32. A size that does not divide by n is padded inside and cut again; small leaves
    of a pytree travel together, so that the gradients of a model are one ring.

    Ring: a reduce-scatter and an all-gather, 2(n-1) rounds of s/n bytes. "exchange" and
    "one_shot" send whole vectors in ceil(log2 n) rounds: the best for few bytes. With a
    wider `accumulate_dtype` the partial sums travel wide, the finished ones do not.

    Gradient: the cotangent itself under `check_vma=True`, where it is known to be the
    same on all ranks; else its psum.

    Raises:
        NotImplementedError: `axis_index_groups` under `check_vma=True`, as in lax.

    Source: Patarasuk and Yuan (2009); Thakur, Rabenseifner and Gropp, "Optimization of
    collective communication operations in MPICH", IJHPCA 19 (2005).
    """
    call = Call("psum", "psum", axis_name, axis_index_groups, algorithm, accumulate_dtype)
    return call.each(
        x,
        lambda x: lax.psum(x, axis_name, axis_index_groups=axis_index_groups),
        lambda *xs: _sum(call, *xs),
        joins=True,
    )


def pmean(
    x: Pytree,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
    accumulate_dtype: Any = None,
) -> Pytree:
    """The mean of all ranks' x: a `psum`, divided by n.

    `x: [a, b] -> [a, b]`. Integers are divided truly, as by lax. With a wider
    `accumulate_dtype` all of it travels wide, and is rounded once, after the division.

    Steps and bytes, gradient, raises, source: as `psum`.
    """
    call = Call("pmean", "psum", axis_name, axis_index_groups, algorithm, accumulate_dtype)

    def by_hand(*xs: Array) -> list[Array]:
        n = lax.psum(1, axis_name, axis_index_groups=axis_index_groups)
        if accumulate_dtype is None or not jnp.issubdtype(xs[0].dtype, jnp.inexact):
            return [total / n for total in _sum(call, *xs)]
        totals = _sum(call, *(x.astype(accumulate_dtype) for x in xs))
        return [(total / n).astype(xs[0].dtype) for total in totals]  # rounded once

    return call.each(
        x,
        lambda x: lax.pmean(x, axis_name, axis_index_groups=axis_index_groups),
        by_hand,
        joins=True,
    )


def _sum(call: Call, *xs: Array) -> list[Array]:
    """By hand; booleans as int32, like lax."""
    return Psum(**call.params).joint(*(x.astype(jnp.int32) if x.dtype == bool else x for x in xs))


def pmax(
    x: Pytree,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
) -> Pytree:
    """The greatest of all ranks' x, element by element, on every rank.

    `x: [a, b] -> [a, b]`. Steps, bytes and source: as `psum`.

    Gradient: none, as in lax.
    """
    return _extremum("pmax", lax.pmax, Pmax, x, axis_name, axis_index_groups, algorithm)


def pmin(
    x: Pytree,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
) -> Pytree:
    """The least of all ranks' x, element by element, on every rank.

    `x: [a, b] -> [a, b]`. Steps, bytes and source: as `psum`.

    Gradient: none, as in lax.
    """
    return _extremum("pmin", lax.pmin, Pmin, x, axis_name, axis_index_groups, algorithm)


def _extremum(
    name: str,
    of_lax: Callable[..., Any],
    by_hand: type[AllReduce],
    x: Pytree,
    axis_name: AxisName,
    groups: Groups,
    algorithm: Algorithm,
) -> Pytree:
    call = Call(name, name, axis_name, groups, algorithm)
    return call.each(
        x,
        lambda x: of_lax(x, axis_name, axis_index_groups=groups),
        lambda *xs: by_hand(**call.params).joint(*xs),
        joins=True,
    )


def pbroadcast(
    x: Pytree, axis_name: AxisName, source: Any, *, algorithm: Algorithm = "auto"
) -> Pytree:
    """The source rank's x on every rank, bit by bit.

    `x: [a, b] -> [a, b]`. On every platform, where lax's runs on GPU only. A `source`
    that is traced is left to lax.

    Steps and bytes: as `psum`, of which it is the case that all but one contribute zeros:
    reduce-scatter and all-gather move what van de Geijn's scatter and all-gather would.

    Gradient: the sum of the cotangents, at the source.

    Raises:
        ValueError: x does not vary over the axis (under `check_vma=True`), as in lax; or
            there is no such source.

    Source: Chan et al. (2007).
    """
    if not isinstance(source, jax.core.Tracer):
        source = operator.index(source)
    call = Call(
        "pbroadcast",
        "pbroadcast",
        axis_name,
        algorithm=algorithm,
        said={"source": source},
        lax_only=not isinstance(source, int),
    )

    def by_lax(x: Any) -> Array:
        if isinstance(source, int) and not 0 <= source < lax.axis_size(call.axes):
            raise ValueError(f"source={source} is not a rank of the axis")
        return lax.pbroadcast(x, axis_name, source)

    def by_hand(*xs: Array) -> list[Array]:
        return Pbroadcast(axes=call.axes, algorithm=algorithm, source=source).joint(*xs)

    return call.each(x, by_lax, by_hand, joins=True)
