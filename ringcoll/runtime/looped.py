"""A long stretch of rounds as a `lax.scan`: the size of the program does not depend on n.

In the rounds of a stretch every move sends what it brought in the round before (see
`schedules.schedule.stretches`), so the state of the loop is what arrived last.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from ringcoll.runtime.barriers import Order
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.parts import Layout, Part, PlannedRound, message, opened
from ringcoll.runtime.value_types import tree_varying

Carry = TypeVar("Carry")


def gather(
    name: str,
    steps: Sequence[PlannedRound],
    ranks: Ranks,
    layout: Layout,
    sent: list[Any],
    visit: Callable[[Carry, list[Part]], Carry],
    carry: Carry,
) -> tuple[Carry, list[Any]]:
    """Send the messages `sent`, then forward and visit what arrives, until the last round.

    It visits what it sends. It returns the carry, and what arrives in the last round.
    """
    moves, of_steps = steps[0].moves, zip(*(chain(*step.sent) for step in steps), strict=True)
    possible = {keys[0]: tuple(offset for _, offset in keys) for keys in of_steps}

    def body(state: tuple[Carry, list[Any]], i: Array) -> tuple[Any, None]:
        carry, last = state
        arriving = ranks.hops(name, moves, last)
        parts = [
            Part(
                ranks.origin(key[1], m.axis, i * m.shift),
                m.lane,
                layout.rows[m.lane],
                possible[key],
                x,
            )
            for m, of_move, keys in zip(moves, last, steps[0].sent, strict=True)
            for key, x in opened([of_move], [keys])
        ]
        return (visit(carry, parts), arriving), None

    return lax.scan(body, (carry, sent), jnp.arange(len(steps), dtype=jnp.int32))[0]


def reduce(
    name: str,
    steps: Sequence[PlannedRound],
    ranks: Ranks,
    sent: list[Any],
    layout: Layout,
    produce: Callable[[list[Part]], Sequence[Any]],
    combine: Callable[[Any, Any], Any],
    order: Order,
    zero: Array | None,
) -> list[Any]:
    """Send the partial sums `sent`, and add to what arrives, until the last round.

    Raw contributions, which were sent in the round before, may be of a narrower dtype. `zero` is
    tied to the sums. It returns the last sums.
    """
    moves, mine_of = steps[0].moves, steps[0].arrived

    def body(state: Any, i: Array) -> tuple[Any, None]:
        last, zero = state
        received = ranks.hops(name, moves, last)
        wanted = [
            Part(
                order.depend_on(ranks.origin(offset, m.axis, i * m.shift), zero),
                lane,
                layout.rows[lane],
            )
            for m, keys in zip(moves, mine_of, strict=True)
            for lane, offset in keys
        ]
        produced = dict(zip(chain(*mine_of), produce(wanted), strict=True))
        mine = [message(produced, keys) for keys in mine_of]
        mine = order.barrier_if_single(tree_varying(mine, ranks.axes))
        summed = [combine(r, x) for r, x in zip(received, mine, strict=True)]
        # The next products wait for these sums; otherwise compilers would merge the products.
        return order.barrier((summed, zero)), None

    return lax.scan(body, (sent, zero), jnp.arange(len(steps), dtype=jnp.int32))[0][0]
