"""Matmuls that hide their communication: each shard is multiplied while the next one travels.

x: [m/n, k] and w: [k, f] give [m, f], and no rank holds the gathered x, unless it is kept for the
gradient. x: [m, k/n] and w: [k/n, f] give [m/n, f], and no rank ever holds the whole sum.

All functions take the options of `ringcoll.MatmulOptions`; those that gather take also the option
of `ringcoll.GatherOptions`.

`algorithm="auto"` picks the form with the lowest price (`ringcoll.costs.under_work`), for these
shapes on the devices of the mesh:

- on TPUs a ring or another schedule whose messages go to neighbours, or "lax";
- on TPUs with sparse cores "lax" for a w that is gathered: with options that a trace cannot see
  (`overlap.OPTIONS["sparse cores"]`), it travels under the work before;
- on GPUs "lax", because permutes are slow there, and their compiler keeps one in flight at a time;
- on CPU "lax": nothing orders work and messages there.

Where nobody names "lax", the collective of that form is ringcoll's by "auto".

"lax" is faster in three cases: for small matmuls, whose hops are mostly latency; for few rows,
because each round reads w again; and if every round adds to a large result (then shard w by columns
rather than rows). If several products share a gather, those that would add to a large result may be
computed once, from the whole gathered operand, after the others. `ringcoll.explain` prints what was
picked, and why.

Below, n is the number of ranks over `axis_name`. Derivatives of every order overlap too. JAX
refuses forward mode (`jvp`).

With a `wire` (see `ringcoll.Wire`), the messages of a gather hold codes of one byte in place of
floats. A shard is encoded once, by its owner, and decoded just before it is multiplied. The owner
multiplies the same decoded values as the other ranks. The messages of gradients hold floats, except
for a shard that is gathered again.

Other axes of the mesh may be explicit. Results and gradients are sharded over them as those of
`jax.numpy.einsum` are. JAX refuses (ShardingTypeError) a sum along a dimension that is sharded over
an explicit axis, as it does for `einsum`. A dimension that is gathered or scattered should not be
sharded over an explicit axis: JAX cannot lower the scatter of "lax" there, so "auto" is a ring.

Before anything is sent, all functions raise NameError if an axis is not bound, TypeError if an
argument is not an array, dtype or integer, and ValueError if shapes or specs do not fit or an
algorithm cannot run.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringcoll.collectives.axes import AxisName, rank_count
from ringcoll.collectives.public import integer
from ringcoll.collectives.sums import WireLike, sums_of, wide_dtype
from ringcoll.costs.wire import Wire
from ringcoll.matmuls.labels import Gather, Labels, Product, Scatter, matrix_spec
from ringcoll.matmuls.options import GatherOptions, MatmulOptions, Options, with_options
from ringcoll.matmuls.overlapped import gather_and_multiply, multiply_and_scatter
from ringcoll.runtime.value_types import with_common_axes

#: An array, or a pytree of arrays that share a gather.
Factors = Any


@with_options()
def all_gather_einsum(
    spec: str,
    x: Factors,
    w: Factors,
    axis_name: AxisName,
    *,
    gather: str,
    operand: int = 0,
    wire: WireLike | None = None,
    **options: Unpack[GatherOptions],
) -> Any:
    """The einsum of two factors; one of them is gathered along the label `gather`.

    `all_gather_einsum("bsd,df->bsf", x, w, "x", gather="s")`: x: [b, s/n, d], w: [d, f] ->
    [b, s, f]. If `gather` is contracted, products are added as shards arrive:
    `"mk,kf->mf", gather="k"` with x: [m, k/n]. `operand` says whether x (0) or w (1) is
    gathered. The other may be a pytree of factors; their products share one gather.

    A ring takes n-1 rounds of one shard; "bidirectional_ring" sends half of it in each direction.

    Gradient: for the gathered factor, `einsum_reduce_scatter`; for the other factor, a product
    with the gathered factor, which is kept for that, or gathered again (`residuals`).

    Options: `ringcoll.GatherOptions`.

    Raises:
        ValueError: the spec does not have two factors, lacks `gather`, or does not fit the shapes.

    Source: Wang et al., "Overlap communication with dependent computation via decomposition
    in large deep learning models", ASPLOS (2023).

    >>> def product(x, w):
    ...     return ringcoll.all_gather_einsum("sd,df->sf", x, w, "x", gather="s", algorithm="ring")
    >>> x, w = jnp.arange(8.0).reshape(4, 2), jnp.arange(8.0).reshape(2, 4)
    >>> print((ranks(product, (P("x"), P(None, "x")), P(None, "x"))(x, w) == x @ w).all())
    True
    """
    checked, labels = Options.of(axis_name, options), Labels.of(spec)
    if operand not in (0, 1):
        raise ValueError(f"operand={operand!r}; pass 0 to gather x, 1 to gather w")
    checked = replace(checked, early=operand == 1)
    moving, still = (w, x) if operand else (x, w)
    moving_labels, other = (labels.w, labels.x) if operand else (labels.x, labels.w)
    _check_label(gather, moving_labels, "the factor that is gathered")
    shard = _as_array(moving)
    factors, tree = jax.tree.flatten(still)
    factors = list(map(_as_array, factors))
    n = rank_count(axis_name)
    times = {gather: (1, n) if operand else (n, 1)}
    products, preferred = [], options["preferred_element_type"]
    for factor in factors:
        first, second = (factor, shard) if operand else (shard, factor)
        sizes = labels.sizes(first.shape, second.shape, times)
        dtype = _dtype_of(checked, labels, sizes, first, second, preferred)
        products.append(Product(other, labels.out, dtype))
    # So that derivatives have the types of the factors.
    shard, *factors = with_common_axes([shard, *factors], checked.axes)
    encoded = _checked_wire(wire, axis_name, shard, *factors)
    results = gather_and_multiply(
        checked, Gather(gather, moving_labels, tuple(products), encoded), shard, factors
    )
    return jax.tree.unflatten(tree, results)


@with_options()
def einsum_reduce_scatter(
    spec: str,
    x: Array,
    w: Array,
    axis_name: AxisName,
    *,
    scatter: str,
    **options: Unpack[MatmulOptions],
) -> Array:
    """The sum over ranks of an einsum; rank r keeps block r along `scatter`.

    `einsum_reduce_scatter("bsf,fd->bsd", x, w, "x", scatter="s")`: x: [b, s, f/n], w:
    [f/n, d] -> [b, s/n, d]. A block is multiplied just before its partial sum is sent on.

    A ring takes n-1 rounds of one block of the result; "bidirectional_ring" sends half of it in
    each direction.

    Gradient: the gradients of both factors are products with one gather of the cotangent.

    Options: `ringcoll.MatmulOptions`.

    Raises:
        ValueError: the spec does not have two factors, its result lacks `scatter`, or n does not
            divide the size of `scatter` (pad it).

    Source: as `all_gather_einsum`.

    >>> def product(x, w):
    ...     return ringcoll.einsum_reduce_scatter("sf,fd->sd", x, w, "x", scatter="s")
    >>> x, w = jnp.arange(16.0).reshape(4, 4), jnp.ones((4, 1))
    >>> print(ranks(product, (P(None, "x"), P("x")))(x, w).T)
    [[ 6. 22. 38. 54.]]
    """
    checked, labels = Options.of(axis_name, options), Labels.of(spec)
    _check_label(scatter, labels.out, "the result")
    x, w = _as_array(x), _as_array(w)
    sizes, n = labels.sizes(x.shape, w.shape, {}), rank_count(axis_name)
    if sizes[scatter] % n:
        raise ValueError(
            f"label {scatter!r} of {spec!r} has size {sizes[scatter]}, not divisible by {n}; pad "
            "it to a multiple"
        )
    dtype = _dtype_of(checked, labels, sizes, x, w, options["preferred_element_type"])
    x, w = with_common_axes([x, w], checked.axes)
    terms = ((labels.x, labels.w),)
    return multiply_and_scatter(checked, Scatter(scatter, labels.out, terms, dtype), [(x, w)])


@with_options()
def all_gather_matmul(
    x: Factors,
    w: Factors,
    axis_name: AxisName,
    *,
    operand: int = 0,
    dim: int = -2,
    wire: WireLike | None = None,
    **options: Unpack[GatherOptions],
) -> Any:
    """x @ w; one factor is gathered along one of its last two dimensions.

    - `x: [..., m/n, k], w: [k, f] -> [..., m, f]`;
    - `dim=-1`, added as shards arrive: `x: [..., m, k/n], w: [k, f] -> [..., m, f]`;
    - `operand=1`, FSDP: `x: [..., m, k], w: [k/n, f] -> [..., m, f]`;
    - `operand=1, dim=-1`: `x: [..., m, k], w: [k, f/n] -> [..., m, f]`.

    Options: `ringcoll.GatherOptions`. Steps and bytes, gradient, raises, source: as
    `all_gather_einsum`, which this calls. The other factor may be a pytree.

    >>> matmul = partial(ringcoll.all_gather_matmul, axis_name="x", algorithm="two_ended")
    >>> x, w = jnp.arange(8.0).reshape(4, 2), jnp.ones((2, 4))
    >>> print(ranks(matmul, (P("x"), P(None, "x")), P(None, "x"))(x, w)[:, 0])
    [ 1.  5.  9. 13.]
    """
    spec = _matrix_spec(x)
    labels = Labels.of(spec)
    moving = labels.w if operand else labels.x
    dim = integer("dim", dim)
    if dim not in (-1, -2) or len(moving) < -dim:
        raise ValueError(
            f"dim={dim} is not one of the last two of a matrix; pass -2 or -1; use "
            "all_gather_einsum for the others"
        )
    return all_gather_einsum(
        spec, x, w, axis_name, gather=moving[dim], operand=operand, wire=wire, **options
    )


@with_options()
def matmul_reduce_scatter(
    x: Array,
    w: Array,
    axis_name: AxisName,
    *,
    dim: int = -2,
    **options: Unpack[MatmulOptions],
) -> Array:
    """The sum over ranks of x @ w; rank r keeps block r of a dimension.

    `x: [..., m, k/n], w: [k/n, f] -> [..., m/n, f]`; `dim=-1`: [..., m, f/n].

    Options: `ringcoll.MatmulOptions`. Steps and bytes, gradient, raises, source: as
    `einsum_reduce_scatter`.

    >>> matmul = partial(ringcoll.matmul_reduce_scatter, axis_name="x", algorithm="ring")
    >>> x, w = jnp.arange(16.0).reshape(4, 4), jnp.ones((4, 1))
    >>> print(ranks(matmul, (P(None, "x"), P("x")))(x, w).T)
    [[ 6. 22. 38. 54.]]
    """
    spec = _matrix_spec(x)
    out = Labels.of(spec).out
    dim = integer("dim", dim, len(out))
    return einsum_reduce_scatter(spec, x, w, axis_name, scatter=out[dim], **options)


def _matrix_spec(x: Factors) -> str:
    """The spec of x @ w; for a pytree x, that of its first leaf."""
    leaves = jax.tree.leaves(x)
    ndim = jax.typeof(leaves[0] if leaves else x).ndim
    if not ndim:
        raise ValueError("x has 0 dimensions; pass a matrix, or several")
    return matrix_spec(ndim)


def _checked_wire(wire: Any, axis_name: AxisName, *factors: Array) -> Wire | None:
    """The wire of the messages, if the factors can be encoded.

    It is None on a single rank: it sends nothing, so it rounds nothing.
    """
    if wire is None:
        return None
    coded = sums_of(wire=wire)
    coded.check(None, factors, [False] * len(factors))
    return coded.wire if rank_count(axis_name) > 1 else None


def _check_label(label: Any, labels: str, factor: str) -> None:
    """Refuse a label that is not among `labels`."""
    if label not in tuple(labels):  # "mk" is in "mkf"
        raise ValueError(f"{label!r} is not a label of {factor}; choose from {', '.join(labels)}")


def _as_array(factor: Any) -> Array:
    """A factor as an array, or lax's error."""
    jax.typeof(factor)
    return jnp.asarray(factor)


def _dtype_of(
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
