"""Lesson 4: all-reduce, by few bytes or by few rounds.

Every rank needs the sum of all ranks' vectors: `psum` in `jax.lax`. One way is a reduce-scatter,
then an all-gather: 2(n - 1) rounds of 1/n of the vector. No algorithm sends fewer bytes
(Patarasuk and Yuan, 2009). Another way is to swap whole vectors with the partner 4, 2, 1 away and
to add them: log2 n rounds, but of whole vectors. A message costs alpha, a byte beta:

    ring                  14 alpha + 1.75 vectors beta        (n = 8)
    recursive doubling     3 alpha +    3 vectors beta

So the first is best for large vectors, and the second for small ones. `python -m ringcoll cost
all_reduce -n 8` compares all algorithms. A third way looks simplest: whole vectors travel round the
ring, and every rank adds each one that arrives. This lesson shows what is wrong with it.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")  # eight ranks on any machine

from collections.abc import Callable

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from examples.lessons.claims import claim
from ringcoll import cost, lax
from ringcoll.pricing import Price, price

N = 8
ring, doubling = (price("psum", name, (N,)) for name in ("ring", "recursive_doubling"))
claim("the ring: 14 messages, 14/8 of a vector", (ring.startups, ring.sent / N) == (14, 14 / 8))
claim("recursive doubling: 3, of a vector each", (doubling.startups, doubling.sent / N) == (3, 3))


# Modelled: 1 us a message, 45 GB/s, a switch between the ranks; additions take time too.
def microseconds(paid: Price, vector_bytes: int) -> float:
    return 1e6 * cost.seconds(paid, vector_bytes / N, cost.DEVICES["v5e"])


sizes = [2**k for k in range(10, 27)]
for size in sizes[::4]:
    a, b = microseconds(ring, size), microseconds(doubling, size)
    print(f"modelled, {size:>8} bytes: ring {a:6.1f} us, recursive doubling {b:6.1f} us")
wins = [microseconds(ring, size) < microseconds(doubling, size) for size in sizes]
crossing = next((size for size, win in zip(sizes, wins, strict=True) if win), None)
claim(
    f"of powers of two, the ring is faster from {crossing} bytes on",
    wins[-1] and wins == sorted(wins),
)
claim("and recursive doubling below", not wins[0])


# Now sums of floats; their last bits depend on the order of additions.
def two_halves(x: Array) -> Array:
    mine = lax.psum_scatter(x, "x", tiled=True, algorithm="ring")
    return lax.all_gather(mine, "x", tiled=True, algorithm="ring")


def rotate_and_add(x: Array) -> Array:
    total = x
    for _ in range(N - 1):
        x = lax.ppermute(x, "x", [(r, (r + 1) % N) for r in range(N)])
        total = total + x
    return total


jax.set_mesh(jax.make_mesh((N,), ("x",)))
vectors = np.random.default_rng(0).standard_normal((N, 1024), np.float32)
operand = jax.device_put(vectors.reshape(-1), P("x"))


def of_each_rank(function: Callable[[Array], Array]) -> np.ndarray:
    mapped = jax.jit(jax.shard_map(function, in_specs=P("x"), out_specs=P("x")))
    return np.asarray(mapped(operand)).reshape(N, -1)


def different(sums: np.ndarray) -> int:
    return len({mine.tobytes() for mine in sums})


by_ring = of_each_rank(lambda x: lax.psum(x, "x", algorithm="ring"))
by_doubling = of_each_rank(lambda x: lax.psum(x, "x", algorithm="recursive_doubling"))
claim("psum by a ring is its two halves", np.array_equal(by_ring, of_each_rank(two_halves)))
claim("by the ring all ranks have the same bits", different(by_ring) == 1)
claim("by recursive doubling too", different(by_doubling) == 1)
rotated = different(of_each_rank(rotate_and_add))
claim(f"rotate and add: {rotated} different sums, as each adds in its own order", rotated > 1)
