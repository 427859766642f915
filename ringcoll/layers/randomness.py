"""Random numbers that differ between ranks."""

import jax
from jax import Array, lax

from ringcoll.collectives.axes import AxisName, axes_of
from ringcoll.collectives.public import public
from ringcoll.layers.parameters import check_bound


@public("layers.", arguments=False)
def fold_rng_over_axis(key: Array, axis_name: AxisName) -> Array:
    """A different key for each rank of an axis, and the same along all other axes.

    `key: [] -> []`, typed as varying over `axis_name`. Fold over the axes along which ranks hold
    different data, and over no others. Always fold over the axes of the batch. Fold over the axis
    of tensor parallelism if the sequence or the heads are sharded over it. Do not fold over it if
    its ranks hold the same activations: all of them must drop the same ones.

    Nothing is sent: `jax.random.fold_in` of the rank's number, row-major over several axes.

    Raises:
        NameError: an axis is not bound.

    >>> def noise(key):
    ...     return jax.random.bits(layers.fold_rng_over_axis(key, "x"), (1,))
    >>> len(set(ranks(noise, P())(jax.random.key(0)).tolist()))  # a different number on every rank
    4
    """
    check_bound(axis_name)
    axes = axes_of(axis_name)
    return jax.random.fold_in(key, lax.axis_index(axes)) if axes else key
