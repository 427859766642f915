"""The checks of every call of a matmul with a collective, before anything is sent."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringcoll.collectives.axes import AxisName, rank_count
from ringcoll.collectives.sums import sums_of, wide_dtype
from ringcoll.costs.wire import Wire
from ringcoll.matmuls.labels import Labels
from ringcoll.matmuls.options import Options


def checked_wire(wire: Any, axis_name: AxisName, *factors: Array) -> Wire | None:
    """The wire of the messages, if the factors can be encoded.

    It is None on a single rank: it sends nothing, so it rounds nothing.
    """
    if wire is None:
        return None
    coded = sums_of(wire=wire)
    coded.check(None, factors, [False] * len(factors))
    return coded.wire if rank_count(axis_name) > 1 else None


def check_label(label: Any, labels: str, factor: str) -> None:
    """Refuse a label that is not among `labels`."""
    if label not in tuple(labels):  # "mk" is in "mkf"
        raise ValueError(f"{label!r} is not a label of {factor}; choose from {', '.join(labels)}")


def as_array(factor: Any) -> Array:
    """A factor as an array, or lax's error."""
    jax.typeof(factor)
    return jnp.asarray(factor)


def dtype_of(
    options: Options, labels: Labels, sizes: Any, x: Array, w: Array, preferred: Any
) -> np.dtype:
    """The dtype of the result by `jax.numpy.einsum`, which may refuse."""
    factors = [
        jax.ShapeDtypeStruct([sizes[label] for label in own], factor.dtype)
        for own, factor in ((labels.x, x), (labels.w, w))
    ]
    exact = {"precision": options.precision, "preferred_element_type": preferred}
    einsum = partial(jnp.einsum, f"{labels.x},{labels.w}->{labels.out}", **exact)
    out = jax.eval_shape(einsum, *factors)
    if jnp.issubdtype(out.dtype, jnp.bool_):  # lax has no sum of booleans over ranks
        raise TypeError("the product is of dtype bool; cast to int32 first")
    if options.sums.dtype is not None:
        wide_dtype(options.sums.dtype, out)
    return out.dtype
