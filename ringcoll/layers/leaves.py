"""A batch computed leaf by leaf, so that sums over it do not depend on how many ranks share it."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax

from ringcoll.collectives.axes import AxisName
from ringcoll.collectives.front_door import Pytree
from ringcoll.collectives.leaf_by_leaf import leaf_by_leaf, sum_of_leaves
from ringcoll.collectives.tree_order import LEAVES
from ringcoll.layers.linear import check_order, rank_count
from ringcoll.layers.parameters import check_bound, refusal

T = TypeVar("T")


def by_leaves(
    function: Callable[[Pytree, Pytree], T],
    params: Pytree,
    batch: Pytree,
    axis_name: AxisName,
    *,
    leaves: int = LEAVES,
) -> T:
    """The sum of `function(params, leaf)` over this rank's leaves of the batch.

    `batch: [b/n, ...]`; a rank has `leaves`/n consecutive leaves of it. A rank adds its results,
    and the gradients of the parameters, by the lower levels of one tree. Pass the result to
    `ringcoll.psum` with `order="tree"`, and gather the parameters by `fsdp.gather` with
    `order="tree"`: these add the upper levels. Then the bits are the same for every n.

    Steps and bytes: nothing is sent. A rank computes one leaf after the other, and holds the
    gradients of several until they are added.

    Gradient: for the parameters the sum over the leaves, by the tree. JAX refuses forward mode
    (`jvp`).

    Raises:
        NameError: an axis is not bound.
        ValueError: the ranks do not divide the leaves, or a rank's leaves do not divide its batch.

    >>> def loss(w, x):
    ...     total = layers.by_leaves(lambda w, x: (w * x).sum(), w, x, "x", leaves=4)
    ...     return ringcoll.psum(total, "x", order="tree", leaves=4)
    >>> print(ranks(loss, (P(), P("x")), P())(jnp.ones(1), jnp.arange(8.0)))
    28.0
    """
    count = leaves_in("by_leaves", batch, axis_name, leaves)
    parts, structure = jax.tree.flatten(batch)
    split = [lax.split(x, [x.shape[0] // count] * count) for x in parts]
    of_leaves = [jax.tree.unflatten(structure, leaf) for leaf in zip(*split, strict=True)]
    return sum_of_leaves(leaf_by_leaf(function, params, of_leaves))


def leaves_in(function: str, batch: Pytree, axis_name: AxisName, leaves: int) -> int:
    """The number of leaves of a rank's batch. They must divide the rows of each array."""
    check_bound(function, axis_name)
    check_order(function, "tree", leaves, axis_name)
    count = leaves // rank_count(axis_name)
    for x in jax.tree.leaves(batch):
        if not x.ndim or x.shape[0] % count:
            words = f"a rank's batch is {x.shape}, and it has {count} leaves"
            raise refusal(
                ValueError, function, words, "make its first dimension a multiple of them"
            )
    return count


def compiled_apart(function: Callable[..., T], *operands: Pytree) -> T:
    """`function(*operands)`, compiled by itself on CPU; so is its gradient.

    If XLA:CPU fuses a formula with the operations around it, it may round and add differently. So
    if the bits of a program must be the same for any number of ranks, call your own sums and
    formulas of several operations by this: an activation between two products, the mean of the
    losses. Operands must have the same shapes for every number of ranks. `by_leaves` and the
    layers with `order="tree"` do all this for you.

    Steps and bytes: those of the function.

    Gradient: the function's. On TPU and GPU this only calls the function. On CPU JAX refuses
    forward mode (`jvp`).

    >>> print(jax.jit(lambda x: layers.compiled_apart(jnp.mean, x))(jnp.arange(4.0)))
    1.5
    """
    (result,) = leaf_by_leaf(lambda _, own: function(*own), None, [operands])
    return result
