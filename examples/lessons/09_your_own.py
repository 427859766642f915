# %% [markdown]
"""
# Lesson 9: an algorithm of your own

Bruck doubles the shards held in each round, but sends in one direction only. On a physical ring, a
rank can send in both directions at once. So send everything held in both directions. Then each
round trebles the shards held:

    held after round 1      -1 0 1                     offsets, from the shifts +1 and -1
    after round 2     -4 -3 -2 -1 0 1 2 3 4            from +3 and -3
    after round 3     -13 ... 13                       from +9 and -9

The last round sends only the shards that are still missing. `both_ways` below is this algorithm, in
ten lines. The library does everything with your algorithm that it does with its own. Change the
lines, and run this again.
"""

# %%
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from ringcoll import Move, Schedule, ScheduleError, costs, draw, lax
from ringcoll.costs import price
from ringcoll.learn import claim, messages, start

start(8)

# %% [markdown]
"""
## Ten lines
"""

# %%


def both_ways(n: int) -> Schedule:
    """Treble the shards held in every round, by one message forward and one back."""
    rounds: list[tuple[Move, ...]] = []
    reach = 0  # held are -reach, ..., reach
    while (width := 2 * reach + 1) < n:
        missing = range(reach + 1, n - reach)
        half = min(width, -(-len(missing) // 2))
        new = {width: missing[:half], -width: missing[half:][-width:]}  # by shift
        moves = (Move(s, tuple((o - s) % n for o in come)) for s, come in new.items() if come)
        rounds.append(tuple(moves))
        reach += width
    return Schedule((n,), tuple(rounds))


def compiled(collective: Callable[..., Array], x: Array, **options: Any) -> Compiled:
    call = partial(collective, axis_name="x", tiled=True, **options)
    return jax.jit(jax.shard_map(call, in_specs=P("x"), out_specs=P("x"))).lower(x).compile()


# %% [markdown]
"""
## Proved
"""

# %%
n = 8
for number, move in both_ways(n).numbered_moves():
    print(f"round {number}: shift {move.shift:+}, offsets {move.offsets}")
claim("proved, on 1 to 100 ranks", all(both_ways(size).check() for size in range(1, 101)))
rounds = [len(both_ways(size).rounds) for size in (3, 9, 10, 27, 28, 81, 82)]
claim("in log3 n rounds, rounded up", rounds == [1, 2, 3, 3, 4, 4, 5])


# %% [markdown]
"""
## Run

Run forward, the schedule is an all-gather. Run backward, it is a reduce-scatter.
"""

# %%
jax.set_mesh(jax.make_mesh((n,), ("x",)))
x = jax.device_put(jnp.arange(1024.0 * n), P("x"))
ours = compiled(lax.all_gather, x, algorithm=both_ways)
held = np.asarray(ours(x)).reshape(n, -1)
claim("run: every rank gathers every shard", (held == np.asarray(x)).all())
count = sum(map(len, both_ways(n).rounds))
claim(f"in {count} messages", messages(ours) == count)
vectors = np.outer(np.arange(1, n + 1), x).astype(np.float32)  # rank r's: r + 1 times x
operand = jax.device_put(vectors.reshape(-1), P("x"))
sums = compiled(lax.psum_scatter, operand, algorithm=both_ways)(operand)
claim("run backward: every rank has the sum of its shard", np.array_equal(sums, vectors.sum(0)))

# %% [markdown]
"""
## Priced

The model has eight chips in a ring, with the rates of v5e chips, and 1 KiB on each rank.
"""

# %%
seconds = {}
for name in ("ring", "bruck", "ours"):
    paid = price("all_gather", both_ways if name == "ours" else name, (n,), network=(n,))
    seconds[name] = costs.seconds(paid, 1024, costs.DEVICES["v5e"])
    words = f"{paid.startups} alpha, {paid.link} shards on the busiest link"
    print(f"modelled, {name}: {words}, {1e6 * seconds[name]:.2f} us")
claim("priced: ours is the fastest", seconds["ours"] == min(seconds.values()))

# %% [markdown]
"""
## Timed, and drawn

The two programs run in turn, a hundred times. The ratio is the median. On one CPU, named algorithms
are slower than lax: eight ranks are one process, and messages are copies.
"""

# %%
built_in = compiled(jax.lax.all_gather, x)


def timed(program: Compiled) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(program(x))
    return time.perf_counter() - begin


ratio = np.median([timed(ours) / timed(built_in) for _ in range(100)])
expected = ", as expected on one CPU" if ratio > 1 else ""
print(f"measured: {ratio:.2f} times as long as lax{expected}")
print(draw.as_text(draw.plan("all_gather", both_ways, (n,))))

# %%
draw.plan("all_gather", both_ways, (n,))

# %% [markdown]
"""
## Exercise 1: break it

Take the last move out of the last round of `both_ways(8)`. Before you run it: which shards are
missing, and on which ranks? Then read what `check` says.
"""

# %% tags=["solution"]
*others, last = both_ways(n).rounds
try:
    Schedule((n,), (*others, last[:-1])).check()
    refusal = ""
except ScheduleError as error:
    refusal = str(error)
missing = both_ways(n).arrivals(last[-1])
print(refusal)
claim(f"every rank r misses the shards of r - {missing[0]} and r - {missing[1]}", missing == (5, 6))
claim("check names the first of them", f"offset {missing[0]} never arrives" in refusal)

# %% [markdown]
"""
## Exercise 2: where the ring wins

`both_ways` needs few rounds, but its messages travel far, over many links. On 27 chips in a ring,
at how many bytes on each rank does `"bidirectional_ring"` become faster? (Find the first power of
two.)
"""

# %% tags=["solution"]
chips = 27
paid_by_ring = price("all_gather", "bidirectional_ring", (chips,), network=(chips,))
paid_by_ours = price("all_gather", both_ways, (chips,), network=(chips,))
model = costs.DEVICES["v5e"]
wins = [
    size
    for size in (2**k for k in range(4, 31))
    if costs.seconds(paid_by_ring, size, model) < costs.seconds(paid_by_ours, size, model)
]
links = paid_by_ours.link, paid_by_ring.link
print(f"shards on the busiest link: {links[0]} by both_ways, {links[1]} by the ring")
claim(f"the bidirectional ring is faster from {wins[0]} bytes on", wins[-1] == 2**30)
