"""Keep work and messages in an order in which the work hides the messages.

Compilers for TPU and GPU schedule all operations at compile time. They prefer few large matmuls,
and would merge those of different rounds: then all messages would wait for one matmul. A barrier
after each round prevents that. XLA:CPU starts operations when they are ready, and ignores barriers
at run time: there, no work hides messages.
"""

from collections.abc import Sized
from dataclasses import dataclass
from typing import TypeVar

import jax.numpy as jnp
from jax import Array, lax

T = TypeVar("T")
Mine = TypeVar("Mine", bound=Sized)


@dataclass(frozen=True)
class Order:
    """How the operations of rounds are ordered.

    Attributes:
        has_barriers: whether the work of a round waits for the round before.
        always_loops: whether every stretch of three rounds or more that only forward is a loop.
    """

    has_barriers: bool = False
    always_loops: bool = False

    def barrier(self, values: T) -> T:
        """The same values; an operation that needs one of them waits for all of them."""
        return lax.optimization_barrier(values) if self.has_barriers else values

    def barrier_if_single(self, mine: Mine) -> Mine:
        """Keep XLA from fusing a lone contribution into its addition, which waits for a message."""
        return self.barrier(mine) if len(mine) == 1 else mine

    def zero(self) -> Array | None:
        """A zero to tie to sums, for `depend_on`; None without barriers."""
        return jnp.int32(0) if self.has_barriers else None

    def depend_on(self, origin: Array, zero: Array | None) -> Array:
        """The number of a rank, known only when the sums are there to which the zero is tied."""
        return origin if zero is None else lax.add(origin, zero)


#: No work hides messages.
NO_WORK = Order()
#: A gather whose results are put side by side, and a tour.
GATHER_PLACE = Order(has_barriers=True)
#: A gather whose results are added. In a loop without barriers, a compiler fuses a product and its
#: addition into one matmul, and the sum stays in place. Otherwise every round would copy the sum.
GATHER_ADD = Order(always_loops=True)
#: A reduce. In a loop, a compiler hides as much as without, and it cannot cut all slices of the
#: operands before the first round.
REDUCE = Order(has_barriers=True, always_loops=True)
