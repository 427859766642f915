"""Lesson 1: a ring, by hand.

Ranks sit in a circle, and each has one shard. An all-gather gives every rank all shards. In a
ring, a rank sends to the next rank only. Each rank passes on the shard that came last, n - 1
times. Then every shard has been on every rank.

    what came, oldest first      after one round      after two      after three
    rank 0: a                    a d                  a d c          a d c b
    rank 1: b                    b a                  b a d          b a d c
    rank 2: c                    c b                  c b a          c b a d
    rank 3: d                    d c                  d c b          d c b a

Read a row: the shard that came to rank r in round k started at rank r - k. So a rank knows where
each shard comes from, and sends nothing but shards.
"""

import os

# Eight ranks on any machine: JAX makes so many CPU devices, if told before it is imported.
os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from examples.lessons.claims import claim, permutes


# First as plain lists, one for each rank. All ranks send at once, so a round makes new lists.
def simulated(shards: list[str]) -> list[list[str]]:
    n = len(shards)
    came = [[shard] for shard in shards]
    for _ in range(n - 1):
        sent = [mine[-1] for mine in came]
        came = [[*mine, sent[rank - 1]] for rank, mine in enumerate(came)]
    return [[mine[(rank - origin) % n] for origin in range(n)] for rank, mine in enumerate(came)]


# Now in JAX. In `shard_map` one program runs on all ranks. `axis_index` is the number of the rank,
# and `ppermute` sends, by a list of (from, to).
def all_gather(x: Array) -> Array:
    n, rank = lax.axis_size("x"), lax.axis_index("x")
    to_the_next = [(r, (r + 1) % n) for r in range(n)]
    came = [x]
    for _ in range(n - 1):
        came.append(lax.ppermute(came[-1], "x", to_the_next))
    return jnp.stack(came)[(rank - jnp.arange(n)) % n]


lists = simulated(list("abcd"))
print(*(f"rank {rank}: {' '.join(held)}" for rank, held in enumerate(lists)), sep="\n")
claim("as lists, every rank ends with every shard, in order", lists == [list("abcd")] * 4)

jax.set_mesh(jax.make_mesh((8,), ("x",)))
x = jax.device_put(jnp.arange(24.0), P("x"))  # three numbers on each rank


def compiled(gather: Callable[[Array], Array]) -> Compiled:
    """Compile over the ranks; the result has the shards of all ranks, end to end."""
    return jax.jit(jax.shard_map(gather, in_specs=P("x"), out_specs=P("x"))).lower(x).compile()


by_hand, built_in = compiled(all_gather), compiled(partial(lax.all_gather, axis_name="x"))
held = np.asarray(by_hand(x)).reshape(8, 24)
claim("in JAX, every one of 8 ranks holds all 8 shards, in order", (held == np.asarray(x)).all())
claim("as by lax.all_gather", np.array_equal(by_hand(x), built_in(x)))
claim("in 7 messages a rank", permutes(by_hand) == 7)
