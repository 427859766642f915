"""Lesson 2: the same ring, as data.

In lesson 1 every rank does the same, so one short list describes them all. A move is
`(shift, offsets)`: *every rank r sends to rank r + shift the shards it holds from the ranks
r - offset*. Moves that happen at once are a round; rounds are a schedule. At first a
rank holds offset 0, its own shard.

    a ring of 4     round 1: (+1, [0])                round 2: (+1, [1])     round 3: (+1, [2])
    two-ended       round 1: (+1, [0]), (-1, [0])     round 2: (+1, [1])
    Bruck           round 1: (+1, [0])                round 2: (+2, [0, 1])

A list can be proved correct without running it, and code that runs one list runs them all. To see
which rank holds what after each round:
`python -m ringcoll draw all_gather --algorithm bruck -n 4`.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")  # eight ranks on any machine

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from examples.lessons.claims import claim, permutes
from ringcoll import Move, Schedule, ScheduleError, algorithms, lax


def refusal(schedule: Schedule) -> str:
    """What is wrong with a schedule, in words."""
    try:
        schedule.check()
    except ScheduleError as error:
        return str(error)
    return "nothing"


N = 8
ring = Schedule((N,), tuple((Move(+1, (t,)),) for t in range(N - 1)))
claim("the ring is proved, on no device at all", refusal(ring) == "nothing")
claim("the library has the same list", ring == algorithms.ring(N))

# Three wrong schedules, and the errors of `check`.
first, second, *rest = ring.rounds
broken = {
    "a round too few": (first, second, *rest[:-1]),
    "two rounds swapped": (second, first, *rest),
    "a round twice": (first, first, *rest),
}
for fault, rounds in broken.items():
    words = refusal(Schedule((N,), rounds))
    claim(f"refused, {fault}: {words}", words != "nothing")


# `ringcoll.lax` is `jax.lax`; its collectives also take an algorithm: a name, or any schedule.
def gather_by(schedule: Schedule) -> Compiled:
    gather = partial(lax.all_gather, axis_name="x", algorithm=schedule)
    return jax.jit(jax.shard_map(gather, in_specs=P("x"), out_specs=P("x"))).lower(x).compile()


jax.set_mesh(jax.make_mesh((N,), ("x",)))
x = jax.device_put(jnp.arange(3.0 * N), P("x"))
others = {"two_ended": algorithms.two_ended(N), "bruck": algorithms.bruck(N)}
for name, schedule in {"our ring": ring, **others}.items():
    moves = [move for moves in schedule.rounds for move in moves]
    print(f"{name}:", *(f"({move.shift:+}, {list(move.offsets)})" for move in moves))
    program = gather_by(schedule)
    held = np.asarray(program(x)).reshape(N, 3 * N)
    claim("it gathers every shard on every rank", (held == np.asarray(x)).all())
    depth, count = len(schedule.rounds), len(moves)
    claim(f"in {depth} rounds, {count} messages", permutes(program) == count)
