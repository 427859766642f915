"""FSDP and tensor parallelism together, in Equinox: a module's weights are cut along both axes.

    python -m examples.fsdp_equinox

The block of `examples.equinox_block` is trained for some steps on 2 x 4 devices, and on one. The
module is a pytree, so its specs and its gradients are modules too. The module knows of no mesh.
"""

import sys

import jax

from examples.blocks import make_mesh
from examples.equinox_block import WIDTH, Block, over_ranks
from examples.sharded_training import compare_training

#: Each step makes some thousand roundings in float64. Later steps enlarge their error by a factor
#: of some tens at most.
LIMIT = 1e-11


def main() -> int:
    """Compare; 1 if the losses differ."""
    mesh = make_mesh()
    print("an Equinox block, its weights cut over 2 (FSDP) x 4 (tensor) devices")
    block = Block(jax.random.key(0))
    return compare_training(mesh, Block.__call__, over_ranks, block, WIDTH, LIMIT)


if __name__ == "__main__":
    sys.exit(main())
