"""The sum over ranks of a product, on every rank: a matmul with an all-reduce."""

from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringcoll.collectives.all_gather import all_gather
from ringcoll.collectives.axes import AxisName, axes_of, rank_count
from ringcoll.matmuls.functions import matmul_reduce_scatter
from ringcoll.matmuls.options import MatmulOptions, with_options
from ringcoll.runtime.value_types import is_checked, varying


@with_options()
def matmul_all_reduce(
    x: Array, w: Array, axis_name: AxisName, **options: Unpack[MatmulOptions]
) -> Array:
    """The sum over ranks of x @ w, on every rank.

    `x: [..., m, k/n], w: [k/n, f] -> [..., m, f]`; replicated under `check_vma=True`. It is a
    `matmul_reduce_scatter` along the rows, then an all-gather. If n does not divide the rows, they
    are padded, and the padding is cut off again. `algorithm` names a gather: the scatter and
    the all-gather use its schedule. For results of a few kilobytes, such as those of one token,
    `ringcoll.psum(x @ w, axis_name, algorithm="one_shot")` is best. Call `psum` also to sum over
    groups of ranks.

    A ring takes 2(n-1) rounds of 1/n of the result; the product hides the first half.

    Gradient: under `check_vma=True`, every rank has the same cotangent, so it is a product for
    each factor, and nothing is sent; otherwise the two parts are differentiated separately.

    Options: `ringcoll.MatmulOptions`. Raises, source: as `einsum_reduce_scatter`.

    >>> matmul = partial(ringcoll.matmul_all_reduce, axis_name="x", algorithm="ring")
    >>> print(ranks(matmul, (P(None, "x"), P("x")), P())(jnp.ones((1, 4)), jnp.ones((4, 2))))
    [[4. 4.]]
    """
    if (ndim := jax.typeof(x).ndim) < 2:
        raise ValueError(f"x has {ndim} dimensions; pass a matrix, or several")
    axis_name = axes_of(axis_name)
    n, rows = rank_count(axis_name), x.shape[-2]  # refuses an axis that is not bound
    axes = {*axis_name, *jax.typeof(x).mat.varying, *jax.typeof(w).mat.varying}
    x, w = (varying(factor, tuple(axes)) for factor in (x, w))

    accumulate_dtype = options["accumulate_dtype"]

    def reduced_and_gathered(x: Array, w: Array) -> Array:
        padding = [(0, 0)] * (x.ndim - 2) + [(0, -rows % n), (0, 0)]
        mine = matmul_reduce_scatter(jnp.pad(x, padding), w, axis_name, **options)
        total = all_gather(
            mine,
            axis_name,
            axis=x.ndim - 2,
            tiled=True,
            to="invarying",
            algorithm=options["algorithm"],
            accumulate_dtype=accumulate_dtype,  # only its gradient adds, if types are not checked
        )
        return lax.slice_in_dim(total, 0, rows, axis=x.ndim - 2)

    def wide_product(x: Array, w: Array) -> Array:  # so that only the gradients are rounded
        kinds = (accumulate_dtype, options["preferred_element_type"], jnp.result_type(x, w))
        wide = max((k for k in kinds if k is not None), key=lambda k: jnp.dtype(k).itemsize)
        return jnp.matmul(x, w, precision=options["precision"], preferred_element_type=wide)

    if is_checked():
        return _replicated(reduced_and_gathered, wide_product, x, w)
    return reduced_and_gathered(x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _replicated(run: Any, product: Any, x: Array, w: Array) -> Array:
    """`run(x, w)`, the sum of `product(x, w)` over ranks. Its gradient sends nothing.

    It may be used if every rank has the same cotangent.
    """
    return run(x, w)


def _replicated_forward(run: Any, product: Any, x: Array, w: Array) -> tuple[Array, Any]:
    return run(x, w), (x, w)


def _replicated_backward(run: Any, product: Any, factors: Any, ct: Array) -> Any:
    y, pull_back = jax.vjp(product, *factors)
    return pull_back(varying(ct, tuple(jax.typeof(factors[0]).mat.varying)).astype(y.dtype))


_replicated.defvjp(_replicated_forward, _replicated_backward)
