"""FSDP and tensor parallelism together, in Flax NNX: a state's weights are cut along both axes.

    python -m examples.fsdp_nnx

The block of `examples.flax_block` is trained for some steps on 2 x 4 devices, and on one.
`nnx.split` returns its state, a pytree whose names `ringcoll.layers` know. The device that runs
alone gets the module back from `nnx.merge`.
"""

import sys
from typing import Any

from flax import nnx
from jax import Array

from examples.blocks import make_mesh
from examples.flax_block import WIDTH, Block, over_ranks
from examples.sharded_training import compare_training

LIMIT = 1e-5  # `jax.nn.dot_product_attention` computes scores in float32; see `flax_block`


def main() -> int:
    """Compare; 1 if the losses differ."""
    mesh = make_mesh()
    definition, state = nnx.split(Block(nnx.Rngs(0)))

    def alone(state: Any, x: Array) -> Array:
        return nnx.merge(definition, state)(x)

    print("a Flax block, its weights cut over 2 (FSDP) x 4 (tensor) devices")
    return compare_training(mesh, alone, over_ranks, state, WIDTH, LIMIT)


if __name__ == "__main__":
    sys.exit(main())
