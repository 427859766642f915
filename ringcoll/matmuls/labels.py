"""Read and check einsum specs of two factors: what is multiplied, and what travels."""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringcoll.costs.wire import Wire

#: Labels for the dimensions before the last one of a factor, beside k and f.
ROW_LETTERS = "".join(letter for letter in string.ascii_letters if letter not in "kf")


def matrix_spec(ndim: int) -> str:
    """The spec of x @ w for a matrix w and an x of this many dimensions: "abk,kf->abf"."""
    rows = ROW_LETTERS[: ndim - 1]
    return f"{rows}k,kf->{rows}f"


@dataclass(frozen=True)
class Labels:
    """The labels of two factors and of their product, as in "bsd,df->bsf"."""

    x: str
    w: str
    out: str

    @staticmethod
    def of(spec: Any) -> "Labels":
        """Read a spec.

        Raises:
            TypeError: it is no string.
            ValueError: it does not have two factors; or its derivatives would not be products of
                two factors. For that, every label must be in two of the three (x, w and the
                result), or in all three, and at most once in each.
        """
        if not isinstance(spec, str):
            raise TypeError(f"the spec is {spec!r}, no string; write 'mk,kf->mf'")
        factors, arrow, out = spec.replace(" ", "").partition("->")
        x, comma, w = factors.partition(",")
        if not arrow or not comma or "," in w:
            raise ValueError("the spec is not of two factors and a result; write 'mk,kf->mf'")
        read = Labels(x, w, out)
        for labels in (x, w, out):
            if not (labels.isalpha() and labels.isascii()) and labels:
                raise ValueError(f"{labels!r} is not made of letters; give every dimension one")
            if len(set(labels)) < len(labels):
                raise ValueError(f"{labels!r} has a label twice; take the diagonal first")
        for label in sorted(set(x + w + out)):
            if sum(label in labels for labels in (x, w, out)) < 2:
                raise ValueError(
                    f"label {label!r} stands in one place only; sum over it before, or name it "
                    "in the result"
                )
        return read

    def sizes(self, x: tuple[int, ...], w: tuple[int, ...], times: Mapping[str, tuple[int, int]]):
        """The size of every label.

        Args:
            x, w: the shapes of the factors.
            times: for a label, the numbers by which to multiply its size in x and in w to get its
                whole size.

        Raises:
            ValueError: there are not as many labels as dimensions, or the sizes of a label differ.
        """
        whole_sizes: dict[str, int] = {}
        for which, (name, labels, shape) in enumerate((("x", self.x, x), ("w", self.w, w))):
            if len(labels) != len(shape):
                raise ValueError(
                    f"{labels!r} does not fit the {len(shape)} dimensions of {name}; "
                    "give each a letter"
                )
            for label, size in zip(labels, shape, strict=True):
                full_size = size * times.get(label, (1, 1))[which]
                if whole_sizes.setdefault(label, full_size) != full_size:
                    cure = "; make them agree"
                    if label in times:
                        cure = ", counting all shards; pass a shard of one and all of the other"
                    raise ValueError(
                        f"label {label!r} of '{self.x},{self.w}->{self.out}' is of size "
                        f"{whole_sizes[label]} in x and {full_size} in w{cure}"
                    )
        return whole_sizes


@dataclass(frozen=True)
class Product:
    """One product with the gathered factor.

    Attributes:
        other: the labels of the other factor.
        out: the labels of the result.
        dtype: the dtype of the result.
        sharding: the sharding of the result over explicit axes, if the factors do not determine it
            (see `value_types.explicit_spec`).
        sums: the dtype of a sum over rounds, which stays on its rank; None for `dtype`.
    """

    other: str
    out: str
    dtype: np.dtype
    sharding: Any = None
    sums: np.dtype | None = None

    def spec(self, moving: str) -> str:
        """The einsum with the gathered factor, whose labels are `moving`."""
        return f"{moving},{self.other}->{self.out}"


@dataclass(frozen=True)
class Gather:
    """The factor that is gathered (its labels are `moving`), along which label, and the products.

    `wire` is what its messages hold.
    """

    label: str
    moving: str
    products: tuple[Product, ...]
    wire: Wire | None = None


@dataclass(frozen=True)
class Scatter:
    """A sum of products, scattered along a label of its result.

    Attributes:
        label: the label of the result along which it is scattered.
        out: the labels of the result.
        terms: the labels of both factors of each product.
        dtype: the dtype of the result.
        sharding: the sharding of the result, as for a `Product`.
    """

    label: str
    out: str
    terms: tuple[tuple[str, str], ...]
    dtype: np.dtype
    sharding: Any = None
