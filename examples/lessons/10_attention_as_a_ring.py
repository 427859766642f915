# %% [markdown]
"""
# Lesson 10: attention as a ring

Each rank has 1/n of the positions of a long sequence. But its queries need the keys and values of
all ranks. The result of a query is a mean of values, weighted by exp(score). A rank can compute it
shard by shard. It keeps the greatest score so far, the sum of exp(score - greatest), and the sum of
the values with these weights. When a shard has a greater score, the rank scales both sums down.
This *online softmax* needs the keys and values of one shard at a time. So the ring of lesson 5 can
bring them.

A causal mask leaves early ranks idle, unless each rank has an early and a late part of the
sequence: a *zigzag*. For the gradients, keys and values travel around the ring again. The gradients
of each shard travel behind it: every rank adds its own term, until they are back on the rank of the
shard. That is a *tour*. This command draws a tour of four ranks, which is in `tour.svg`:
`python -m ringcoll draw tour --algorithm ring -n 4 --svg examples/lessons/tour.svg`.
"""

# %%
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from ringcoll import algorithms
from ringcoll.layers import context_parallel as cp
from ringcoll.learn import claim, messages, start
from ringcoll.schedules.tour import tour

start(8)
N, S, D = 8, 1024, 64
Attention = Callable[[Array, Array, Array], Array]
jax.set_mesh(jax.make_mesh((N,), ("x",)))

# %% [markdown]
"""
## By hand

On one device `q`, `k`, `v` and the result are `[S, D]`. On each rank they are `[S/N, D]`.
"""

# %%


def alone(q: Array, k: Array, v: Array) -> Array:
    past = jnp.tri(S, dtype=bool)  # a position sees itself and those before it
    return jax.nn.softmax(jnp.where(past, q @ k.T / D**0.5, -jnp.inf)) @ v


