"""Sums by one balanced binary tree, with the same bits wherever its levels are computed.

XLA:CPU changes roundings in two ways. It rounds a * b + c only once if both operations are in one
kernel. It leaves out the rounding of a narrow float that it widens again. Whether it does so
depends on what else a rank computes. It does neither to the result of `rounded`.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

from ringcoll.runtime.value_types import device_kind

_CONTRACTS = ("cpu", None)  # None: it may be compiled for a CPU


def rounded(x: Array, platform: str | None = None) -> Array:
    """x, rounded to its dtype before anything else is computed from it.

    Args:
        x: any array; integers are returned unchanged.
        platform: the platform that it is compiled for; None for that of the mesh.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if x.dtype == jnp.bfloat16:  # round by an operation that no compiler leaves out
        return lax.reduce_precision(x.astype(jnp.float32), 8, 7).astype(x.dtype)
    if (platform or device_kind()) not in _CONTRACTS:
        return x
    # A selection between a product and an addition keeps LLVM from contracting them. A barrier does
    # so too, but not in jax 0.10. A minimum with infinity does not: LLVM removes it.
    return lax.select(jnp.isnan(x), jnp.full_like(x, jnp.nan), x)


def added(a: Array, b: Array) -> Array:
    """a + b, rounded to their dtype."""
    if a.dtype == jnp.bfloat16:
        wide = lax.add(a.astype(jnp.float32), b.astype(jnp.float32))
        return lax.reduce_precision(wide, 8, 7).astype(a.dtype)
    return lax.add(a, b)


def summed(leaves: Sequence[Array], add: Callable[[Array, Array], Array] = added) -> Array:
    """The sum of consecutive leaves, neighbours first; their number is a power of two."""
    while len(leaves) > 1:
        leaves = [add(a, b) for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def summed_along(x: Array, dim: int) -> Array:
    """The same sum of the slices along a dimension; the result does not have the dimension."""
    return summed([lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim])])
