"""The arithmetic of a softmax that is computed tile by tile."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Softmax(NamedTuple):
    """An unfinished softmax, by row, head and query: largest score, sum, weighted sum of values."""

    greatest: Array
    total: Array
    values: Array


def wide(dtype: Any) -> Any:
    """The dtype of sums: float32, or a wider one."""
    return jnp.promote_types(dtype, jnp.float32)


def add_at(whole: Array, x: Array, at: Array, dim: int) -> Array:
    """`whole` with x added to its slice at this place."""
    old = lax.dynamic_slice_in_dim(whole, at, x.shape[dim], dim)
    return lax.dynamic_update_slice_in_dim(whole, old + x, at, dim)


def add_scores(before: Softmax, scores: Array, v: Array, seen: Array | None) -> Softmax:
    """A softmax with the scores of a tile added to it."""
    if seen is not None:
        scores = jnp.where(seen, scores, lowest(scores.dtype))
    greatest = jnp.maximum(before.greatest, scores.max(-1))
    p = jnp.exp(scores - greatest[..., None])
    if seen is not None:  # otherwise a query that has seen nothing yet would see everything
        p = jnp.where(seen, p, 0)
    rescale = jnp.exp(before.greatest - greatest)
    values = jnp.einsum("bgqk,bkd->bgqd", p.astype(v.dtype), v, preferred_element_type=scores.dtype)
    return Softmax(
        greatest, rescale * before.total + p.sum(-1), rescale[..., None] * before.values + values
    )


def merge(a: Softmax, b: Softmax) -> Softmax:
    """The softmax of the keys of both."""
    greatest = jnp.maximum(a.greatest, b.greatest)
    of_a, of_b = jnp.exp(a.greatest - greatest), jnp.exp(b.greatest - greatest)
    values = of_a[..., None] * a.values + of_b[..., None] * b.values
    return Softmax(greatest, of_a * a.total + of_b * b.total, values)


def lowest(dtype: Any) -> float:
    """A number below every score. It is not -inf, because -inf minus -inf is not a number."""
    return float(jnp.finfo(dtype).min) / 2
