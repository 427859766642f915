"""Norms over the features of each token, where tokens are sharded or replicated."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringcoll.collectives.front_door import LEAVES, AxisName, axes_of
from ringcoll.layers.linear import leaves_of_rank
from ringcoll.layers.parameters import field, refusal
from ringcoll.layers.replicas import copied, for_tokens


def rms_norm(
    params: Any,
    x: Array,
    axis_name: AxisName = (),
    *,
    epsilon: float = 1e-6,
    order: str | None = None,
    leaves: int = LEAVES,
) -> Array:
    """x over the root of the mean of its squares, times scale; in float32 or wider.

    `x: [..., d], scale: [d] -> [..., d]`, for the tokens that a rank has. Nothing is sent.

    Args:
        params: a mapping or an object with what is named above.
        x: tokens, sharded or replicated.
        axis_name: the axes that tokens may be sharded over; () for none.
        epsilon: added to the mean of the squares, under the root.
        order, leaves: of the sums of gradients, as for `ringcoll.psum`; a leaf is 1/leaves of the
            sequence, the last dimension but one. They take effect where types are checked.

    Gradient: all tokens share the scale. Its gradient is summed by a `psum` over those axes of
    `axis_name` along which x varies.

    Raises:
        KeyError: there is no scale.
        ValueError: it does not have one number for each feature of x.

    Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).

    >>> norm = partial(tp.rms_norm, axis_name="x")
    >>> print(ranks(norm, (P(), P("x")))({"scale": jnp.ones(2)}, jnp.full((4, 2), 3.0)).round().T)
    [[1. 1. 1. 1.]
     [1. 1. 1. 1.]]
    """
    parameter = partial(_parameter, "rms_norm", x=x, axis_name=axis_name, tree=(order, leaves))
    scale = parameter("scale", field(params, "scale"))
    wide = x.astype(scale.dtype)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean + epsilon) * scale).astype(x.dtype)


def layer_norm(
    params: Any,
    x: Array,
    axis_name: AxisName = (),
    *,
    epsilon: float = 1e-6,
    order: str | None = None,
    leaves: int = LEAVES,
) -> Array:
    """(x - mean) / standard deviation * scale + bias.

    `x: [..., d], scale, bias: [d] -> [..., d]`; without a bias none is added.

    Gradient and raises: as `rms_norm`.

    Source: Ba, Kiros and Hinton, "Layer normalization" (2016).

    >>> params = {"scale": jnp.ones(2), "bias": jnp.full(2, 5.0)}
    >>> norm = partial(tp.layer_norm, axis_name="x")
    >>> print(ranks(norm, (P(), P("x")))(params, jnp.arange(8.0).reshape(4, 2)).round().T)
    [[4. 4. 4. 4.]
     [6. 6. 6. 6.]]
    """
    parameter = partial(_parameter, "layer_norm", x=x, axis_name=axis_name, tree=(order, leaves))
    scale = parameter("scale", field(params, "scale"))
    wide = x.astype(scale.dtype)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
    y = wide * lax.rsqrt(variance + epsilon) * scale
    bias = field(params, "bias", None)
    if bias is not None:
        y = y + parameter("bias", bias)
    return y.astype(x.dtype)


def _parameter(
    function: str,
    name: str,
    value: Any,
    x: Array,
    axis_name: AxisName,
    tree: tuple[str | None, int],
) -> Array:
    """A number for each feature, in float32 or wider, with as many dimensions as x.

    Where gradients are added by a tree, one for each token, those of a leaf being one copy.
    """
    value = jnp.asarray(value)
    if value.shape != x.shape[-1:]:
        words = f"{name} is {value.shape}, x is {x.shape}"
        raise refusal(ValueError, function, words, "pass one number for each feature")
    sharded = tuple(a for a in axes_of(axis_name) if a in jax.typeof(x).mat.varying)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    order, leaves = tree
    value = copied(value.astype(wide), sharded, order=order, leaves=leaves)
    if order is not None and sharded and x.ndim > 1:
        tokens = x.shape[-2]
        blocks = leaves_of_rank(function, tokens, sharded, leaves)
        value = for_tokens(value, tokens, blocks)
        return value.reshape((1,) * (x.ndim - 2) + x.shape[-2:])
    return value.reshape((1,) * (x.ndim - 1) + value.shape)
