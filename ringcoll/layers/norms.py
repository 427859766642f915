"""Norms over the features of each token; the tokens are sharded or replicated."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringcoll.collectives.axes import AxisName, axes_of
from ringcoll.collectives.public import public
from ringcoll.layers.parameters import parameters
from ringcoll.layers.replicas import shared


@public("layers.tensor_parallel.", arguments=False)
def rms_norm(params: Any, x: Array, axis_name: AxisName = (), *, epsilon: float = 1e-6) -> Array:
    """x divided by the root of the mean of its squares, times scale; in float32 or wider.

    `x: [..., d], scale: [d] -> [..., d]`, for the tokens that a rank has. Nothing is sent.

    Args:
        params: a mapping or an object with the parameters named above.
        x: tokens, sharded or replicated.
        axis_name: the axes over which tokens may be sharded; () for none.
        epsilon: added to the mean of the squares, under the root.

    Gradient: all tokens share the scale. Its gradient is summed by a `psum` over the axes of
    `axis_name` over which x varies. If there are such axes, JAX refuses forward mode (`jvp`).

    Raises:
        KeyError: there is no scale.
        ValueError: it does not have one number for each feature of x.

    Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).

    >>> norm = partial(tp.rms_norm, axis_name="x")
    >>> print(ranks(norm, (P(), P("x")))({"scale": jnp.ones(2)}, jnp.full((4, 2), 3.0)).round().T)
    [[1. 1. 1. 1.]
     [1. 1. 1. 1.]]
    """
    scale = _parameter("scale", parameters(params, "scale")["scale"], x, axis_name)
    wide = x.astype(scale.dtype)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean + epsilon) * scale).astype(x.dtype)


@public("layers.tensor_parallel.", arguments=False)
def layer_norm(params: Any, x: Array, axis_name: AxisName = (), *, epsilon: float = 1e-6) -> Array:
    """(x - mean) / standard deviation * scale + bias.

    `x: [..., d], scale, bias: [d] -> [..., d]`; the bias may be missing.

    Gradient and raises: as `rms_norm`.

    Source: Ba, Kiros and Hinton, "Layer normalization" (2016).

    >>> params = {"scale": jnp.ones(2), "bias": jnp.full(2, 5.0)}
    >>> norm = partial(tp.layer_norm, axis_name="x")
    >>> print(ranks(norm, (P(), P("x")))(params, jnp.arange(8.0).reshape(4, 2)).round().T)
    [[4. 4. 4. 4.]
     [6. 6. 6. 6.]]
    """
    found = parameters(params, "scale", optional=("bias",))
    scale = _parameter("scale", found["scale"], x, axis_name)
    wide = x.astype(scale.dtype)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
    y = wide * lax.rsqrt(variance + epsilon) * scale
    if found["bias"] is not None:
        y = y + _parameter("bias", found["bias"], x, axis_name)
    return y.astype(x.dtype)


def _parameter(name: str, value: Any, x: Array, axis_name: AxisName) -> Array:
    """A number for each feature, in float32 or wider, with as many dimensions as x."""
    value = jnp.asarray(value)
    if value.shape != x.shape[-1:]:
        raise ValueError(
            f"{name} is {value.shape}, x is {x.shape}; pass one number for each feature"
        )
    sharded = tuple(a for a in axes_of(axis_name) if a in jax.typeof(x).mat.varying)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    value = shared(value.astype(wide), sharded)
    return value.reshape((1,) * (x.ndim - 1) + value.shape)
