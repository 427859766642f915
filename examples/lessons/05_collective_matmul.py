"""Lesson 5: multiply while it travels.

A layer often gathers x, whose rows are on all ranks, and multiplies the whole x by its w. But a
product does not need the whole x: each shard gives its own rows of the result. So send a shard
on, and multiply it while the next shard travels.

    gather, then multiply   wire |1|2|3|           by a ring   wire    |1 |2 |3 |
                            chip       |0|1|2|3|               chip    |0 |1 |2 |3|

Products and messages overlap, so the shorter of the two takes no extra time; and the gathered x
is never held. The gradient of x is such a ring too, backward: each product is added to a sum that
travels past.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")  # eight ranks on any machine

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

import ringcoll
from examples.lessons.claims import claim, permutes

N, M, K, F = 8, 512, 256, 64
Matmul = Callable[[Array, Array], Array]
jax.set_mesh(jax.make_mesh((N,), ("x",)))


# x: [M/N, K] and w: [K, F/N] on each rank -> [M, F/N]
def plain(x: Array, w: Array) -> Array:
    return lax.all_gather(x, "x", tiled=True) @ w


def by_hand(x: Array, w: Array) -> Array:
    products = []
    for step in range(N):
        shard = x
        if step < N - 1:
            x = lax.ppermute(x, "x", [(r, (r + 1) % N) for r in range(N)])  # send first
        products.append(shard @ w)  # meanwhile
    origins = (lax.axis_index("x") - jnp.arange(N)) % N
    return jnp.stack(products)[origins].reshape(-1, w.shape[1])


def ours(x: Array, w: Array) -> Array:
    return ringcoll.all_gather_matmul(x, w, "x", algorithm="ring")  # "auto" is plain on CPU


def compiled(matmul: Matmul) -> Compiled:
    return jax.jit(over_ranks(matmul)).lower(*operands).compile()


def compiled_gradients(matmul: Matmul) -> Compiled:
    def loss(x: Array, w: Array) -> Array:
        return (over_ranks(matmul)(x, w) ** 2).sum() / 2  # its gradient is the product itself

    return jax.jit(jax.grad(loss, (0, 1))).lower(*operands).compile()


def over_ranks(matmul: Matmul) -> Matmul:
    return jax.shard_map(matmul, in_specs=specs, out_specs=P(None, "x"))


def held(program: Compiled) -> float:
    """Memory beside operands and result, in shards of x."""
    memory: Any = program.memory_analysis()
    return memory.temp_size_in_bytes / (4 * M // N * K)


# Small integers, whose sums are exact in any order.
rng = np.random.default_rng(0)
x, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((M, K), (K, F)))
specs = P("x", None), P(None, "x")
operands = jax.device_put((x, w), specs)
y = x @ w
for name, matmul in {"by hand": by_hand, "all_gather_matmul": ours}.items():
    program, gradients = compiled(matmul), compiled_gradients(matmul)
    claim(f"{name}: the product", np.array_equal(program(*operands), y))
    claim("in 7 messages", permutes(program) == N - 1)
    made = gradients(*operands)
    claim("and its gradients", all(map(np.array_equal, made, (y @ w.T, x.T @ y))))
    claim("in 7 more, of sums that pass by", permutes(gradients) == 2 * (N - 1))

gathered, ring = held(compiled(plain)), held(compiled(ours))
print(f"compiled: plain holds {gathered:.1f} shards of x, ours {ring:.1f}")
claim("the gathered x is never held", ring < N)
