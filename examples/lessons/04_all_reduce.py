# %% [markdown]
"""
# Lesson 4: all-reduce, by few bytes or by few rounds

An all-reduce gives every rank the sum of all ranks' vectors: `psum` in `jax.lax`. One way is a
reduce-scatter, then an all-gather: 2(n - 1) rounds, each with 1/n of the vector. No algorithm sends
fewer bytes (Patarasuk and Yuan, 2009). A second way has log2 n rounds: in each, a rank swaps its
whole vector with a partner, and adds what it receives. On 8 ranks the partners are 4, 2 and 1 ranks
away. A message costs alpha seconds, and a byte costs beta seconds:

    ring                  14 alpha + 1.75 vectors beta        (n = 8)
    recursive doubling     3 alpha +    3 vectors beta

So the ring is best for large vectors, and recursive doubling for small ones. `python -m ringcoll
cost all_reduce -n 8` compares all algorithms. A third way looks simplest: whole vectors travel
round the ring, and every rank adds each vector that arrives. This lesson shows what is wrong with
it.
"""

# %%
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from ringcoll import costs, draw, lax
from ringcoll.costs import Price, price
from ringcoll.learn import claim, show, start

start(8)
N = 8

# %% [markdown]
"""
Here is the ring on four ranks, with a column for each shard. After three rounds every rank has the
sum of one shard. After three more, every rank has all sums:
"""

# %%
draw.plan("all_reduce", "ring", (4,))

# %% [markdown]
"""
Here is recursive doubling, which swaps whole vectors:
"""

# %%
draw.plan("all_reduce", "recursive_doubling", (4,))

# %% [markdown]
"""
## What each costs

`price` counts in shards, and a vector has n of them. Here the ranks are on a switch. Each rank has
one port, so its messages start one after the other.
"""

# %%
ring, doubling = (price("psum", name, (N,)) for name in ("ring", "recursive_doubling"))
claim("the ring: 14 messages, 14/8 of a vector", (ring.startups, ring.sent / N) == (14, 14 / 8))
claim("recursive doubling: 3, of a vector each", (doubling.startups, doubling.sent / N) == (3, 3))

# %%
price("psum", "recursive_doubling", (N,))

# %% [markdown]
"""
## Where they cross

Seconds are modelled, with the rates of v5e chips. The first line of `python -m ringcoll cost`
prints these rates. Additions take time too. `costs.fastest` finds the crossing to the byte.
"""

# %%


def microseconds(paid: Price, vector_bytes: float) -> float:
    return 1e6 * costs.seconds(paid, vector_bytes / N, costs.DEVICES["v5e"])


def crossings(network: tuple[int, ...] | None) -> list[costs.Range]:
    """The fastest algorithm at each size, on a physical ring or on a switch (None)."""
    paid = {name: price("psum", name, (N,), network) for name in ("ring", "recursive_doubling")}
    times = {name: partial(microseconds, one) for name, one in paid.items()}
    return costs.fastest(times, 2**10, 2**32)


sizes = [2**k for k in range(10, 27, 4)]
rows = [[size, *(f"{microseconds(p, size):.1f}" for p in (ring, doubling))] for size in sizes]
show("Modelled, on a switch: us", ["bytes", "ring", "recursive doubling"], rows)
small, large = crossings(None)
claim(
    f"recursive doubling is faster up to {large.least / 1024:.4g}K, and the ring from there on",
    (small.name, large.name) == ("recursive_doubling", "ring"),
)

# %% [markdown]
"""
`python -m ringcoll cost all_reduce -n 8 --network switch --algorithm ring,recursive_doubling`
prints the same crossing. But no switch connects the chips of a TPU. On a physical ring, a message
to a partner 4 ranks away passes 4 links, and the messages of all ranks share these links. So
recursive doubling puts more bytes on the busiest link, and the crossing is at a smaller size. The
command prints that crossing if you leave out `--network`.
"""

# %%
by_links = price("psum", "recursive_doubling", (N,), network=(N,))
claim("the busiest link carries 7 vectors instead of 3", by_links.link / N == 7)
in_a_ring = crossings((N,))[1]
claim(
    f"there the ring is faster from {in_a_ring.least / 1024:.4g}K on", in_a_ring.least < large.least
)

# %% [markdown]
"""
## The bits of a sum

The last bits of a float sum depend on the order of its additions.
"""


# %%
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
claim(f"rotate and add: {rotated} different sums, one order of additions each", rotated > 1)

# %% [markdown]
"""
## Exercise 1: more ranks

On 64 ranks on a switch, is the crossing at more bytes than on 8 ranks, or at fewer? Guess, then
compute. (Both ways start more messages than on 8 ranks. The ring starts many more.)
"""

# %% tags=["solution"]
paid = {name: price("psum", name, (64,)) for name in ("ring", "recursive_doubling")}
model = costs.DEVICES["v5e"]
times = {
    name: lambda size, one=one: costs.seconds(one, size / 64, model) for name, one in paid.items()
}
more = costs.fastest(times, 2**10, 2**32)[-1]
claim(f"at more: {more.least / 1024:.4g}K", more.name == "ring" and more.least > large.least)

# %% [markdown]
"""
## Exercise 2: the best of both

`"halving_doubling"` (Rabenseifner) is a reduce-scatter by halves and an all-gather by doubling: few
rounds, and few bytes. On 8 ranks on a switch, how many messages and how many vectors does it send,
and at which sizes is it the fastest of the three? Then answer the same for a physical ring.
"""

# %% tags=["solution"]
three = ("ring", "recursive_doubling", "halving_doubling")
for network in (None, (N,)):
    paid = {name: price("psum", name, (N,), network) for name in three}
    times = {name: partial(microseconds, one) for name, one in paid.items()}
    print("on a switch:" if network is None else "on a ring:")
    for name, least, _ in costs.fastest(times, 2**10, 2**32):
        print(f"  from {least / 1024:.4g}K {name}")
both = price("psum", "halving_doubling", (N,))
claim("6 messages, 14/8 of a vector", (both.messages, both.sent / N) == (6, 14 / 8))
of_a_switch = costs.fastest(
    {name: partial(microseconds, price("psum", name, (N,))) for name in three}, 2**10, 2**32
)
claim("on a switch the ring is never the fastest", "ring" not in {one.name for one in of_a_switch})
claim("on a ring it is, for large vectors", costs.fastest(times, 2**10, 2**32)[-1].name == "ring")
