# %% [markdown]
"""
# Lesson 3: backward

A reduce-scatter adds what an all-gather copies. Every rank has a vector of n shards, and rank r
ends with the sum over the ranks of shard r (`psum_scatter` in `jax.lax`). It needs no new schedule.
Run the schedule of the all-gather from its last round to its first, and reverse every message.
Where the all-gather copied a shard from rank a to rank b, rank b now sends a partial sum to rank a,
which adds it.

    all-gather       rank 0: a      ->   rank 1: a    ->   rank 2: a     a shard is copied
    reduce-scatter   rank 0: a+b+c  <-   rank 1: b+c  <-   rank 2: c     a sum grows on its way

As a matrix, each of the two is the transpose of the other. So each is the gradient of the other.
JAX knows that: it transposes a `ppermute` by sending in the other direction.
"""

# %%
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll import Schedule, algorithms, draw
from ringcoll.learn import claim, messages, start

start(8)
N = 8
rng = np.random.default_rng(0)
vectors = rng.integers(-9, 10, (N, N)).astype(np.float32)  # vectors[r]: rank r's, of n shards

# %% [markdown]
"""
## As lists

`partial[r][o]` is the partial sum for rank r - o that rank r holds. The rounds run from the last to
the first.
"""


# %%
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
    claim(f"{name}, run backward, is a reduce-scatter", np.array_equal(sums, vectors.sum(0)))

# %%
draw.plan("reduce_scatter", "ring", (4,))

# %% [markdown]
"""
## As a gradient

Lesson 1's ring has no code for its gradient. JAX derives the gradient.
"""


# %%
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


print("cotangents of ranks 0 and 1:", vectors[0], vectors[1])
print("their sums, one on each rank:", backward(ct))
claim("JAX transposes it to a reduce-scatter", np.array_equal(backward(ct), vectors.sum(0)))
there, back = (str(jax.make_jaxpr(f)(y)) for f, y in ((forward, x), (backward, ct)))
claim(
    "that takes 7 ppermutes, as many as forward",
    there.count("ppermute[") == back.count("ppermute[") == N - 1,
)
claim("each is reversed", "(0, 1)" in there and "(1, 0)" in back and "(0, 1)" not in back)

# %% [markdown]
"""
In the library, the gradient of an all-gather is a reduce-scatter by the same schedule.
"""

# %%
bruck = jax.shard_map(
    lambda x: ringcoll.all_gather(x, "x", tiled=True, algorithm="bruck"),
    in_specs=P("x"),
    out_specs=P("x"),
)
gradient = jax.jit(lambda ct: jax.vjp(bruck, x)[1](ct)[0]).lower(ct).compile()
claim("Bruck's gradient too is a reduce-scatter", np.array_equal(gradient(ct), vectors.sum(0)))
claim("it takes 3 messages, as many as forward", messages(gradient) == 3)

# %% [markdown]
"""
## Exercise 1: a reduce-scatter by hand

Write the reduce-scatter as a ring, with `ppermute` and additions. A rank's operand is its vector of
n shards. A partial sum travels from rank r to rank r + 1, and each rank adds its own shard to it.
After n - 1 messages, each sum must be on the rank that wants it. So which rank's sum does rank r
start?
"""


# %% tags=["solution"]
def scatter_by_hand(x: Array) -> Array:
    rank = lax.axis_index("x")
    total = x[(rank - 1) % N]  # for rank r - 1, which the ring reaches last
    for step in range(1, N):
        total = lax.ppermute(total, "x", [(r, (r + 1) % N) for r in range(N)])
        total = total + x[(rank - 1 - step) % N]
    return total[None]


scattered = jax.jit(jax.shard_map(scatter_by_hand, in_specs=P("x"), out_specs=P("x")))
claim("a ring of sums is a reduce-scatter", np.array_equal(scattered(ct), vectors.sum(0)))

# %% [markdown]
"""
## Exercise 2: the gradient of a reduce-scatter

What is the gradient of `ringcoll.psum_scatter(x, "x", tiled=True, algorithm="two_ended")`, and how
many messages does it take? Answer first. Then pull back the cotangent 0, 1, ..., 7 (rank r has the
number r), and count the messages.
"""

# %% tags=["solution"]
scatter = jax.shard_map(
    lambda x: ringcoll.psum_scatter(x, "x", tiled=True, algorithm="two_ended"),
    in_specs=P("x"),
    out_specs=P("x"),
)
numbers = jax.device_put(jnp.arange(float(N)), P("x"))

gathered = jax.jit(lambda ct_of_sums: jax.vjp(scatter, ct)[1](ct_of_sums)[0])
program = gathered.lower(numbers).compile()
claim("it gathers", (np.asarray(program(numbers)).reshape(N, N) == np.arange(N)).all())
claim("that takes 7 messages in 4 rounds, by the same schedule", messages(program) == N - 1)
