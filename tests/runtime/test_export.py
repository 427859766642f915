"""A program that is exported for several platforms runs on the one that is here.

XLA:CPU compiles the branch for the other platform, too. For collectives see `contexts.exported`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import PartitionSpec as P
from support import assert_same, every_rank, make_mesh

import ringcoll

MESH = make_mesh(3)


def check(function, operands, platforms):
    mapped = every_rank(MESH, function, check_vma=True)
    sharding = jax.sharding.NamedSharding(MESH, P("x"))
    placed = jax.device_put(operands, sharding)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), placed
    )
    exported = export.export(jax.jit(mapped), platforms=platforms)(shapes)
    restored = export.deserialize(exported.serialize())
    assert_same(jax.jit(restored.call)(placed), jax.jit(mapped)(placed))


def test_matmuls_and_a_gradient():
    def program(x, w):
        def loss(x):
            y = ringcoll.all_gather_matmul(x, w, "x", algorithm="ring")
            z = ringcoll.matmul_reduce_scatter(y, w.T, "x", algorithm="two_ended")
            return jnp.sum(z**2)

        return jax.grad(loss)(x)

    x, w = np.arange(12.0, dtype=np.float32).reshape(3, 2, 2), np.ones((3, 2, 2), np.float32)
    check(lambda operands: program(*operands), (x, w), ["cpu", "tpu"])
