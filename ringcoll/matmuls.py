"""Matmuls that hide their communication: each shard is multiplied while the next travels.

x: [m/n, k] and w: [k, f] make [m, f] without the gathered x ever being held; x: [m, k/n] and
w: [k/n, f] make [m/n, f] without the sum ever being held whole. By which algorithm shards
travel is said as for the collectives (see `ringcoll.lax`): "auto", the name of a gather in
`ringcoll.algorithms`, a `Schedule`, a function that makes one, or "lax" (gather, then
multiply; multiply, then scatter). "auto" is "bidirectional_ring", half of the payload each
way round; "lax" where products would be added up in larger results than it is worth (the rule
is `ringcoll.cost.hides_adding`: shard w by columns rather than rows), and on CPU, where the
devices of a process share what they compute with.

Below, n is the number of ranks over `axis_name`. All have derivatives of every order that
overlap as well; forward mode (`jvp`) is refused by JAX, as for every `custom_vjp`.
`preferred_element_type` and `precision` are those of `jax.numpy.einsum`; `accumulate_dtype`
is the dtype of partial sums, on the wire too where they travel.

Other axes of the mesh may be explicit: results and gradients are sharded over them as those of
`jax.numpy.einsum` are. As there, JAX refuses (ShardingTypeError) a sum along a dimension that is
sharded; and one that is gathered or scattered should not be.

All raise, before anything is sent, NameError for an axis that is not bound, and ValueError
for shapes and specs that do not fit and for algorithms that cannot run.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ringcoll import algorithms
from ringcoll.calls import AxisName, axes_of
from ringcoll.gathers import all_gather
from ringcoll.labels import Labels
from ringcoll.manual import varying
from ringcoll.products import How, Product, gathered, scattered
from ringcoll.scheduled import ranks_of
from ringcoll.table import LAX, Algorithm

#: An array, or a pytree of some that share a gather.
Arrays = Any


def all_gather_einsum(
    spec: str,
    x: Arrays,
    w: Arrays,
    axis_name: AxisName,
    *,
    gather: str,
    operand: int = 0,
    algorithm: Algorithm = "auto",
    residuals: str = "save",
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
) -> Any:
    """The einsum of two factors, of which one is gathered along the dimension `gather`.

    `all_gather_einsum("bsd,df->bsf", x, w, "x", gather="s")`: x: [b, s/n, d], w: [d, f] ->
    [b, s, f]. Where `gather` is summed over, products are added up as shards arrive:
    `"mk,kf->mf", gather="k"` with x: [m, k/n]. `operand` says whether x (0) or w (1) is
    gathered; the other may be a pytree of factors, whose products share one gather.

    n-1 rounds of one shard by a ring, half of it each way by "bidirectional_ring".

    Gradient: of the factor that is gathered, `einsum_reduce_scatter`; of the other, one product
    of the gathered factor, which is kept for it (`residuals="save"`, as autodiff of the plain
    form does), or of a second gather (`"regather"`: less memory, more time).

    Raises:
        ValueError: the spec is none of two factors, lacks `gather`, or has another size.

    Source: Wang et al., "Overlap communication with dependent computation via decomposition
    in large deep learning models", ASPLOS (2023).
    """
    call = _Call("all_gather_einsum", spec, axis_name, f"gather={gather!r}, operand={operand}")
    moving, still = (w, x) if operand else (x, w)
    factors, tree = jax.tree.flatten(still)
    how = call.how(algorithm, precision, accumulate_dtype, residuals)
    labels = call.labels()
    moving_labels, other = (labels.w, labels.x) if operand else (labels.x, labels.w)
    if gather not in moving_labels:
        raise call.refusal(f"{gather!r} is no label of the factor that is gathered")
    n = call.ranks()
    for factor in factors:
        pair = (factor.shape, moving.shape) if operand else (moving.shape, factor.shape)
        call.sizes(labels, *pair, {gather: (1, n) if operand else (n, 1)})
    dtypes = [_dtype(preferred_element_type, moving, factor) for factor in factors]
    products = tuple(Product(other, labels.out, dtype) for dtype in dtypes)
    shard, *factors = call.varying(moving, *factors)
    results = gathered(how, gather, moving_labels, products, shard, factors)
    return jax.tree.unflatten(tree, results)


def einsum_reduce_scatter(
    spec: str,
    x: Array,
    w: Array,
    axis_name: AxisName,
    *,
    scatter: str,
    algorithm: Algorithm = "auto",
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
) -> Array:
    """The sum over ranks of an einsum, of which rank r keeps block r along `scatter`.

    `einsum_reduce_scatter("bsf,fd->bsd", x, w, "x", scatter="s")`: x: [b, s, f/n], w:
    [f/n, d] -> [b, s/n, d]. A block is multiplied just before its partial sum travels on.

    n-1 rounds of one block of the result by a ring, half of it each way by
    "bidirectional_ring".

    Gradient: both factors' are products of one gather of the cotangent.

    Raises:
        ValueError: the spec is none of two factors, its result lacks `scatter`, or the size
            of that does not divide by n (pad it).

    Source: as `all_gather_einsum`.
    """
    call = _Call("einsum_reduce_scatter", spec, axis_name, f"scatter={scatter!r}")
    how = call.how(algorithm, precision, accumulate_dtype)
    labels = call.labels()
    if scatter not in labels.out:
        raise call.refusal(f"{scatter!r} is no label of the result")
    size, n = call.sizes(labels, x.shape, w.shape, {})[scatter], call.ranks()
    if size % n:
        raise call.refusal(
            f"label {scatter!r} of size {size} does not divide by {n}; pad it to a multiple"
        )
    terms, dtype = ((labels.x, labels.w),), _dtype(preferred_element_type, x, w)
    x, w = call.varying(x, w)
    return scattered(how, scatter, labels.out, terms, dtype, None, [(x, w)])


def all_gather_matmul(
    x: Arrays, w: Arrays, axis_name: AxisName, *, operand: int = 0, dimension: int = -2, **options
) -> Any:
    """x @ w, of which one factor is gathered along one of its last two dimensions.

    - `x: [..., m/n, k], w: [k, f] -> [..., m, f]`;
    - `dimension=-1`, summed as shards arrive: `x: [..., m, k/n], w: [k, f] -> [..., m, f]`;
    - `operand=1`, FSDP: `x: [..., m, k], w: [k/n, f] -> [..., m, f]`;
    - `operand=1, dimension=-1`: `x: [..., m, k], w: [k, f/n] -> [..., m, f]`.

    Steps and bytes, gradient, raises, source and options: as `all_gather_einsum`, of which
    this is a face; the other factor may be a pytree.
    """
    ndim = _ndim(x)
    rows = _LETTERS[: ndim - 1]
    spec = f"{rows}k,kf->{rows}f"
    if dimension not in (-1, -2):
        raise ValueError(
            f"ringcoll.all_gather_matmul(dimension={dimension!r}): a matrix has dimensions -2 "
            "and -1; use all_gather_einsum for another"
        )
    gather = ("kf" if operand else f"{rows}k")[dimension]
    return all_gather_einsum(spec, x, w, axis_name, gather=gather, operand=operand, **options)


def matmul_reduce_scatter(
    x: Array, w: Array, axis_name: AxisName, *, scatter_dimension: int = -2, **options
) -> Array:
    """The sum over ranks of x @ w, of which rank r keeps block r of a dimension.

    `x: [..., m, k/n], w: [k/n, f] -> [..., m/n, f]`; `scatter_dimension=-1`: [..., m, f/n].

    Steps and bytes, gradient, raises, source and options: as `einsum_reduce_scatter`.
    """
    rows = _LETTERS[: _ndim(x) - 1]
    out = f"{rows}f"
    if not -len(out) <= scatter_dimension < len(out):
        raise ValueError(
            f"ringcoll.matmul_reduce_scatter(scatter_dimension={scatter_dimension}): the result "
            f"has {len(out)} dimensions"
        )
    scatter = out[scatter_dimension]
    return einsum_reduce_scatter(f"{rows}k,kf->{out}", x, w, axis_name, scatter=scatter, **options)


def matmul_all_reduce(x: Array, w: Array, axis_name: AxisName, **options) -> Array:
    """The sum over ranks of x @ w, on every rank.

    `x: [..., m, k/n], w: [k/n, f] -> [..., m, f]`; replicated under `check_vma=True`. A
    `matmul_reduce_scatter` along the rows, then an all-gather; rows that do not divide by n
    are padded inside and cut again.

    2(n-1) rounds of 1/n of the result by a ring; the first half hides under the product.

    Gradient: that of the two.

    Raises, source and options: as `einsum_reduce_scatter`.
    """
    axes = axes_of(axis_name)
    rows = x.shape[-2]
    n = ranks_of(LAX, axes, None).size
    padding = [(0, 0)] * (x.ndim - 2) + [(0, -rows % n), (0, 0)]
    mine = matmul_reduce_scatter(jnp.pad(x, padding), w, axis_name, **options)
    algorithm = options.get("algorithm", "auto")
    whole = all_gather(
        mine, axis_name, axis=x.ndim - 2, tiled=True, to="invarying", algorithm=algorithm
    )
    return lax.slice_in_dim(whole, 0, rows, axis=x.ndim - 2)


_LETTERS = "abcdeghijlmnopq"  # for rows; k and f are of matrices


class _Call:
    """What the refusals of one call say of it."""

    def __init__(self, name: str, spec: str, axis_name: AxisName, said: str) -> None:
        self.name, self.spec, self.said, self.axis_name = name, spec, said, axis_name
        self.axes = axes_of(axis_name)

    def refusal(self, words: str) -> ValueError:
        call = f"{self.spec!r}, x, w, axis_name={self.axis_name!r}, {self.said}"
        return ValueError(f"ringcoll.{self.name}({call}): {words}")

    def ranks(self) -> int:
        return ranks_of(LAX, self.axes, None).size

    def labels(self) -> Labels:
        try:
            return Labels.of(self.spec)
        except ValueError as error:
            raise self.refusal(str(error)) from error

    def sizes(self, labels: Labels, x: Any, w: Any, times: Any) -> dict[str, int]:
        try:
            return labels.sizes(x, w, times)
        except ValueError as error:
            raise self.refusal(str(error)) from error

    def how(self, algorithm: Algorithm, precision: Any, wide: Any, residuals: str = "save") -> How:
        if residuals not in ("regather", "save"):
            raise self.refusal(f"residuals={residuals!r}; choose from regather, save")
        if algorithm not in ("auto", LAX):
            ranks = ranks_of(algorithm, self.axes, None)
            try:
                algorithms.build("all_gather", algorithm, ranks.shape)
            except ValueError as error:
                raise self.refusal(f"algorithm={algorithm!r}: {error}") from error
        dtype = None if wide is None else np.dtype(wide)
        return How(self.axes, algorithm, precision, dtype, residuals == "save")

    def varying(self, *factors: Array) -> list[Array]:
        """Typed alike, so that a derivative has the type of what it is of."""
        types = [jax.typeof(factor).mat.varying for factor in factors]
        return [varying(factor, (*self.axes, *frozenset().union(*types))) for factor in factors]


def _ndim(x: Arrays) -> int:
    return jax.tree.leaves(x)[0].ndim


def _dtype(preferred: DTypeLike | None, *factors: Array) -> np.dtype:
    return np.dtype(jnp.result_type(*factors) if preferred is None else preferred)
