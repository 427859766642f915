"""One tile of attention, forward and backward: the scores of some queries and keys. No axes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ringcoll.layers.context_parallel.tiles import Mask

#: (q, k, v, causal=) or (q, k, v, mask=) -> (out, lse), for `[b, s, heads, d]` and log-sum-exps
#: `[b, s, heads]`.
AttentionKernel = Callable[..., tuple[Array, Array]]


class BlockMask(NamedTuple):
    """Which keys of a block a kernel's queries see.

    Attributes:
        causal, window: as for `attention`; they compare positions.
        positions: the positions of the queries and of the keys, `[s]` each; None if only segments
            decide.
        segments: the segments of the queries and of the keys, `[b, s]` each; None if none.
    """

    causal: bool
    window: int | None
    positions: tuple[Array, Array] | None
    segments: tuple[Array, Array] | None

    def visible(self) -> Array:
        """Whether each query sees each key: `[b or 1, queries, keys]`."""
        query, key = self.positions or (jnp.zeros(1, jnp.int32),) * 2
        seen = Mask(self.causal, self.window).visible(query[:, None], key[None, :])[None]
        if self.segments is None:
            return seen
        query, key = self.segments
        return seen & (query[:, :, None] == key[:, None, :])


class Softmax(NamedTuple):
    """An unfinished softmax, by row, head and query: largest score, sum, weighted sum of values."""

    greatest: Array
    total: Array
    values: Array


def wide(dtype: Any) -> Any:
    """The dtype of sums: float32, or a wider one."""
    return jnp.promote_types(dtype, jnp.float32)


def lowest(dtype: Any) -> float:
    """A number below every score. It is not -inf, because -inf minus -inf is not a number."""
    return float(jnp.finfo(dtype).min) / 2


def scores_of(q: Array, k: Array, scale: float) -> Array:
    """The scaled scores of a tile, in the dtype of sums."""
    exact = wide(q.dtype)
    return scale * jnp.einsum("bgqd,bkd->bgqk", q, k, preferred_element_type=exact)


def add_scores(before: Softmax, scores: Array, v: Array, seen: Array | None) -> Softmax:
    """A softmax with the scores of a tile added to it; `seen` is None if all keys are seen."""
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


def by_kernel(
    kernel: AttentionKernel, q: Array, k: Array, v: Array, masking: dict[str, Any]
) -> Softmax:
    """The softmax of one part by the caller's kernel; `masking` has its `causal` or `mask`."""
    queries = q.transpose(0, 2, 1, 3)
    out, lse = kernel(queries, k[:, :, None], v[:, :, None], **masking)
    exact = wide(q.dtype)
    lse = lse.astype(exact).transpose(0, 2, 1)
    values = out.astype(exact).transpose(0, 2, 1, 3)
    if "mask" not in masking:
        return Softmax(lse, jnp.ones_like(lse), values)
    # In a masked block, a query may see no key. Written so that a NaN stays a NaN.
    sees = ~(lse <= lowest(exact))
    values = jnp.where(sees[..., None], values, 0)
    return Softmax(jnp.where(sees, lse, lowest(exact)), sees.astype(exact), values)


def gradients(
    by_query: list[Array], kv: tuple[Array, Array], seen: Array | None, scale: float
) -> tuple[Array, Array]:
    """The gradients of a tile's queries, and of its keys and values, end to end.

    `by_query` has the queries, the cotangent of the result, its log-sum-exps, and the sum over each
    row of result times cotangent.
    """
    (q, ct, lse, inner), (k, v) = by_query, kv
    exact = inner.dtype
    p = jnp.exp(scores_of(q, k, scale) - lse[..., None])
    p = p if seen is None else jnp.where(seen, p, 0)
    dp = jnp.einsum("bgqd,bkd->bgqk", ct, v, preferred_element_type=exact)
    ds = (scale * p * (dp - inner[..., None])).astype(q.dtype)
    p = p.astype(q.dtype)
    of_q = jnp.einsum("bgqk,bkd->bgqd", ds, k, preferred_element_type=exact)
    of_k = jnp.einsum("bgqk,bgqd->bkd", ds, q, preferred_element_type=exact)
    of_v = jnp.einsum("bgqk,bgqd->bkd", p, ct, preferred_element_type=exact)
    return of_q, jnp.concatenate([of_k, of_v], -1)
