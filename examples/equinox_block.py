"""An Equinox block over eight devices: the module unchanged, its layers read as attributes.

    python -m examples.equinox_block

A module is a pytree. So `partition_specs` returns a module of specs, `jax.grad` returns a module of
gradients, and `ringcoll.layers` read attributes. Pass a parameter that Equinox calls differently
under our name: Equinox calls the scale of a norm `weight`.
"""

import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from examples.blocks import RING, compare, make_mesh
from ringcoll.layers import tensor_parallel as tp

WIDTH, HEADS, FEATURES = 64, 8, 192
LIMIT = 1e-12  # thousands of roundings in float64


def normal(key: Array, *shape: int, of: int) -> Array:
    """Random weights, scaled for sums of `of` terms."""
    return jax.random.normal(key, shape) * of**-0.5


class Attention(eqx.Module):
    """Causal, without positions; heads are a dimension of their own."""

    query: Array
    key: Array
    value: Array
    out: Array

    def __init__(self, key: Array) -> None:
        size, keys = WIDTH // HEADS, jax.random.split(key, 4)
        three = (normal(k, WIDTH, HEADS, size, of=WIDTH) for k in keys[:3])
        self.query, self.key, self.value = three
        self.out = normal(keys[3], HEADS, size, WIDTH, of=WIDTH)

    def __call__(self, x: Array) -> Array:
        query, key, value = (jnp.tensordot(x, w, 1) for w in (self.query, self.key, self.value))
        return jnp.tensordot(attend(query, key, value), self.out, 2)


class GatedMLP(eqx.Module):
    """silu(x gate) * (x up), down."""

    gate: Array
    up: Array
    down: Array

    def __init__(self, key: Array) -> None:
        one, two, three = jax.random.split(key, 3)
        self.gate = normal(one, WIDTH, FEATURES, of=WIDTH)
        self.up = normal(two, WIDTH, FEATURES, of=WIDTH)
        self.down = normal(three, FEATURES, WIDTH, of=FEATURES)

    def __call__(self, x: Array) -> Array:
        return (jax.nn.silu(x @ self.gate) * (x @ self.up)) @ self.down


class Block(eqx.Module):
    """The block on one device, `x: [b, s, d]`; `over_ranks` runs it over ranks."""

    norm_1: eqx.nn.RMSNorm
    attention: Attention
    norm_2: eqx.nn.RMSNorm
    mlp: GatedMLP

    def __init__(self, key: Array) -> None:
        one, two = jax.random.split(key)
        self.norm_1 = eqx.nn.RMSNorm(WIDTH, eps=1e-6, use_bias=False)
        self.attention = Attention(one)
        self.norm_2 = eqx.nn.RMSNorm(WIDTH, eps=1e-6, use_bias=False)
        self.mlp = GatedMLP(two)

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(jax.vmap(jax.vmap(self.norm_1))(x))
        return x + self.mlp(jax.vmap(jax.vmap(self.norm_2))(x))


def attend(query: Array, key: Array, value: Array) -> Array:
    """`[b, s, h, k]`, for all heads, or for those of a rank."""
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key) / query.shape[-1] ** 0.5
    scores = jnp.where(jnp.tri(query.shape[1], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), value)


def over_ranks(block: Block, x: Array) -> Array:
    """The block on a rank's shards: `x: [b, s/n, d] -> [b, s/n, d]`."""
    normed = tp.rms_norm({"scale": block.norm_1.weight}, x, "model")
    options: Any = {"rotary_base": None, "attend": attend}
    x = x + tp.attention(block.attention, normed, "model", algorithm=RING, **options)
    normed = tp.rms_norm({"scale": block.norm_2.weight}, x, "model")
    return x + tp.gated_mlp(block.mlp, normed, "model", algorithm=RING)


def main() -> int:
    """Compare; 1 if they differ."""
    mesh = make_mesh()
    print("an Equinox block over 2 x 4 devices, the module as it is")
    return compare(mesh, Block.__call__, over_ranks, Block(jax.random.key(0)), WIDTH, LIMIT)


if __name__ == "__main__":
    sys.exit(main())
