"""The layers on one device with whole weights, written as in their papers, in jax.numpy."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Weights(NamedTuple):
    """Parameters that are attributes, as in a module of Equinox."""

    up: np.ndarray
    down: np.ndarray


def linear(params, x):
    """x @ kernel + bias. `params` may be the kernel itself, which may have more dimensions."""
    if hasattr(params, "shape"):
        params = {"kernel": params}
    y = jnp.tensordot(x, params["kernel"], 1)
    return y + params["bias"] if "bias" in params else y


def linear_of_heads(params, x):
    """The same for a kernel whose dimensions are all contracted but the last."""
    kernel = params if hasattr(params, "shape") else params["kernel"]
    y = jnp.tensordot(x, kernel, kernel.ndim - 1)
    return y if hasattr(params, "shape") else y + params["bias"]


def mlp(params, x, activation=jax.nn.gelu):
    return linear(params["down"], activation(linear(params["up"], x)))


def gated_mlp(params, x, activation=jax.nn.silu):
    gate = activation(linear(params["gate"], x))
    return linear(params["down"], gate * linear(params["up"], x))


def turned(x, positions, base=10000.0):
    """Rotary embedding: each pair (i, i + k/2) is a complex number, rotated by its position."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    angle = jnp.asarray(positions)[..., None] * base ** (-jnp.arange(half) / half)
    pairs = pairs * jnp.exp(1j * angle)[..., None, :]
    return jnp.concatenate([pairs.real, pairs.imag], -1)


def attend(query, key, value, causal=True):
    """Attention in which each query head uses the keys and values of its group."""
    times = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, times, axis=-2) for x in (key, value))
    scores = jnp.einsum("...qhk,...shk->...hqs", query, key) / query.shape[-1] ** 0.5
    if causal:
        place = jnp.arange(query.shape[-3])
        scores = jnp.where(place[:, None] >= place[None, :], scores, -jnp.inf)
    return jnp.einsum("...hqs,...shk->...qhk", jax.nn.softmax(scores), value)


def attention(params, x, causal=True, positions=None, base=10000.0):
    query, key, value = (linear(params[name], x) for name in ("query", "key", "value"))
    if base is not None:
        where = jnp.arange(x.shape[-2]) if positions is None else positions
        query, key = turned(query, where, base), turned(key, where, base)
    return linear_of_heads(params["out"], attend(query, key, value, causal))


def embed(params, tokens):
    return params["embedding"][tokens]


def unembed(params, x):
    return x @ params["unembedding"]


def cross_entropy(logits, labels):
    logs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logs, labels[..., None], -1)[..., 0]


def rms_norm(params, x, epsilon=1e-6):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon) * params["scale"]


def layer_norm(params, x, epsilon=1e-6):
    centred = x - x.mean(-1, keepdims=True)
    y = centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + epsilon) * params["scale"]
    return y + params["bias"] if "bias" in params else y


def moe(params, top_k, normalize=True, activation=jax.nn.silu):
    """Run every expert on every token, and sum over a token's experts; also the balance loss."""
    x, router, experts = params["x"], params["router"], params["experts"]
    likely = jax.nn.softmax(x @ router)
    order = jnp.argsort(-likely, axis=-1)
    chosen = jax.nn.one_hot(order[:, :top_k], router.shape[1], dtype=x.dtype).sum(1)
    weights = likely * chosen
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    gate, up = (jnp.einsum("td,edf->tef", x, experts[name]) for name in ("gate", "up"))
    results = jnp.einsum("tef,efd->ted", activation(gate) * up, experts["down"])
    of_tokens = max(len(x), 1)
    shares = chosen.sum(0) / (of_tokens * top_k)
    loss = router.shape[1] * jnp.sum(shares * likely.sum(0) / of_tokens)
    return jnp.einsum("te,ted->td", weights, results), loss
