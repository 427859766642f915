"""The transformer of `examples.transformer` on one device, in plain `jax.numpy`."""

import jax
import jax.numpy as jnp
from jax import Array

from examples.transformer import LAYOUT, TOP_K, Config, Params, dropout
from ringcoll.layers import context_parallel as cp


def widened(x: Array) -> Array:
    """x in float32 or wider, as the layers compute norms, angles and softmaxes."""
    return x.astype(jnp.promote_types(x.dtype, "float32"))


def rms_norm(params: Params, x: Array) -> Array:
    """x over the root of the mean of its squares, times scale."""
    wide = widened(x)
    root = jnp.sqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (wide / root * widened(params["scale"])).astype(x.dtype)


def turned(x: Array) -> Array:
    """Rotary positions: turns every pair (i, i + k/2) of x: [b, s, h, k] by its angle."""
    half = x.shape[-1] // 2
    first, second = jnp.split(widened(x), 2, -1)
    angles = jnp.outer(jnp.arange(x.shape[1]), 1e4 ** -(jnp.arange(half) / half))
    sin, cos = (f(angles).astype(first.dtype)[:, None] for f in (jnp.sin, jnp.cos))
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, -1).astype(x.dtype)


def attention(params: Params, x: Array) -> Array:
    """Each position attends to itself and to those before it."""
    query, key, value = (
        jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in ("query", "key", "value")
    )
    scores = widened(jnp.einsum("bqhk,bshk->bhqs", turned(query), turned(key)))
    past = jnp.tri(x.shape[1], dtype=bool)
    scores = jnp.where(past, scores / query.shape[-1] ** 0.5, -jnp.inf)
    mixed = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores).astype(x.dtype), value)
    return jnp.einsum("bqhk,hkd->bqd", mixed, params["out"])


def gated_mlp(params: Params, x: Array) -> Array:
    """silu(x gate) * (x up), down."""
    return (jax.nn.silu(x @ params["gate"]) * (x @ params["up"])) @ params["down"]


def mixture(params: Params, x: Array, cut: tuple[int, int]) -> tuple[Array, Array]:
    """The weighted sum of every expert on every token, and the load-balancing loss.

    For each token, the weights of all experts except `TOP_K` are 0. Each group of ranks along MODEL
    has a part of the tokens, and the loss is the mean of the parts' losses. `cut` says how many
    parts the rows are cut into, and how many parts the sequence.
    """
    likely = jax.nn.softmax(widened(x) @ widened(params["router"]))  # [b, s, E]
    best, ids = jax.lax.top_k(likely, TOP_K)
    chosen = jax.nn.one_hot(ids, likely.shape[-1], dtype=best.dtype)  # [b, s, k, E]
    weights = jnp.einsum("bsk,bske->bse", best / best.sum(-1, keepdims=True), chosen)
    by_expert = jax.vmap(gated_mlp, (0, None))(
        {name: params[name] for name in ("gate", "up", "down")}, x
    )
    y = jnp.einsum("ebsd,bse->bsd", widened(by_expert), weights).astype(x.dtype)

    def of_parts(x: Array) -> Array:
        x = cp.arrange(x, cut[1], LAYOUT).reshape(
            cut[0], -1, cut[1], x.shape[1] // cut[1], x.shape[2]
        )
        return x.mean((1, 3))

    falls = of_parts(chosen.mean(2)) * of_parts(likely)
    return y, likely.shape[-1] * falls.sum(-1).mean()


def losses(
    config: Config,
    params: Params,
    batch: Array,
    key: Array,
    positions: Array,
    *,
    cut: tuple[int, int] = (1, 1),
) -> tuple[Array, Array]:
    """-log of the probability of each token after the first: `batch: [b, s+1] -> [b, s]`.

    And the load-balancing loss of all layers; see `mixture`.
    """
    params = jax.tree.map(lambda p: p.astype(config.dtype), params)
    tokens, labels = batch[:, :-1], batch[:, 1:]
    x = dropout(params["embed"]["embedding"][tokens], key, positions, 0, config.dropout)
    balance = jnp.zeros(())
    for i, layer_key in enumerate(jax.random.split(key, config.layers)):
        block = jax.tree.map(lambda p: p[i], params["blocks"])  # noqa: B023
        y = attention(block["attention"], rms_norm(block["norm_1"], x))
        x = x + dropout(y, layer_key, positions, 1, config.dropout)
        normed = rms_norm(block["norm_2"], x)
        if config.experts:
            y, of_block = mixture(block["mlp"], normed, cut)
            balance += of_block
        else:
            y = gated_mlp(block["mlp"], normed)
        x = x + dropout(y, layer_key, positions, 2, config.dropout)
    logits = rms_norm(params["norm"], x) @ params["unembed"]["unembedding"]
    logs = jax.nn.log_softmax(widened(logits))
    return -jnp.take_along_axis(logs, labels[..., None], -1)[..., 0], balance
