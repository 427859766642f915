# %% [markdown]
"""
# Lesson 12: a narrow wire

A message can hold narrower numbers than the ranks compute with. Here a message holds a *code* of
one byte in place of each float, and one scale for each block of 128. That is about half of the
bytes of bfloat16, and a quarter of those of float32.

The scale is the largest magnitude of a block, divided by 127. A code is value / scale, rounded to a
whole number. So the error of a value is at most half a scale. A small value can have the same error
as a large one.

A gather passes codes on: a shard is encoded once, by its owner. A sum cannot do that. A ring adds
at every hop, so it encodes a new partial sum at every hop.
"""

# %%
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll import costs
from ringcoll.learn import claim, messages, sent, start

start(8)
N, BLOCK, S = 8, 128, 1024  # ranks, values of a block, values of a shard
WIRE = ringcoll.Wire("int8", BLOCK)
EPS = float(jnp.finfo(jnp.float32).eps)
jax.set_mesh(jax.make_mesh((N,), ("x",)))
rng = np.random.default_rng(0)


def on_ranks(function: Callable[[Array], Array]) -> jax.stages.Wrapped:
    return jax.jit(jax.shard_map(function, in_specs=P("x"), out_specs=P("x")))


def placed(x: np.ndarray) -> Array:
    return jax.device_put(x, P("x"))


# %% [markdown]
"""
## Codes and scales
"""

# %%


def encode(x: Array) -> tuple[Array, Array]:
    blocks = x.reshape(-1, BLOCK)
    scales = abs(blocks).max(1, keepdims=True) / 127
    return jnp.round(blocks / scales).astype(jnp.int8), scales


def decode(codes: Array, scales: Array) -> Array:
    return (codes * scales).reshape(-1)


shards = rng.standard_normal(N * S, np.float32)
codes, scales = encode(jnp.asarray(shards))
off = abs(decode(codes, scales) - shards).reshape(-1, BLOCK)
narrow = codes.nbytes + scales.nbytes
print(f"{narrow / shards.nbytes:.3f} of the bytes of float32")
claim("the error of a value is at most half a scale", (off <= 0.501 * scales).all())
lone = jnp.full(BLOCK, 0.3).at[0].set(100.0)
claim("in a block with 100, a value of 0.3 is lost", (decode(*encode(lone))[1:] == 0).all())

# %% [markdown]
"""
## A gather encodes once
"""

# %%


def on(value: Array) -> Array:
    return lax.ppermute(value, "x", [(r, (r + 1) % N) for r in range(N)])


def gather(x: Array) -> Array:
    message = encode(x)
    arrived = [decode(*message)]  # its own shard as the other ranks will decode it
    for _ in range(N - 1):
        message = jax.tree.map(on, message)
        arrived.append(decode(*message))
    return jnp.stack(arrived)[(lax.axis_index("x") - jnp.arange(N)) % N].reshape(-1)


x = placed(shards)
gathered = np.asarray(on_ranks(gather)(x)).reshape(N, N * S)
claim("all ranks have the same bits", (gathered == gathered[0]).all())
claim("each shard was encoded once", (gathered[0] == decode(codes, scales)).all())
by_hand = on_ranks(gather).lower(x).compile()
claim("each hop takes two messages", messages(by_hand) == 2 * (N - 1))
claim("they hold codes and scales", sent(by_hand).permuted == (N - 1) * narrow / N)

# %% [markdown]
"""
## A sum encodes at every hop
"""

# %%


def ring_sum(x: Array) -> Array:
    """Lesson 3's reduce-scatter: rank r gets block r of the sum over ranks."""
    blocks = x.reshape(N, -1)
    total = blocks[(lax.axis_index("x") - 1) % N]
    for step in range(2, N + 1):
        message = jax.tree.map(on, encode(total))
        total = decode(*message) + blocks[(lax.axis_index("x") - step) % N]
    return total


def direct_sum(x: Array) -> Array:
    """Each contribution goes straight to the rank that adds it."""
    cut = [part.reshape(N, -1, part.shape[1]) for part in encode(x)]  # one for each rank
    codes, scales = (lax.all_to_all(message, "x", 0, 0) for message in cut)
    return (codes * scales).sum(0).reshape(-1)


terms = rng.standard_normal(N * N * S, np.float32)  # N * S values on each rank
y = placed(terms)
exact = terms.reshape(N, -1).sum(0)
errors = {f.__name__: abs(on_ranks(f)(y) - exact) for f in (ring_sum, direct_sum)}
for name, error in errors.items():
    print(f"{name}: the error is {error.mean():.4f} on average, {error.max():.4f} at most")
claim("the ring's is larger", errors["ring_sum"].mean() > 1.5 * errors["direct_sum"].mean())

# %% [markdown]
"""
## The library's sums, and a bound

ringcoll sends codes and scales as one message. `costs.error_bound` bounds the error of a sum
before the run. It is a fraction: multiply it by the sum over ranks of their largest magnitudes.
"""

# %%
largest = abs(terms.reshape(N, -1)).max(1).sum()
for name in ("direct", "ring"):

    def ours(x: Array, name: str = name) -> Array:
        return ringcoll.psum_scatter(x, "x", tiled=True, algorithm=name, wire=WIRE)

    error = abs(on_ranks(ours)(y) - exact).max() / largest
    bound = costs.error_bound("psum_scatter", name, (N,), EPS, wire=WIRE)
    often = costs.encodings("psum_scatter", name, (N,))
    print(f"{name}: at most {often} encodings; the error is {error:.5f}, its bound {bound:.5f}")
    claim("it is within the bound", error <= bound)
    program = on_ranks(ours).lower(y).compile()
    claim("a rank sends 7 messages", messages(program) == N - 1)
    claim("1 byte per value, 4 per block", sent(program).permuted == (N - 1) * WIRE.nbytes(S))

# %% [markdown]
"""
## Exercise 1: the bytes of an all-reduce

How many bytes does a rank send in `ringcoll.psum(x, "x", algorithm="ring", wire=WIRE)` of `N * S`
values? Compute that from the shapes. Then compare with the compiled program:
`sent(program).permuted`.
"""


# %% tags=["solution"]
def total(x: Array) -> Array:
    return ringcoll.psum(x, "x", algorithm="ring", wire=WIRE)


size = 2 * (N - 1) * (S + 4 * S // BLOCK)  # a shard per hop, to scatter and to gather
program = on_ranks(total).lower(y).compile()
claim(f"{size} bytes, as counted", sent(program).permuted == size)

# %% [markdown]
"""
## Exercise 2: error feedback

A gradient is `lone` in each of 1000 steps. Every encoding loses its small values. Error feedback
adds what one encoding lost to the next gradient, before it encodes that gradient. What is the error
of the mean of the decoded gradients, with and without feedback?
"""

# %% tags=["solution"]
lost, passed = jnp.zeros(BLOCK), jnp.zeros(BLOCK)
for _ in range(1000):
    wanted = lone + lost
    decoded = decode(*encode(wanted))
    lost, passed = wanted - decoded, passed + decoded
without = abs(decode(*encode(lone)) - lone).max()
with_it = abs(passed / 1000 - lone).max()
print(f"the error is {without:.3f} without feedback, {with_it:.5f} with it")
claim("the mean of 1000 steps is nearly exact", with_it < without / 100)
