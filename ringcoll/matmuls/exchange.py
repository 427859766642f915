"""A matmul with a gathered operand, computed without the gather: the other operand's rows travel.

Take FSDP with few rows: x: [m, k] on each of n ranks, w: [k/n, f]. A gather of w sends k f numbers,
but all n m rows together may be far fewer than k. So w stays where it is:

- `mk,kf->mf`, gathered along k: an all-to-all brings every rank its k/n columns of all n m rows,
  and the sum of the products over ranks, [n m, f], is scattered;
- `mk,kf->mf`, gathered along f (w: [k, f/n]; or the gradient by x of the form above): all rows are
  gathered, and an all-to-all returns the products, [n m, f/n], to the ranks of the rows.

This file says which collective that is, and of which shapes. `plans` prices it.
"""

from math import prod
from typing import Any, NamedTuple

import numpy as np

from ringcoll.matmuls.labels import Gather, Product, Scatter


class ArrayType(NamedTuple):
    """The shape and dtype of an array that is only planned."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


def swap_of(gather: Gather, product: Product, other: Any) -> Gather | Scatter | None:
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


def whole_sizes(gather: Gather, product: Product, x: Any, other: Any, n: int) -> dict[str, int]:
    """The size of every label of a product with the whole x."""
    sizes = dict(zip(gather.moving, x.shape, strict=True))
    sizes[gather.label] *= n
    return sizes | dict(zip(product.other, other.shape, strict=True))


def exchanged(
    gather: Gather, product: Product, x: Any, other: Any, after: Gather | Scatter, n: int
) -> tuple[ArrayType, ArrayType]:
    """What the all-to-all sends, and the other operand of the collective `after`."""
    sizes = whole_sizes(gather, product, x, other, n)
    if isinstance(after, Gather):
        return shape_of(sizes, product.out, product.dtype), ArrayType(other.shape, other.dtype)
    part = {gather.label: sizes[gather.label] // n, after.label: n * sizes[after.label]}
    return ArrayType(other.shape, other.dtype), shape_of(sizes | part, product.other, other.dtype)


def shape_of(sizes: dict[str, int], labels: str, dtype: Any) -> ArrayType:
    """An array with these labels."""
    return ArrayType(tuple(sizes[c] for c in labels), dtype)
