"""Scheduling hooks that order compute and messages; the engine calls them every round."""

from collections.abc import Sequence
from typing import TypeVar

from jax import Array

T = TypeVar("T")


class Order:
    """The order if no work hides messages: it changes nothing. Subclasses override its methods."""

    #: Whether the forwarding rounds of a gather are one loop, which includes the first visit.
    gathers_in_one_loop = False
    #: Whether the rounds of a reduce may be run without a loop.
    may_unroll = True
    #: Whether a reduce may run by turns (`turns.py`): an addition can be fused into a matmul.
    takes_turns = False
    #: Whether the first result allocates the buffer of all results.
    begins_with_work = False

    def tied(self, values: T) -> T:
        """The same values; an operation that needs one of them waits for all of them."""
        return values

    def apart(self, x: Array) -> Array:
        """The same array, computed only once: it is not fused into the operations that read it."""
        return x

    def late(self, x: Array, steps: int = 1) -> Array:
        """The same array, delayed by this many operations."""
        return x

    def after(self, x: Array, arrays: Sequence[Array]) -> Array:
        """The same array or index, available when these arrays are ready.

        The arrays stay in memory until then.
        """
        return x
