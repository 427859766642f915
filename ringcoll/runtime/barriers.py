"""Who puts the operations of a program in order, and what keeps work under the wire then.

A compiler (for TPU, for GPU) orders all of them beforehand. It would rather have few large
products than those of rounds: barriers keep it from merging what is of different rounds.

XLA:CPU starts what has its operands, first come, first served; of barriers only the compiler
before it knows. A permute keeps its thread until all has come. A product is handed to another
thread, but only if something else stands in line. So what is sent stands back a little (`late`),
for the product of the same time to come just before it; and products take turns, or all would be
made before anything is sent. A turn is a zero that is computed from what has to be there, and is
added to an index. It does one thing more: memory that it is read from is not used again before,
so that what comes by the wire does not have to wait for a product that still reads there.
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
    """Of operations that nothing needs to be known about: there is no work to hide under."""

    #: Whether rounds of a gather that only forward are one loop, which has the first visit too.
    gathers_in_one_loop = False
    #: Whether rounds of a gather that only forward, if they are odd in number, are a loop of two
    #: rounds a turn. It has the last visit too, and so one hop more than is needed.
    gathers_in_pairs = False
    #: Whether the rounds of a reduce may be written out.
    may_unroll = True
    #: Whether a reduce may be run by turns, because an addition can be a part of a matmul.
    takes_turns = False
    #: Whether a buffer of results is made of the first one.
    begins_with_work = False

    def tied(self, values: T) -> T:
        """The same values: what needs one of them comes after all of them."""
        return values

    def apart(self, x: Array) -> Array:
        """The same array, computed once, by itself, and not in all that reads it."""
        return x

    def late(self, x: Array, steps: int = 1) -> Array:
        """The same array, so many operations later."""
        return x

    def after(self, x: Array, arrays: Sequence[Array]) -> Array:
        """The same array, when these arrays are there, which are kept until then."""
        return x

    def in_turn(self, index: Array, arrays: Sequence[Array]) -> Array:
        """The same index, when these arrays are there, which are kept until then."""
        return index


class Beforehand(Order):
    """By a compiler."""

    # It hides as much under a loop, and cannot cut all slices of the operands before the
    # first round (`benchmarks/pages/overlap.md`).
    may_unroll = False
    takes_turns = True

    def tied(self, values: T) -> T:
        return lax.optimization_barrier(values)


class Pairing(Beforehand):
    """By a compiler, for a gather whose hops are shorter than its products.

    Two rounds are the whole program, and what comes in one is sent from where it came in the next:
    in a loop of one round a turn, it would be copied.
    """

    gathers_in_pairs = True


class Summing(Beforehand):
    """By a compiler, for a gather whose products are added up: in a loop and without barriers.

    The compiler then makes one matmul of a product and its addition, and the sum stays in place.
    Where rounds are written out, or have barriers, the sum is copied in every round.
    """

    gathers_in_one_loop = True

    def tied(self, values: T) -> T:
        return values


class WhenReady(Order):
    """By what is ready. (That it changes nothing, no compiler has found yet.)"""

    # An empty one is cleared when the program starts, and the first round waits for that.
    begins_with_work = True

    def apart(self, x: Array) -> Array:
        return lax.optimization_barrier(x)  # from jax 0.11 on; compilers before look through it

    def late(self, x: Array, steps: int = 1) -> Array:
        if not x.size:
            return x
        bit = _bit(x)
        for _ in range(steps - 1):  # by reductions, which are not fused with what follows
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
    """0 or 1, by the first element; under vmap, too."""
    return _first_bit(lax.stop_gradient(x))


@custom_vmap
def _first_bit(x: Array) -> Array:
    return _bits(x[(0,) * x.ndim])


@_first_bit.def_vmap
def _first_bit_of_all(size: int, batched: Sequence[bool], xs: Array) -> tuple[Array, bool]:
    return _first_bit(xs[0]), False  # one for all, or an index would be many


def _bits(x: Array) -> Array:
    return (x != 0).astype(jnp.int32)


def order_of_work(*, sums: bool = False, pairs: bool = False) -> Order:
    """The order on the mesh that is traced for.

    Args:
        sums: for a gather whose products are added.
        pairs: for a gather whose hops are shorter than its products.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # On axes that are left to the compiler, the first element of an array may be anywhere.
    is_manual = set(mesh.manual_axes) == set(mesh.axis_names)
    # Within a process there is no wire to hide, and this takes more memory. (Of a mesh within
    # one of several, nothing says so before the program is lowered.)
    if is_manual and are_cpu_processes():
        return WhenReady()
    # Without a barrier XLA:CPU may round a product and its addition once: then the bits of one
    # process would not be those of several.
    if sums and device_kind() != "cpu":
        return Summing()
    return Pairing() if pairs else Beforehand()
