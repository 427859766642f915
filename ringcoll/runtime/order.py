"""What the engine asks while it runs rounds: in which order work and messages are to start."""

from collections.abc import Sequence
from typing import TypeVar

from jax import Array

T = TypeVar("T")


class Order:
    """The order where no work hides messages: it changes nothing. Others override its methods."""

    #: Whether the forwarding rounds of a gather are one loop, which includes the first visit.
    gathers_in_one_loop = False
    #: Whether an odd number of forwarding rounds of a gather is a loop of two rounds a turn. It
    #: includes the last visit, and so sends one message more than is needed.
    gathers_in_pairs = False
    #: Whether the rounds of a reduce may be written out.
    may_unroll = True
    #: Whether a reduce may run by turns (`turns.py`): an addition can be fused into a matmul.
    takes_turns = False
    #: Whether the first result allocates the buffer of all results.
    begins_with_work = False

    def tied(self, values: T) -> T:
        """The same values; an operation that needs one of them waits for all of them."""
        return values

    def apart(self, x: Array) -> Array:
        """The same array, computed once, and not fused into every operation that reads it."""
        return x

    def late(self, x: Array, steps: int = 1) -> Array:
        """The same array, delayed by this many operations."""
        return x

    def after(self, x: Array, arrays: Sequence[Array]) -> Array:
        """The same array, or index, once these arrays are ready; they stay in memory until then."""
        return x
