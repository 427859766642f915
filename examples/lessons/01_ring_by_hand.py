# %% [markdown]
"""
# Lesson 1: a ring, by hand

Ranks sit in a circle, and each has one shard. An all-gather gives every rank all shards. In a
ring, a rank sends to the next rank only. In each round, every rank passes on the shard that it
received last. After n - 1 rounds, every rank has all shards.

    received, oldest first       after one round      after two      after three
    rank 0: a                    a d                  a d c          a d c b
    rank 1: b                    b a                  b a d          b a d c
    rank 2: c                    c b                  c b a          c b a d
    rank 3: d                    d c                  d c b          d c b a

Read a row: the shard that rank r receives in round k started at rank r - k. So a rank knows whose
shard arrives, and a message needs nothing but the shard.

`start` makes eight virtual CPU devices, which are the ranks. So the lesson runs on any machine.
`claim` prints a statement, or fails if it is wrong. `messages` counts the messages of a compiled
program.
"""

# %%
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from ringcoll import draw
from ringcoll.learn import claim, messages, start

start(8)

# %% [markdown]
"""
## As plain lists

There is one list for each rank. All ranks send at once, so a round makes new lists.
"""


# %%
def simulated(shards: list[str]) -> list[list[str]]:
    n = len(shards)
    came = [[shard] for shard in shards]
    for _ in range(n - 1):
        sent = [mine[-1] for mine in came]
        came = [[*mine, sent[rank - 1]] for rank, mine in enumerate(came)]
    return [[mine[(rank - origin) % n] for origin in range(n)] for rank, mine in enumerate(came)]


lists = simulated(list("abcd"))
print(*(f"rank {rank}: {' '.join(held)}" for rank, held in enumerate(lists)), sep="\n")
claim("as lists, every rank ends with every shard, in order", lists == [list("abcd")] * 4)

# %% [markdown]
"""
The library draws the same four ranks:
"""

# %%
draw.plan("all_gather", "ring", (4,))

# %% [markdown]
"""
## In JAX

In `shard_map` one program runs on all ranks. `axis_index` is the number of the rank. `ppermute`
sends a message for each pair (from, to) of a list.
"""


# %%
def all_gather(x: Array) -> Array:
    n, rank = lax.axis_size("x"), lax.axis_index("x")
    to_the_next = [(r, (r + 1) % n) for r in range(n)]
    came = [x]
    for _ in range(n - 1):
        came.append(lax.ppermute(came[-1], "x", to_the_next))
    return jnp.stack(came)[(rank - jnp.arange(n)) % n]


jax.set_mesh(jax.make_mesh((8,), ("x",)))
x = jax.device_put(jnp.arange(24.0), P("x"))  # three numbers on each rank


def compiled(gather: Callable[[Array], Array]) -> Compiled:
    """Compile over the ranks; the result has the shards of all ranks, end to end."""
    return jax.jit(jax.shard_map(gather, in_specs=P("x"), out_specs=P("x"))).lower(x).compile()


by_hand, built_in = compiled(all_gather), compiled(partial(lax.all_gather, axis_name="x"))
held = np.asarray(by_hand(x)).reshape(8, 24)
print("rank 5 holds", held[5])
claim("in JAX, every one of 8 ranks holds all 8 shards, in order", (held == np.asarray(x)).all())
claim("lax.all_gather gives the same", np.array_equal(by_hand(x), built_in(x)))
claim("each rank sends 7 messages", messages(by_hand) == 7)

# %% [markdown]
"""
## Exercise 1: the other way round

Let the shards travel from rank r to rank r - 1. Two lines of `all_gather` change: the list of
pairs, and the line that puts the shards in order.
"""


# %% tags=["solution"]
def the_other_way(x: Array) -> Array:
    n, rank = lax.axis_size("x"), lax.axis_index("x")
    to_the_previous = [(r, (r - 1) % n) for r in range(n)]
    came = [x]
    for _ in range(n - 1):
        came.append(lax.ppermute(came[-1], "x", to_the_previous))
    return jnp.stack(came)[(jnp.arange(n) - rank) % n]  # came[k] started at rank r + k


claim("the other way round, the same", np.array_equal(compiled(the_other_way)(x), built_in(x)))

# %% [markdown]
"""
## Exercise 2: only the neighbours

A simulation on a grid needs the shards of both neighbours and no others: a halo. Write a function
that returns the shards of the ranks r - 1, r and r + 1, end to end. How many messages does it take?
"""


# %% tags=["solution"]
def halo(x: Array) -> Array:
    n = lax.axis_size("x")
    from_the_left = lax.ppermute(x, "x", [(r, (r + 1) % n) for r in range(n)])
    from_the_right = lax.ppermute(x, "x", [(r, (r - 1) % n) for r in range(n)])
    return jnp.concatenate([from_the_left, x, from_the_right])


with_halo = compiled(halo)
shards = np.arange(24.0).reshape(8, 3)
wanted = np.concatenate([np.roll(shards, 1, 0), shards, np.roll(shards, -1, 0)], axis=1)
claim("each rank has its neighbours' shards", np.array_equal(with_halo(x), wanted.reshape(-1)))
claim("that takes 2 messages, for any n", messages(with_halo) == 2)
