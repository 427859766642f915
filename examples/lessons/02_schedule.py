# %% [markdown]
"""
# Lesson 2: the same ring, as data

In lesson 1 every rank does the same, so one short list describes them all. A move is
`(shift, offsets)`: *every rank r sends to rank r + shift the shards that it holds from the ranks
r - offset*. Moves that happen at once are a round. A list of rounds is a schedule. At first a rank
holds offset 0, its own shard.

    a ring of 4     round 1: (+1, [0])                round 2: (+1, [1])     round 3: (+1, [2])
    two-ended       round 1: (+1, [0]), (-1, [0])     round 2: (+1, [1])
    Bruck           round 1: (+1, [0])                round 2: (+2, [0, 1])

We can prove a list correct without running it. Code that runs one list runs them all. This command
shows what each rank holds after each round:
`python -m ringcoll draw all_gather --algorithm bruck -n 4`.
"""

# %%
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from ringcoll import Move, Schedule, ScheduleError, algorithms, lax
from ringcoll.learn import claim, messages, start

start(8)

# %% [markdown]
"""
## A proof without a device

`check` follows the moves. It says what is wrong, and where.
"""


# %%
def refusal(schedule: Schedule) -> str:
    """What is wrong with a schedule, in words."""
    try:
        schedule.check()
    except ScheduleError as error:
        return str(error)
    return "nothing"


N = 8
ring = Schedule((N,), tuple((Move(+1, (t,)),) for t in range(N - 1)))
claim("the ring is proved, without a device", refusal(ring) == "nothing")
claim("the library has the same list", ring == algorithms.ring(N))

# %% [markdown]
"""
Here are three wrong schedules, and the errors of `check`:
"""

# %%
first, second, *rest = ring.rounds
broken = {
    "one round is missing": (first, second, *rest[:-1]),
    "two rounds are swapped": (second, first, *rest),
    "one round occurs twice": (first, first, *rest),
}
for fault, rounds in broken.items():
    words = refusal(Schedule((N,), rounds))
    claim(f"refused, because {fault}:\n  {words}", words != "nothing")

# %% [markdown]
"""
## One engine for all lists

`ringcoll.lax` is `jax.lax`, but its collectives also take an algorithm: a name, or any schedule.
"""


# %%
def gather_by(schedule: Schedule) -> Compiled:
    gather = partial(lax.all_gather, axis_name="x", algorithm=schedule)
    return jax.jit(jax.shard_map(gather, in_specs=P("x"), out_specs=P("x"))).lower(x).compile()


def gathers(program: Compiled) -> bool:
    """Whether every rank ends with every shard."""
    return bool((np.asarray(program(x)).reshape(N, 3 * N) == np.asarray(x)).all())


jax.set_mesh(jax.make_mesh((N,), ("x",)))
x = jax.device_put(jnp.arange(3.0 * N), P("x"))
others = {"two_ended": algorithms.two_ended(N), "bruck": algorithms.bruck(N)}
for name, schedule in {"our ring": ring, **others}.items():
    moves = [move for moves in schedule.rounds for move in moves]
    print(f"{name}:", *(f"({move.shift:+}, {list(move.offsets)})" for move in moves))
    program = gather_by(schedule)
    claim("it gathers every shard on every rank", gathers(program))
    depth, count = len(schedule.rounds), len(moves)
    claim(f"in {depth} rounds, {count} messages", messages(program) == count)

# %% [markdown]
"""
A notebook shows a schedule as a picture:
"""

# %%
algorithms.bruck(4)

# %% [markdown]
"""
## Exercise 1: a ring backward

Write the schedule of a ring in which every rank r sends to rank r - 1. Prove it with `check`, then
gather with it.
"""

# %% tags=["solution"]
backward = Schedule((N,), tuple((Move(-1, (-t % N,)),) for t in range(N - 1)))
claim("the ring backward is proved", refusal(backward) == "nothing")
claim("and gathers", gathers(gather_by(backward)))

# %% [markdown]
"""
## Exercise 2: the long way first

Bruck's messages travel 1, 2, then 4 ranks. Write a schedule for 8 ranks whose messages travel 4, 2,
then 1 ranks, in three rounds. Does it send more shards than Bruck's? (After the first round of your
schedule, a rank holds the offsets 0 and 4.)
"""

# %% tags=["solution"]
far_first = Schedule((N,), ((Move(4, (0,)),), (Move(2, (0, 4)),), (Move(1, (0, 4, 2, 6)),)))
claim("the long way first is proved", refusal(far_first) == "nothing")
claim("and gathers", gathers(gather_by(far_first)))
sent = [sum(len(m.offsets) for r in s.rounds for m in r) for s in (far_first, others["bruck"])]
claim("both send 7 shards", sent == [7, 7])
