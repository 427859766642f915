"""Make matmuls of XLA:CPU hide messages between processes.

XLA:CPU starts any operation whose operands are ready, first come, first served, and ignores
barriers at run time. A permute blocks its thread until its message has arrived. A matmul goes to
another thread only if another operation is ready too. So a message is delayed a little (`late`),
and the matmul of its round starts just before it. Matmuls also wait for each other (`after`);
otherwise all would run before the first message. They wait through an index: the code computes a
zero from the arrays that must be ready, and adds it to the index. This also keeps these arrays in
memory until then, so an arriving message need not wait for a matmul that still reads its buffer.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from ringcoll.runtime.order import Order


class WhenReady(Order):
    """The order if operations start when their operands are ready.

    XLA does not currently optimize away the operations that it adds.
    """

    # An empty buffer is cleared at the start of the program; the first round would wait for that.
    begins_with_work = True

    def apart(self, x: Array) -> Array:
        return lax.optimization_barrier(x)  # this has an effect only from jax 0.11 on

    def late(self, x: Array, steps: int = 1) -> Array:
        if not x.size:
            return x
        bit = _bit(x)
        for _ in range(steps - 1):  # reductions are not fused with later operations
            bit = lax.reduce_max(jnp.where(bit <= 1, _bits(x.reshape(-1)[:8]), 0), (0,))
        return jnp.where(bit <= 1, x, jnp.zeros_like(x))

    def after(self, x: Array, arrays: Sequence[Array]) -> Array:
        is_index = not x.ndim and x.dtype == jnp.int32
        index = x if is_index else jnp.int32(0)
        for array in arrays:
            if array.size:
                index = lax.add(index, lax.min(_bit(array), jnp.int32(0)))
        return index if is_index else jnp.where(index >= 0, x, jnp.zeros_like(x))


def _bit(x: Array) -> Array:
    """0 or 1, from the first element of x; it works under vmap too."""
    return _first_bit(lax.stop_gradient(x))


@custom_vmap
def _first_bit(x: Array) -> Array:
    return _bits(x[(0,) * x.ndim])


@_first_bit.def_vmap
def _first_bit_of_all(size: int, batched: Sequence[bool], xs: Array) -> tuple[Array, bool]:
    return _first_bit(xs[0]), False  # one bit for the whole batch: an index must stay a scalar


def _bits(x: Array) -> Array:
    return (x != 0).astype(jnp.int32)
