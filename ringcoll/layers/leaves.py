"""A batch computed leaf by leaf, so that sums over it do not depend on how many ranks share it."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
from jax import lax

from ringcoll.collectives.front_door import LEAVES, AxisName, Pytree
from ringcoll.layers.linear import rank_count
from ringcoll.layers.parameters import refusal
from ringcoll.runtime.tree_sums import rounded, summed

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

    `batch: [b/n, ...]`, `leaves`/n of them, consecutive. A rank adds its results, and the gradients
    of the parameters, by the lower levels of one tree. Pass the result to `ringcoll.psum` with
    `order="tree"`, and gather the parameters by `fsdp.gather` with `order="tree"`: these add the
    upper levels, so that the bits are the same for every n.

    Steps and bytes: nothing is sent. A rank computes one leaf after the other, and holds the
    gradients of several until they are added.

    Gradient: for the parameters the sum over the leaves, by the tree.

    Raises:
        NameError: an axis is not bound.
        ValueError: the ranks do not divide the leaves, or a rank's batch does not divide by its
            leaves.

    >>> def loss(w, x):
    ...     total = layers.by_leaves(lambda w, x: (w * x).sum(), w, x, "x", leaves=4)
    ...     return ringcoll.psum(total, "x", order="tree", leaves=4)
    >>> print(ranks(loss, (P(), P("x")), P())(jnp.ones(1), jnp.arange(8.0)))
    28.0
    """
    ranks = rank_count(axis_name)
    if leaves < 1 or leaves & (leaves - 1) or leaves % ranks:
        words = f"leaves={leaves} on {ranks} ranks of {axis_name!r}"
        cure = "pass a power of two that the ranks divide"
        raise refusal(ValueError, "by_leaves", words, cure)
    count = leaves // ranks
    for x in jax.tree.leaves(batch):
        if not x.ndim or x.shape[0] % count:
            words = f"a rank's batch is {x.shape}, and it has {count} leaves"
            raise refusal(ValueError, "by_leaves", words, "let its first dimension divide by them")
    parts, structure = jax.tree.flatten(batch)
    split = [lax.split(x, [x.shape[0] // count] * count) for x in parts]
    of_leaves = [jax.tree.unflatten(structure, leaf) for leaf in zip(*split, strict=True)]
    copies = _copies(count, params)
    made = [function(own, leaf) for own, leaf in zip(copies, of_leaves, strict=True)]
    return jax.tree.map(lambda *ys: summed([rounded(y) for y in ys]), *made)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copies(count: int, params: Pytree) -> list[Pytree]:
    # Barriers: compilers would join the products of several leaves that share a factor.
    return [lax.optimization_barrier(params) for _ in range(count)]


_copies.defvjp(
    lambda count, params: (_copies(count, params), None),
    lambda count, _, cts: (jax.tree.map(lambda *of: summed([rounded(x) for x in of]), *cts),),
)
