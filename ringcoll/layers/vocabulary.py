"""A vocabulary that is sharded over ranks: from tokens to losses, without whole logits."""

from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec

from ringcoll.choose.table import Algorithm
from ringcoll.collectives.all_gather import psum_scatter
from ringcoll.collectives.all_reduce import pmax, psum
from ringcoll.collectives.axes import AxisName, axes_of, rank_count
from ringcoll.collectives.public import public
from ringcoll.layers.linear import check_sequence, column_linears
from ringcoll.layers.parameters import check_bound, parameters
from ringcoll.matmuls.options import LayerOptions, with_options
from ringcoll.runtime.value_types import sharded_dims, zeros


@public("layers.tensor_parallel.", arguments=False)
def embed(
    params: Any,
    tokens: Array,
    axis_name: AxisName,
    *,
    sequence_parallel: bool = True,
    algorithm: Algorithm = "auto",
) -> Array:
    """The row of each token in a table; each rank has some rows of the table.

    `tokens: [..., s], embedding: [v/n, d] -> [..., s/n, d]`; with `sequence_parallel=False`
    `[..., s, d]` on every rank. The tokens are the same on every rank. A token outside the table
    gives NaNs, as in `jax.numpy.take`.

    Steps and bytes: a `psum_scatter`, or a `psum`, of the result.

    Gradient: an all-gather, or nothing; then each rank adds to its own rows. With
    `sequence_parallel=False` it is as for `row_linear`. There is forward mode (`jvp`).

    Raises:
        TypeError: the tokens are not integers.
        ValueError: the sequence is not divisible by n.

    Source: Shoeybi et al., "Megatron-LM" (2019).

    >>> embed = partial(tp.embed, axis_name="x")
    >>> params, specs = {"embedding": jnp.arange(16.0).reshape(8, 2)}, {"embedding": P("x")}
    >>> print(ranks(embed, (specs, P()))(params, jnp.array([7, 0, 3, 3])).T)
    [[14.  0.  6.  6.]
     [15.  1.  7.  7.]]
    """
    table = jnp.asarray(parameters(params, "embedding")["embedding"])
    tokens = _integers("tokens", tokens)
    check_bound(axis_name)
    mine, row, is_in = _own(tokens, table.shape[0], axis_name)
    none = lax.neg(jnp.zeros((), table.dtype))  # -0.0 + x is x, also if that is -0.0
    rows = jnp.where(mine[..., None], _rows(table, row), none)
    rows = jnp.where(is_in[..., None], rows, jnp.nan)
    if not sequence_parallel:
        return psum(rows, axis_name, algorithm=algorithm)
    check_sequence(tokens.shape[-1], axis_name)
    axes, dim = axes_of(axis_name), tokens.ndim - 1
    return psum_scatter(rows, axes, scatter_dimension=dim, tiled=True, algorithm=algorithm)


def _rows(table: Array, row: Array) -> Array:
    """These rows of a table."""
    if not (sharded_dims(row) or sharded_dims(table)):
        return jnp.take(table, row, axis=0)
    like, spec = jax.typeof(table), jax.typeof(table).sharding.spec
    of_rows = PartitionSpec(*jax.typeof(row).sharding.spec, *spec[1:])
    return linear_call(  # JAX cannot differentiate the first function
        lambda row, table: table.at[row].get(out_sharding=of_rows),
        lambda row, ct: zeros(like).at[row].add(ct, out_sharding=spec),
        row,
        table,
    )


@with_options("layers.tensor_parallel.")
def unembed(params: Any, x: Array, axis_name: AxisName, **options: Unpack[LayerOptions]) -> Array:
    """The logits of each rank's part of the vocabulary.

    `x: [..., s/n, d], unembedding: [d, v/n] -> [..., s, v/n]`. For a table that is shared with
    `embed`, pass `{"unembedding": embedding.T}`.

    Options: `LayerOptions`. Steps and bytes, gradient, raises: as `column_linear`.

    >>> unembed = partial(tp.unembed, axis_name="x")
    >>> params, specs = {"unembedding": jnp.ones((2, 4))}, {"unembedding": P(None, "x")}
    >>> logits = ranks(unembed, (specs, P("x")), P(None, "x"))
    >>> print(logits(params, jnp.arange(8.0).reshape(4, 2))[:, 0])
    [ 1.  5.  9. 13.]
    """
    linear = [*parameters(params, "unembedding").items()]
    (logits,) = column_linears(linear, x, axis_name, **options)
    return logits


@public("layers.tensor_parallel.", arguments=False)
def cross_entropy(
    logits: Array, labels: Array, axis_name: AxisName, *, algorithm: Algorithm = "auto"
) -> Array:
    """-log softmax(logits)[label]; each rank has the logits of its part of the vocabulary.

    `logits: [..., v/n], labels: [...] -> [...]`, in float32 or wider, the same on every rank. No
    logits are sent. The messages are two floats for each label. The gradient keeps the logits
    themselves, not their softmax. A label outside the vocabulary gives a NaN.

    Steps and bytes: a `pmax` and a `psum` of one and two float32 for each label.

    Gradient: softmax(logits), minus one at the label, for each rank's part. Nothing is sent. There
    is forward mode (`jvp`) too.

    Raises:
        TypeError: the labels are not integers.
        ValueError: the shape of the labels is not that of the logits without the last dimension.

    Source: Shoeybi et al., "Megatron-LM" (2019), section 3.

    >>> loss = partial(tp.cross_entropy, axis_name="x")
    >>> logits, labels = jnp.zeros((2, 4)), jnp.array([0, 3])
    >>> print(ranks(loss, (P(None, "x"), P()), P())(logits, labels) / jnp.log(4))
    [1. 1.]
    """
    labels = _integers("labels", labels)
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels are {labels.shape}, the logits {logits.shape}; pass a label for each row"
        )
    check_bound(axis_name)
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    local = lax.stop_gradient(logits.max(-1).astype(wide))
    top = pmax(local, axis_name, algorithm=algorithm)
    mine, place, is_in = _own(labels, logits.shape[-1], axis_name)
    at_label = jnp.take_along_axis(logits, place[..., None], -1)[..., 0].astype(wide)
    sums = (_sum_of_exps(logits, top), jnp.where(mine, at_label - top, -0.0))
    total, label = psum(sums, axis_name, algorithm=algorithm)
    return jnp.where(is_in, jnp.log(total) - label, jnp.nan)


@partial(jax.checkpoint, prevent_cse=False)
def _sum_of_exps(logits: Array, top: Array) -> Array:
    """The sum of exponentials. Its gradient keeps the logits, and computes exponentials again."""
    return jnp.exp(logits.astype(top.dtype) - top[..., None]).sum(-1)


def _own(ids: Array, size: int, axis_name: AxisName) -> tuple[Array, Array, Array]:
    """Which ids are in this rank's part of the vocabulary, their rows there, and which in any."""
    place = ids - lax.axis_index(axes_of(axis_name)) * size
    mine = (place >= 0) & (place < size)
    return mine, jnp.where(mine, place, 0), (ids >= 0) & (ids < rank_count(axis_name) * size)


def _integers(name: str, ids: Array) -> Array:
    """The ids as signed integers, wide enough for any vocabulary."""
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"the {name} are of {ids.dtype}; pass integers")
    return ids.astype(jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32)
