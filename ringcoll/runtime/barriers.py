"""Keeps matmuls and messages in an order in which the matmuls hide the messages.

Compilers for TPU and GPU schedule all operations beforehand. They prefer few large matmuls, and
would merge those of different rounds. Barriers prevent that.

XLA:CPU starts any operation whose operands are ready, first come, first served, and ignores
barriers at run time. A permute blocks its thread until its message has arrived. A matmul goes to
another thread only if another operation is ready too. So a message is delayed a little (`late`),
and the matmul of its round starts just before it. Matmuls also wait for each other (`in_turn`);
otherwise all would run before the first message. They wait through an index: a zero that is
computed from the arrays that must be ready is added to it. This also keeps these arrays in memory
until then, so that an arriving message need not wait for a matmul that still reads its buffer.
"""

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from ringcoll.runtime.hosts import are_cpu_processes
from ringcoll.runtime.value_types import device_kind

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
        """The same array, once these arrays are ready; they stay in memory until then."""
        return x

    def in_turn(self, index: Array, arrays: Sequence[Array]) -> Array:
        """The same index, once these arrays are ready; they stay in memory until then."""
        return index


class Beforehand(Order):
    """A compiler schedules everything beforehand."""

    # It hides as much under a loop, and cannot cut all slices of the operands before the
    # first round (`benchmarks/pages/overlap.md`).
    may_unroll = False
    takes_turns = True

    def tied(self, values: T) -> T:
        return lax.optimization_barrier(values)


class Pairing(Beforehand):
    """A compiler schedules a gather whose hops are shorter than its products.

    The loop has two rounds a turn. A shard that arrives in one round is sent in the next from the
    buffer that it arrived in. A loop of one round a turn would copy it.
    """

    gathers_in_pairs = True


class Summing(Beforehand):
    """A compiler schedules a gather whose products are added up: a loop without barriers.

    The compiler then fuses a product and its addition into one matmul, and the sum stays in place.
    If rounds are written out, or have barriers, every round copies the sum.
    """

    gathers_in_one_loop = True

    def tied(self, values: T) -> T:
        return values


class WhenReady(Order):
    """Operations start when their operands are ready; no compiler removes these yet."""

    # An empty buffer is cleared when the program starts, and the first round would wait for it.
    begins_with_work = True

    def apart(self, x: Array) -> Array:
        return lax.optimization_barrier(x)  # has an effect from jax 0.11 on

    def late(self, x: Array, steps: int = 1) -> Array:
        if not x.size:
            return x
        bit = _bit(x)
        for _ in range(steps - 1):  # reductions are not fused with what follows
            bit = lax.reduce_max(jnp.where(bit <= 1, _bits(x.reshape(-1)[:8]), 0), (0,))
        return jnp.where(bit <= 1, x, jnp.zeros_like(x))

    def after(self, x: Array, arrays: Sequence[Array]) -> Array:
        return jnp.where(self.in_turn(jnp.int32(0), arrays) >= 0, x, jnp.zeros_like(x))

    def in_turn(self, index: Array, arrays: Sequence[Array]) -> Array:
        for x in arrays:
            if x.size:
                index = lax.add(index, lax.min(_bit(x), jnp.int32(0)))
        return index


def _bit(x: Array) -> Array:
    """0 or 1, read off the first element; works under vmap too."""
    return _first_bit(lax.stop_gradient(x))


@custom_vmap
def _first_bit(x: Array) -> Array:
    return _bits(x[(0,) * x.ndim])


@_first_bit.def_vmap
def _first_bit_of_all(size: int, batched: Sequence[bool], xs: Array) -> tuple[Array, bool]:
    return _first_bit(xs[0]), False  # one bit for the whole batch: an index must stay a scalar


def _bits(x: Array) -> Array:
    return (x != 0).astype(jnp.int32)


def order_of_work(*, sums: bool = False, pairs: bool = False) -> Order:
    """The order for the mesh of the program that is being traced.

    Args:
        sums: for a gather whose products are added.
        pairs: for a gather whose hops are shorter than its products.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # If the compiler shards an axis, the first element of an array may be on any device.
    is_manual = set(mesh.manual_axes) == set(mesh.axis_names)
    # Within one process there is no wire to hide, and `WhenReady` takes more memory. (Whether a
    # mesh lies within one of several processes is not known before lowering.)
    if is_manual and are_cpu_processes():
        return WhenReady()
    # Without a barrier XLA:CPU may fuse a product and its addition, and round once. Then the bits
    # in one process would differ from those in several.
    if sums and device_kind() != "cpu":
        return Summing()
    return Pairing() if pairs else Beforehand()
