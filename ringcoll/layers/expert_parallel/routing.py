"""Routing: which experts each token goes to, with which weights, and how unevenly."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringcoll.collectives.all_reduce import psum
from ringcoll.collectives.axes import AxisName, rank_count
from ringcoll.layers.expert_parallel.experts import count_each


class Routing(NamedTuple):
    """The experts of each token and their weights, best first, `[t, k]` each; and the loss."""

    ids: Array
    weights: Array
    balance_loss: Array


def route(x: Array, router: Array, axis_name: AxisName, top_k: int, normalize: bool) -> Routing:
    """The `top_k` experts of each token of this rank: `[t, d], [d, e] -> Routing`.

    It is computed in float32 or wider. The load-balancing loss is over all ranks of the axis, and
    is the same on each.
    """
    experts, tokens = router.shape[1], x.shape[0] * rank_count(axis_name)
    wide = jnp.promote_types(jnp.promote_types(x.dtype, router.dtype), jnp.float32)
    logits = jnp.matmul(x, router, preferred_element_type=wide)
    probabilities = jax.nn.softmax(logits, axis=-1)
    weights, ids = lax.top_k(probabilities, top_k)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    counts = count_each(ids.reshape(-1), experts).astype(wide)
    counts, likely = psum(jnp.stack([counts, probabilities.sum(0)]), axis_name)
    loss = experts * jnp.dot(counts, likely) / float(max(tokens * tokens * top_k, 1))
    return Routing(ids, weights, loss)
