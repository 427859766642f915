# %% [markdown]
"""
# Lesson 5: multiply while a shard travels

Often the rows of a layer's operand x are sharded over ranks. The layer gathers x, and multiplies
the whole x by its weight w. But a product does not need the whole x: each shard gives its own rows
of the result. So a rank sends a shard on, and multiplies it while the next shard travels.

    gather, then multiply   wire |1|2|3|           by a ring   wire    |1 |2 |3 |
                            chip       |0|1|2|3|               chip    |0 |1 |2 |3|

Products and messages overlap, so the shorter of the two takes no extra time. No rank ever holds the
whole x. The gradient of x comes from the same ring, run backward: each rank adds its product to a
partial sum that travels around the ring.
"""

# %%
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

import ringcoll
from ringcoll import costs
from ringcoll.learn import claim, messages, start

start(8)
N, M, K, F = 8, 512, 256, 64
Matmul = Callable[[Array, Array], Array]
jax.set_mesh(jax.make_mesh((N,), ("x",)))

# %% [markdown]
"""
## Four ways to compute one product

On each rank the product of `x: [M/N, K]` and `w: [K, F/N]` is `[M, F/N]`. In the third one, the
loop is ringcoll's, and what is done with a shard is a function: `ringcoll.all_gather_map` calls it
for all rows that arrived in a round, and puts the results in order.
"""

# %%


def plain(x: Array, w: Array) -> Array:
    return lax.all_gather(x, "x", tiled=True) @ w


def by_hand(x: Array, w: Array) -> Array:
    products = []
    for step in range(N):
        shard = x
        if step < N - 1:
            x = lax.ppermute(x, "x", [(r, (r + 1) % N) for r in range(N)])  # send first
        products.append(shard @ w)  # while it travels
    origins = (lax.axis_index("x") - jnp.arange(N)) % N
    return jnp.stack(products)[origins].reshape(-1, w.shape[1])


def by_map(x: Array, w: Array) -> Array:
    def product(rows: Array) -> Array:  # runs while the next shards travel
        return rows @ w

    return ringcoll.all_gather_map(product, x, "x", algorithm="ring")


def ours(x: Array, w: Array) -> Array:
    return ringcoll.all_gather_matmul(x, w, "x", algorithm="ring")  # "auto" is plain on CPU


# %% [markdown]
"""
## Products, messages, gradients
"""

# %%


def compiled(matmul: Matmul) -> Compiled:
    return jax.jit(over_ranks(matmul)).lower(*operands).compile()


def compiled_gradients(matmul: Matmul) -> Compiled:
    def loss(x: Array, w: Array) -> Array:
        return (over_ranks(matmul)(x, w) ** 2).sum() / 2  # its gradient is the product itself

    return jax.jit(jax.grad(loss, (0, 1))).lower(*operands).compile()


def over_ranks(matmul: Matmul) -> Matmul:
    return jax.shard_map(matmul, in_specs=specs, out_specs=P(None, "x"))


def held(program: Compiled) -> float:
    """Temporary memory (no operands, no result), in shards of x."""
    memory: Any = program.memory_analysis()
    return memory.temp_size_in_bytes / (4 * M // N * K)


# Small integers, whose sums are exact in any order.
rng = np.random.default_rng(0)
x, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((M, K), (K, F)))
specs = P("x", None), P(None, "x")
operands = jax.device_put((x, w), specs)
y = x @ w
ways = {"by hand": by_hand, "by all_gather_map": by_map, "all_gather_matmul": ours}
for name, matmul in ways.items():
    program, gradients = compiled(matmul), compiled_gradients(matmul)
    claim(f"{name}: the product", np.array_equal(program(*operands), y))
    claim("it takes 7 messages", messages(program) == N - 1)
    found = gradients(*operands)
    claim("the gradients", all(map(np.array_equal, found, (y @ w.T, x.T @ y))))
    claim("they take 7 more, of partial sums", messages(gradients) == 2 * (N - 1))

# %% [markdown]
"""
## Memory
"""

# %%
gathered, ring = held(compiled(plain)), held(compiled(ours))
print(f"compiled: plain holds {gathered:.1f} shards of x, ours {ring:.1f}")
claim("ours never holds the whole x", ring < N)

# %% [markdown]
"""
## Exercise 1: the other matmul

In a layer's second product each rank has columns of x and rows of w: `x: [M, K/N]`, `w: [K/N, F]`.
So the product of a rank is one term of the sum over ranks. Rank r wants its rows of that sum:
`[M/N, F]`. Write this as a ring. A partial sum travels (lesson 3, exercise 1). Each rank computes
the rows that it adds to the sum just before it adds them. How many rows of x does it multiply at a
time? Then write it as a `ringcoll.reduce`, whose function makes the rows that leave next.
"""


# %% tags=["solution"]
def scattered(x: Array, w: Array) -> Array:
    rank = lax.axis_index("x")

    def product(origin: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, origin % N * (M // N), M // N) @ w  # M/N rows

    total = product(rank - 1)
    for step in range(1, N):
        total = lax.ppermute(total, "x", [(r, (r + 1) % N) for r in range(N)])
        total = total + product(rank - 1 - step)
    return total


def reduced(x: Array, w: Array) -> Array:
    return ringcoll.reduce(lambda wanted: wanted.take(x) @ w, "x", algorithm="ring")


cut = jax.device_put((x, w), (P(None, "x"), P("x", None)))
for name, matmul in {"a ring of sums": scattered, "reduce": reduced}.items():
    mapped = jax.shard_map(matmul, in_specs=(P(None, "x"), P("x", None)), out_specs=P("x", None))
    program = jax.jit(mapped).lower(*cut).compile()
    claim(f"{name}: the product", np.array_equal(program(*cut), y))
    claim("it takes 7 messages", messages(program) == N - 1)

# %% [markdown]
"""
## Exercise 2: how much work hides a hop

A shard of m rows and k columns in bf16 takes 2 m k beta seconds to travel. Its product with f
columns takes 2 m k f delta seconds. (`costs.DEVICES["v5e"]` has beta, seconds per byte, and delta,
seconds per operation.) How large must f be for the product to hide the hop? Do m and k matter?
"""

# %% tags=["solution"]
v5e = costs.DEVICES["v5e"]
least = v5e.beta / v5e.delta  # 2 m k drops out
print(f"{least:.0f} columns or more, for any m and k")
claim("a rank of a large model has about as many", 4000 < least < 5000)
