"""A Flax block over eight devices: its state unchanged, its layers read by name.

    python -m examples.flax_block

The block is a Flax module, and runs as one on a single device. Over a mesh `ringcoll.layers` take
the same state: Flax's parameters have the names and the layout that they expect.
"""

import sys
from typing import Any

from flax import nnx
from jax import Array

from examples.blocks import RING, compare, make_mesh
from ringcoll.layers import tensor_parallel as tp

WIDTH, HEADS, FEATURES = 64, 8, 256
LIMIT = 1e-6  # `jax.nn.dot_product_attention` computes the scores of both, in float32


class MLP(nnx.Module):
    """Two linear layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, FEATURES, rngs=rngs)
        self.down = nnx.Linear(FEATURES, WIDTH, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """The block on one device, as a Flax module."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = MLP(rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.norm_1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.mlp(self.norm_2(x))


def over_ranks(state: Any, x: Array) -> Array:
    """The block on a rank's shards: `x: [b, s/n, d] -> [b, s/n, d]`."""
    normed = tp.rms_norm(state["norm_1"], x, "model")
    x = x + tp.attention(state["attention"], normed, "model", rotary_base=None, algorithm=RING)
    normed = tp.rms_norm(state["norm_2"], x, "model")
    return x + tp.mlp(state["mlp"], normed, "model", algorithm=RING)


def main() -> int:
    """Compare; 1 if they differ."""
    mesh = make_mesh()
    definition, state = nnx.split(Block(nnx.Rngs(0)))

    def alone(state: Any, x: Array) -> Array:
        return nnx.merge(definition, state)(x)

    print("a Flax block over 2 x 4 devices, its state as it is")
    return compare(mesh, alone, over_ranks, state, WIDTH, LIMIT)


if __name__ == "__main__":
    sys.exit(main())
