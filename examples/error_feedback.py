"""Error feedback: what encoding a summed gradient loses is added to the next step's gradient.

The two functions have the form of optax's gradient transformations, but they do not need optax. Put
them into `optax.chain`, or call them directly. Their state is the residual: one float32 for each
parameter, sharded as the parameter. So a rank keeps 4 bytes per element that it has.

Put the transformation before the optimizer, after the gradients are summed. It encodes the
gradients with the codes of the wire, passes on the decoded values, and keeps the difference. So a
step gets only values that the codes can express, but over many steps their mean is that of the
exact gradients. It cannot recover what a `gradient_wire` rounded earlier, while gradients were
summed.

Source: Seide et al., "1-bit stochastic gradient descent" (2014); Karimireddy et al., "Error
feedback fixes SignSGD" (2019).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import ringcoll
from ringcoll.runtime.wire import decode, encode


class Feedback(NamedTuple):
    """The same fields as `optax.GradientTransformation`."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


def error_feedback(wire: ringcoll.Wire) -> Feedback:
    """g' = g + residual becomes decode(encode(g')); the residual is what that lost."""

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)

    def one(gradient: Array, residual: Array) -> tuple[Array, Array]:
        corrected = gradient.astype(jnp.float32) + residual
        sent = decode(wire, encode(wire, corrected), corrected.shape, corrected.dtype)
        return sent.astype(gradient.dtype), corrected - sent

    def update(gradients: Any, residuals: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves, structure = jax.tree.flatten(gradients)
        pairs = [one(*of) for of in zip(leaves, jax.tree.leaves(residuals), strict=True)]
        sent, left = zip(*pairs, strict=True)
        return jax.tree.unflatten(structure, sent), jax.tree.unflatten(structure, left)

    return Feedback(init, update)
