"""Sums by one balanced binary tree, with the same bits wherever its levels are computed.

XLA:CPU changes roundings in two ways. It contracts a * b + c, and rounds once, if both are in one
kernel. It leaves out the rounding of a narrow float that it widens again. Whether it does so
depends on what else a rank computes. It does neither to a value of `rounded`.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

from ringcoll.runtime.value_types import device_kind

_CONTRACTS = ("cpu", None)  # None: it may be compiled for a CPU


def rounded(x: Array, platform: str | None = None) -> Array:
    """x, rounded to its dtype before anything is done with it.

    Args:
        x: any array; integers are returned as they are.
        platform: where it is compiled; None for that of the mesh.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if x.dtype == jnp.bfloat16:  # by an operation that no compiler leaves out
        return lax.reduce_precision(x.astype(jnp.float32), 8, 7).astype(x.dtype)
    if (platform or device_kind()) not in _CONTRACTS:
        return x
    # Between a product and an addition a selection keeps LLVM from contracting them. A barrier does
    # too, but not in jax 0.10; and LLVM sees through a minimum with infinity.
    return jnp.where(jnp.isnan(x), jnp.full((), jnp.nan, x.dtype), x)


def added(a: Array, b: Array) -> Array:
    """a + b, rounded to their dtype."""
    if a.dtype == jnp.bfloat16:
        wide = lax.add(a.astype(jnp.float32), b.astype(jnp.float32))
        return lax.reduce_precision(wide, 8, 7).astype(a.dtype)
    return lax.add(a, b)


def summed(leaves: Sequence[Array], add: Callable[[Array, Array], Array] = added) -> Array:
    """The sum of consecutive leaves, a power of two of them, neighbours first."""
    while len(leaves) > 1:
        leaves = [add(a, b) for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def summed_along(x: Array, dim: int) -> Array:
    """The same of the slices along a dimension, which is left out."""
    return summed([lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim])])
