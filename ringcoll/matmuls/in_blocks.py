"""Matmuls on one rank, computed leaf by leaf for `order="tree"`. Nothing is sent."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ringcoll.collectives.axes import AxisName
from ringcoll.collectives.tree_order import LEAVES
from ringcoll.matmuls.checks import FactorsCall
from ringcoll.matmuls.labels import matrix_spec
from ringcoll.matmuls.options import Options


def matmul_in_blocks(
    x: Array,
    w: Array,
    axis_name: AxisName,
    *,
    contracted: bool,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
    order: str | None = "tree",
    leaves: int = LEAVES,
) -> Array:
    """x @ w of a rank's own factors, with one product for each of the rank's leaves of the tree.

    `x: [..., m, k], w: [k, f] -> [..., m, f]`. If `contracted`, the leaves are blocks of k,
    otherwise blocks of f. The gradients are computed in the same blocks.
    """
    spec = matrix_spec(x.ndim)
    call = FactorsCall("matmul_in_blocks", spec, axis_name, order=order, leaves=leaves)
    options, labels = call.options("auto", precision, accumulate_dtype), call.labels(spec)
    sizes, cut = call.sizes(labels, x, w, {}), "k" if contracted else "f"
    call.check_cut(options, cut, sizes[cut])
    dtype = call.dtype(options, labels, sizes, x, w, preferred_element_type)
    x, w = call.typed_alike(x, w)
    return _in_blocks(options, spec, cut, dtype, x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _in_blocks(options: Options, spec: str, cut: str, dtype: np.dtype, x: Array, w: Array) -> Array:
    """An einsum of this rank's own factors, in its blocks of the label `cut`."""
    return options.einsum(spec, x, w, dtype, cut=cut).astype(dtype)


def _in_blocks_backward(
    options: Options, spec: str, cut: str, _: Any, factors: tuple[Array, Array], ct: Array
) -> tuple[Array, Array]:
    (x, w), (labels, out) = factors, spec.split("->")
    x_labels, w_labels = labels.split(",")
    to_x, to_w = f"{out},{w_labels}->{x_labels}", f"{x_labels},{out}->{w_labels}"
    # Ranks add cotangents of x that they have rounded. So round each of a rank's own sums too.
    added_by_ranks = options if cut in x_labels else replace(options, accumulate_dtype=None)
    ct_x = _in_blocks(added_by_ranks, to_x, cut, x.dtype, ct, w)
    return ct_x, _in_blocks(options, to_w, cut, w.dtype, x, ct)


_in_blocks.defvjp(
    lambda options, spec, cut, dtype, x, w: (
        _in_blocks(options, spec, cut, dtype, x, w),
        (x, w),
    ),
    _in_blocks_backward,
)
