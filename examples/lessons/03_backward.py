"""Lesson 3: backward.

A reduce-scatter is the other half of most algorithms. Every rank has a vector of n shards, and
rank r ends with the sum over the ranks of shard r (`psum_scatter` in `jax.lax`). It needs no new
schedule. Read the schedule of the all-gather from its end, and turn every arrow round. Where the
all-gather copied a shard from rank a to rank b, rank b now sends a partial sum to rank a, which
adds it.

    all-gather       rank 0: a      ->   rank 1: a    ->   rank 2: a     a shard is copied
    reduce-scatter   rank 0: a+b+c  <-   rank 1: b+c  <-   rank 2: c     the copies come home

As matrices the two are each other's transpose, so each is the other's gradient. JAX knows that:
it transposes a `ppermute` by sending in the other direction.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")  # eight ranks on any machine

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import ringcoll
from examples.lessons.claims import claim, permutes
from ringcoll import Schedule, algorithms

N = 8
rng = np.random.default_rng(0)
vectors = rng.integers(-9, 10, (N, N)).astype(np.float32)  # vectors[r]: rank r's, of n shards


# As lists: partial[r][o] is rank r's partial sum for rank r - o.
def reduce_scatter(schedule: Schedule, vectors: np.ndarray) -> list[float]:
    n = schedule.size
    partial = [[vectors[r, r - o] for o in range(n)] for r in range(n)]
    for moves in reversed(schedule.rounds):
        for move in moves:
            for o in move.offsets:
                for r in range(n):
                    back = (r + move.shift) % n  # where the copy went
                    partial[r][o] += partial[back][(o + move.shift) % n]
    return [mine[0] for mine in partial]


for name in ("ring", "two_ended", "bruck"):
    sums = reduce_scatter(algorithms.GATHERS[name](N), vectors)
    claim(f"{name} from its end is a reduce-scatter", np.array_equal(sums, vectors.sum(0)))


# Lesson 1's ring; it says nothing about a gradient.
def by_hand(x: Array) -> Array:
    came = [x]
    for _ in range(N - 1):
        came.append(lax.ppermute(came[-1], "x", [(r, (r + 1) % N) for r in range(N)]))
    return jnp.concatenate(came)[(lax.axis_index("x") - jnp.arange(N)) % N]


jax.set_mesh(jax.make_mesh((N,), ("x",)))
forward = jax.shard_map(by_hand, in_specs=P("x"), out_specs=P("x"))
x = jax.device_put(jnp.zeros(N), P("x"))
ct = jax.device_put(vectors.reshape(-1), P("x"))  # the cotangent: one vector a rank


def backward(ct: Array) -> Array:
    return jax.linear_transpose(forward, x)(ct)[0]


claim("JAX transposes it to a reduce-scatter", np.array_equal(backward(ct), vectors.sum(0)))
there, back = (str(jax.make_jaxpr(f)(y)) for f, y in ((forward, x), (backward, ct)))
claim(
    "in 7 ppermutes, as it was forward",
    there.count("ppermute[") == back.count("ppermute[") == N - 1,
)
claim("each reversed", "(0, 1)" in there and "(1, 0)" in back and "(0, 1)" not in back)

# In the library the gradient of one is the other, by the same schedule.
bruck = jax.shard_map(
    lambda x: ringcoll.all_gather(x, "x", tiled=True, algorithm="bruck"),
    in_specs=P("x"),
    out_specs=P("x"),
)
gradient = jax.jit(lambda ct: jax.vjp(bruck, x)[1](ct)[0]).lower(ct).compile()
claim("Bruck's gradient too is a reduce-scatter", np.array_equal(gradient(ct), vectors.sum(0)))
claim("in 3 messages, as forward", permutes(gradient) == 3)
