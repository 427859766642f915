"""A matmul with a gathered operand, computed without the gather: the other operand's rows travel.

Take FSDP with few rows: x: [m, k] on each of n ranks, w: [k/n, f]. A gather of w sends k f numbers,
but all n m rows together may be far fewer than k. So w stays where it is:

- `mk,kf->mf`, gathered along k: an all-to-all brings every rank its k/n columns of all n m rows,
  and the sum of the products over ranks, [n m, f], is scattered;
- `mk,kf->mf`, gathered along f (w: [k, f/n]; or the gradient by x of the form above): all rows are
  gathered, and an all-to-all returns the products, [n m, f/n], to the ranks of the rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
from jax import Array

from ringcoll.costs.model import Model, all_to_all_seconds
from ringcoll.matmuls import auto
from ringcoll.matmuls.labels import Gather, Product, Scatter
from ringcoll.matmuls.options import Options
from ringcoll.matmuls.work import SURE, are_known
from ringcoll.runtime import built_in
from ringcoll.runtime.scopes import watched
from ringcoll.runtime.value_types import device_kind, explicit_spec

#: The name of this form, used like that of an algorithm.
EXCHANGED = "exchanged"


def stays(
    options: Options, gather: Gather, x: Array, others: list[Array], keeps: bool = False
) -> bool:
    """Whether, on TPUs, x stays and the rows of the other factor travel; `keeps` as for `pays`."""
    is_explicit = any(explicit_spec(value) is not None for value in (x, *others))
    if options.algorithm != "auto" or device_kind() not in auto.KINDS or gather.wire or is_explicit:
        return False
    return pays(gather, x, others, options.sizes(), options.model(), keeps)


def swapped(options: Options, x: Array, labels: str, split: str, joined: str) -> Array:
    """An all-to-all that gives every rank a part of one dimension, and all of another."""
    dims = labels.index(split), labels.index(joined)
    swap = partial(built_in.all_to_all, split_axis=dims[0], concat_axis=dims[1], tiled=True)
    return watched(lambda x: swap(x, options.axes), x, options.axes)


def in_place_of(gather: Gather, product: Product, other: Any) -> Gather | Scatter | None:
    """The collective that sends the rows of the other operand or of the result; None without rows.

    If the other operand has several labels, the longest one is that of the rows.
    """
    label, moving = gather.label, gather.moving
    free = [c for c in product.other if c in product.out and c not in moving]
    if not free or (label in product.other and label in product.out):  # products of a batch
        return None
    rows = max(free, key=lambda c: other.shape[product.other.index(c)])
    if label in product.other:
        return Scatter(rows, product.out, ((moving, product.other),), product.dtype)
    return Gather(rows, product.other, (Product(moving, product.out, product.dtype),))


def pays(
    gather: Gather,
    x: Any,
    others: Sequence[Any],
    sizes: tuple[int, ...],
    model: Model,
    keeps: bool = False,
) -> bool:
    """Whether to exchange rows in place of the gather: only on one axis, and only if it is faster.

    It is not used for several products: they share one gather, but rows would travel for each.

    Args:
        gather, x, others, sizes, model: as for `auto.to_gather`.
        keeps: whether a gather would keep the whole x for the gradient by the other operand. Then
            that gradient costs a gather only a product, but rows would be exchanged again for it.
    """
    if len(sizes) != 1 or len(others) != 1 or not are_known(x, *others):
        return False
    algorithm, late = auto.to_gather(gather, x, others, sizes, model)
    gathered = auto.gather_seconds(gather, x, others, sizes, model, late)[algorithm]
    exchanged = seconds(gather, x, others, sizes, model)
    if exchanged is None:
        return False
    if keeps:
        (product,), (other,) = gather.products, others
        length = _lengths(gather, product, x, other, prod(sizes))
        back = replace(gather, products=(Product(product.out, product.other, other.dtype),))
        ct = _array(length, product.out, product.dtype)
        exchanged += seconds(back, x, [ct], sizes, model) or 0.0
        gathered += model.start + 2 * prod(length.values()) * model.delta
    return SURE**2 * exchanged < gathered


def seconds(
    gather: Gather, x: Any, others: Sequence[Any], sizes: tuple[int, ...], model: Model
) -> float | None:
    """Seconds of all products if x stays where it is; None if that is not possible."""
    n, total = prod(sizes), 0.0
    for product, other in zip(gather.products, others, strict=True):
        of = in_place_of(gather, product, other)
        if of is None:
            return None
        length = _lengths(gather, product, x, other, n)
        if isinstance(of, Scatter):
            swapped = other
            part = {gather.label: length[gather.label] // n, of.label: n * length[of.label]}
            rows = _array(length | part, product.other, other.dtype)
            choices = auto.scatter_seconds(of, [(x, rows)], sizes, model)
        else:
            choices = auto.gather_seconds(of, other, [x], sizes, model)
            swapped = _array(length, product.out, product.dtype)
        block = swapped.size * swapped.dtype.itemsize
        total += min(choices.values()) + all_to_all_seconds(block, n, model)
    return total


def _lengths(gather: Gather, product: Product, x: Any, other: Any, n: int) -> dict[str, int]:
    """The size of every label of a product with the whole x."""
    length = dict(zip(gather.moving, x.shape, strict=True))
    length[gather.label] *= n
    return length | dict(zip(product.other, other.shape, strict=True))


def _array(length: dict[str, int], labels: str, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(length[c] for c in labels), dtype)
