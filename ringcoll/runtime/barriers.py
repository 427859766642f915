"""Keep matmuls and messages in an order in which the matmuls hide the messages.

Compilers for TPU and GPU schedule all operations at compile time. They prefer few large matmuls,
and would merge those of different rounds. Barriers prevent that. XLA:CPU starts operations at run
time, when they are ready: see `cpu/when_ready.py`.
"""

from typing import TypeVar

import jax
from jax import lax

from ringcoll.runtime.cpu.when_ready import WhenReady
from ringcoll.runtime.hosts import are_cpu_processes
from ringcoll.runtime.order import Order
from ringcoll.runtime.value_types import device_kind

T = TypeVar("T")


class Beforehand(Order):
    """The order if a compiler schedules everything at compile time."""

    # In a loop, a compiler hides as much, and it cannot cut all slices of the operands before the
    # first round.
    may_unroll = False
    takes_turns = True

    def tied(self, values: T) -> T:
        return lax.optimization_barrier(values)


class Summing(Beforehand):
    """The order for a gather whose products are added: a loop without barriers.

    The compiler then fuses a product and its addition into one matmul, and the sum stays in place.
    Without a loop, or with barriers, every round would copy the sum.
    """

    gathers_in_one_loop = True

    def tied(self, values: T) -> T:
        return values


def order_of_work(*, sums: bool = False) -> Order:
    """The order for the mesh of the program that is being traced.

    Args:
        sums: for a gather whose products are added.
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
    return Beforehand()
