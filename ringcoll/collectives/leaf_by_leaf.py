"""Compute a function leaf by leaf, so that bits do not depend on how many leaves a rank has."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringcoll.collectives.front_door import Pytree
from ringcoll.runtime.apart import compiled_apart
from ringcoll.runtime.tree_sums import rounded, summed

T = TypeVar("T")


def leaf_by_leaf(
    function: Callable[[Pytree, Any], T], shared: Pytree, of_leaves: Sequence[Any]
) -> list[T]:
    """`function(shared, leaf)` for every leaf, each compiled by itself on CPU.

    Gradient: the tree adds the gradients of shared arrays and of arrays that the function closes
    over.

    Args:
        function: a function of pytrees.
        shared: a pytree that all leaves need.
        of_leaves: the leaves, all of one type; their number is a power of two.
    """
    explicit, captured = closed(function, shared, of_leaves[0])
    apart = compiled_apart(explicit)
    copies = _copies(len(of_leaves), (shared, captured))
    return [apart(own, leaf, kept) for (own, kept), leaf in zip(copies, of_leaves, strict=True)]


def slices_by_leaf(
    function: Callable[[Pytree, Any], T], shared: Pytree, parts: Pytree, dim: int, count: int
) -> T:
    """`leaf_by_leaf` for `count` slices of arrays along a dimension; results are joined along it.

    Args:
        function, shared: see `leaf_by_leaf`.
        parts: a pytree of arrays.
        dim: 0 or a negative number, because arrays may differ in their number of dimensions.
        count: the number of slices.
    """
    arrays, structure = jax.tree.flatten(parts)
    cut = [lax.split(x, [x.shape[dim] // count] * count, axis=dim % x.ndim) for x in arrays]
    of_leaves = [jax.tree.unflatten(structure, leaf) for leaf in zip(*cut, strict=True)]
    results = leaf_by_leaf(function, shared, of_leaves)
    return jax.tree.map(lambda *ys: lax.concatenate(ys, dim % ys[0].ndim), *results)


def sum_of_leaves(leaves: Sequence[Pytree]) -> Pytree:
    """The sum of consecutive leaves by the tree; their number is a power of two."""
    return jax.tree.map(lambda *of: summed([rounded(x) for x in of]), *leaves)


def closed(function: Callable[..., T], *operands: Pytree) -> tuple[Callable[..., T], list[Array]]:
    """A function of (*operands, captured) that equals `function`, and the list `captured`.

    `captured` has all the arrays that `function` closes over. A `custom_vjp` must not close over
    traced values, and gives no gradient to arrays that it closes over; a user's function may close
    over arrays, and may need their gradients.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*operands)
    structure = jax.tree.structure(shapes)

    def explicit(*operands: Pytree) -> T:
        *own, captured = operands
        leaves = jax.core.eval_jaxpr(program.jaxpr, captured, *jax.tree.leaves(own))
        return jax.tree.unflatten(structure, leaves)

    return explicit, [jnp.asarray(leaf) for leaf in program.consts]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copies(count: int, shared: Pytree) -> list[Pytree]:
    # Without barriers, compilers would join the products of several leaves that share a factor.
    # Each array has its own, because in older versions of JAX a barrier gives all its results one
    # type.
    return [jax.tree.map(lax.optimization_barrier, shared) for _ in range(count)]


def _copies_backward(count: int, _: None, cts: list[Pytree]) -> tuple[Pytree]:
    def added(*of: Any) -> Any:
        return None if of[0].dtype == jax.dtypes.float0 else sum_of_leaves(of)

    return (jax.tree.map(added, *cts),)


_copies.defvjp(lambda count, shared: (_copies(count, shared), None), _copies_backward)