def by_hand(q: Array, k: Array, v: Array) -> Array:
    me, each = lax.axis_index("x"), jnp.arange(S // N)
    greatest, total, values = jnp.full(S // N, -jnp.inf), jnp.zeros(S // N), jnp.zeros_like(v)
    kv = jnp.stack([k, v])
    for step in range(N):
        k, v = kv
        if step < N - 1:
            kv = lax.ppermute(kv, "x", [(r, (r + 1) % N) for r in range(N)])  # send first
        origin = (me - step) % N
        past = origin * S // N + each <= me * S // N + each[:, None]
        scores = jnp.where(past, q @ k.T / D**0.5, -jnp.inf)
        before, greatest = greatest, jnp.maximum(greatest, scores.max(-1))
        scale, weights = jnp.exp(before - greatest), jnp.exp(scores - greatest[:, None])
        total = scale * total + weights.sum(-1)
        values = scale[:, None] * values + weights @ v
    return values / total[:, None]


def ours(q: Array, k: Array, v: Array) -> Array:
    q, k, v = (x[None, :, None] for x in (q, k, v))  # one sequence, one head
    return cp.attention(q, k, v, "x", causal=True, layout="zigzag", algorithm="ring")[0, :, 0]


class Passes:
    """The forward and the backward program, their messages, and what is kept between them."""

    def __init__(self, attention: Attention, layout: str) -> None:
        over_ranks = jax.shard_map(attention, in_specs=P("x"), out_specs=P("x"))
        *operands, ct = jax.device_put([cp.arrange(x, N, layout, dim=0) for x in inputs], P("x"))
        both = jax.jit(lambda *operands: jax.vjp(over_ranks, *operands))
        forward = both.lower(*operands).compile()
        out, pull_back = forward(*operands)
        backward = jax.jit(lambda pull_back, ct: pull_back(ct)).lower(pull_back, ct).compile()
        self.messages: tuple[int, int] = messages(forward), messages(backward)
        #: What a rank keeps, in shards of keys and values.
        self.kept: float = sum(x.nbytes for x in jax.tree.leaves(pull_back)) / (4 * S * 2 * D)
        results = (np.asarray(x) for x in (out, *backward(pull_back, ct)))
        self.results = [cp.restore(jnp.asarray(x), N, layout, dim=0) for x in results]

    def is_right(self) -> bool:
        """Whether result and gradients are those of one device, up to rounding."""
        return all(abs(a - b).max() < 1e-4 for a, b in zip(self.results, expected, strict=True))


# %% [markdown]
"""
## Results and messages
"""

# %%
rng = np.random.default_rng(0)
inputs = [jnp.asarray(rng.standard_normal((S, D), np.float32)) for _ in range(4)]
out, pull_back = jax.vjp(alone, *inputs[:3])
expected = out, *pull_back(inputs[3])
loop = Passes(by_hand, "contiguous")
claim("by hand: attention and its gradients as on one device", loop.is_right())
claim("7 messages of keys and values forward, 7 backward", loop.messages == (7, 7))

# %% [markdown]
"""
## Which rank works when

Cut the sequence into 2N parts, two on each rank. The queries of a part see its own keys and those
of the parts before it. Each pair of parts is a tile of scores. In round k, rank r has the keys of
rank r - k.
"""

# %%
r, k = np.arange(N)[:, None], np.arange(N)
for layout in ("contiguous", "zigzag"):
    parts = np.asarray(cp.arrange(jnp.arange(2 * N), N, layout, dim=0)).reshape(N, 2)
    tiles = (parts[:, :, None, None] >= parts).sum((1, 3))[r, (r - k) % N]  # by rank and round
    busiest = tiles.max(0)
    print(f"{layout}: tiles of each rank {tiles.sum(1)}")
    print(f"  of the busiest one by round {busiest}")
    if layout == "contiguous":
        claim("3 tiles on the first rank, 31 on the last", [*tiles.sum(1)[[0, -1]]] == [3, 31])
        claim("in later rounds, ranks wait for one with 4 tiles", set(busiest[1:]) == {4})
    else:
        claim("in a zigzag, 17 tiles on every rank", set(tiles.sum(1)) == {17})
        claim("2 in each round after the first, so no rank waits", (tiles[:, 1:] == 2).all())

# %% [markdown]
"""
## The tour of a ring

On every rank r, offset o means the shard of rank r - o.
"""

# %%
path = tour(algorithms.ring(N))
arrive = {o: i for i, move in path.out.numbered_moves() for o in path.out.arrivals(move)}
home = {o: i for i, move in path.back.numbered_moves() for o in path.back.arrivals(move)}
leave = {o: path.rounds + 1 - i for o, i in home.items()}  # `back` runs backward
for now in range(1, path.rounds + 1):
    keys, sums = ([f"r - {o}" for o in at if at[o] == now] for at in (arrive, leave))
    print(f"round {now}: keys of {keys or 'none'} arrive, gradients of {sums or 'none'} leave")
gaps = {leave[o] - arrive[o] for o in range(1, N)}
claim("a rank uses keys one round after they arrive; their gradients leave next", gaps == {2})
claim("so the last gradients come home in round 9", path.rounds == N + 1)

ring = Passes(ours, "zigzag")
claim("ours: attention and its gradients as on one device", ring.is_right())
claim("7 messages forward; backward, 7 again and 7 of gradients", ring.messages == (7, 14))
print(f"kept for the gradients, in shards: by hand {loop.kept:.1f}, ours {ring.kept:.1f}")
claim("by hand, every shard and its scores are kept", loop.kept > 2 * N)
claim("ours keeps only this rank's shard, its queries and its results", ring.kept < 2.1)

# %% [markdown]
"""
## Exercise 1: stripes

In a *striped* layout rank r has the positions r, r + N, r + 2N and so on. For each rank and round,
count the pairs of a query and a key that the query sees. Does any rank wait?
(`cp.arrange(x, N, "striped", dim=0)` arranges an array.)
"""

# %% tags=["solution"]
striped = np.asarray(cp.arrange(jnp.arange(S), N, "striped", dim=0)).reshape(N, S // N)
pairs = np.array(
    [[(striped[a][:, None] >= striped[(a - b) % N]).sum() for b in range(N)] for a in range(N)]
)
print("pairs of each rank in the first three rounds:", *pairs[:, :3].T.tolist(), sep="\n  ")
most = pairs.max(0) - pairs.min(0)
claim("ranks differ by at most S/N pairs, of about S^2 / 2N^2", most.max() <= S // N)

# %% [markdown]
"""
## Exercise 2: a window

Let a query see only itself and the S/N positions before it (a sliding window). From how many ranks
does a rank need keys in the contiguous layout, and in the striped one? Which layout is right for
windows, and how many messages does it take?
"""

# %% tags=["solution"]
for name, wanted in {"contiguous": 2, "striped": N}.items():
    positions = np.asarray(cp.arrange(jnp.arange(S), N, name, dim=0)).reshape(N, S // N)
    behind = positions[:, :, None, None] - positions  # [rank, query, rank of the key, key]
    seen = ((behind >= 0) & (behind <= S // N)).any((1, 3))
    needed = seen[-1].sum()
    claim(f"{name}: the last rank needs the keys of {needed} ranks", needed == wanted)
print("The contiguous layout needs one message, with the keys and values of the rank before.")
