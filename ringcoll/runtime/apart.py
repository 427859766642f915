"""Functions that XLA:CPU compiles by themselves, so that one formula always has the same bits.

Which operations XLA:CPU fuses depends on their shapes and on the operations around them, and the
bits of a result depend on that: fused operations round a * b + c only once, leave out the rounding
of a narrow float, and add the numbers of a sum in vectors of another width. So a rank that holds
two leaves of a tree would get other bits for each leaf than a rank that holds one.

A function that is *not inlined* is compiled only from its own operations and shapes. Its operands
and results are arrays in memory, rounded to their dtypes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from ringcoll.runtime.value_types import device_kind

Pytree = Any


def compiled_apart(function: Callable[..., Pytree]) -> Callable[..., Pytree]:
    """The function, compiled by itself on CPU; so is its gradient. Elsewhere nothing changes.

    If the result is called several times with operands of one type, the calls share one trace.

    Args:
        function: a function of pytrees of arrays; it must not close over traced arrays.
    """
    return _Apart(function)


class _Apart:
    """A function and its gradient, as calls that the compiler does not inline."""

    def __init__(self, function: Callable[..., Pytree]) -> None:
        self.function = function
        self.value = _not_inlined(function)
        self.with_pull_back = _not_inlined(lambda *operands: jax.vjp(function, *operands))
        self.pull_back = _not_inlined(_pulled_back)

    def __call__(self, *operands: Pytree) -> Pytree:
        if device_kind() not in ("cpu", None):  # None: it may be compiled for a CPU
            return self.function(*operands)
        return _value(self, *operands)


def _not_inlined(function: Callable[..., Pytree]) -> Callable[..., Pytree]:
    def inside(*operands: Pytree) -> Pytree:
        with set_xla_metadata(inlineable=None):  # functions that it calls may be inlined
            return function(*operands)

    compiled = jax.jit(inside)

    def call(*operands: Pytree) -> Pytree:
        with set_xla_metadata(inlineable="false"):
            return compiled(*operands)

    return call


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _value(apart: _Apart, *operands: Pytree) -> Pytree:
    return apart.value(*operands)


def _forward(apart: _Apart, *operands: Pytree) -> tuple[Pytree, Callable]:
    return apart.with_pull_back(*operands)


def _backward(apart: _Apart, pull_back: Callable, ct: Pytree) -> tuple[Pytree, ...]:
    # If the cotangents are constants, XLA:CPU computes with them as it compiles, in another order.
    return tuple(apart.pull_back(pull_back, lax.optimization_barrier(ct)))


def _pulled_back(pull_back: Callable, ct: Pytree) -> Pytree:
    """The cotangents; None for integers."""
    cts = pull_back(ct)
    return jax.tree.map(lambda x: None if x.dtype == jax.dtypes.float0 else x, cts)


_value.defvjp(_forward, _backward)
