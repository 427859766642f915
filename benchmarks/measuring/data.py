"""Data whose sums are exact in any order, and the count of wrong elements.

Sums are exact for any number of ranks and any order of additions. So a right result is right to the
last bit, and there is no tolerance. With a wire, the error of a result must be within a bound,
which is known before the run.
"""

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

#: The data repeats after this many elements. It is a prime, so that no two blocks are equal.
_PERIOD = 65521


def largest(dtype: Any) -> int:
    """The largest integer up to which a dtype has all integers."""
    kind = jnp.dtype(dtype)
    if kind.kind == "b":
        return 1
    if jnp.issubdtype(kind, jnp.integer):
        return int(jnp.iinfo(kind).max)
    return 2 ** (int(jnp.finfo(kind).nmant) + 1)


def exact(
    shape: Sequence[int], dtype: Any, ranks: int, seed: int | Sequence[int] = 0
) -> np.ndarray:
    """Random small integers whose sum over `ranks` is exact in every order.

    No partial sum needs more digits than the dtype has. Values differ by rank and position, so data
    in a wrong place is noticed.

    Args:
        shape: the shape of the data of all ranks together.
        dtype: any dtype but a complex one.
        ranks: the largest number of contributions in a sum.
        seed: the seed of the random numbers.

    Raises:
        ValueError: a sum over this many ranks has too many digits for the dtype.
    """
    kind = jnp.dtype(dtype)
    if largest(kind) < ranks:
        raise ValueError(f"no sum over {ranks} ranks is exact in {kind.name}; use fewer ranks")
    most = min(largest(kind) // ranks, 2**62)
    values = np.random.default_rng(seed).integers(0, most, _PERIOD, endpoint=True)
    return np.resize(values.astype(kind), prod(shape)).reshape(shape)


def count_outside(result: np.ndarray, truth: np.ndarray, allowed: float) -> int:
    """The number of elements whose error is above `allowed` or not finite.

    All elements count if shape or dtype differ.
    """
    if (result.shape, result.dtype) != (truth.shape, truth.dtype):
        return max(result.size, 1)
    off = np.abs(result.astype(np.float64) - truth.astype(np.float64))
    return int(np.count_nonzero(~(off <= allowed)))


def count_wrong(result: np.ndarray, *truths: np.ndarray) -> int:
    """The number of elements that differ in a bit from a truth; all, if shape or dtype differ."""
    if any((result.shape, result.dtype) != (truth.shape, truth.dtype) for truth in truths):
        return max(result.size, 1)
    bits = np.dtype(f"u{result.itemsize}")
    differs = [result.view(bits) != truth.view(bits) for truth in truths]
    return int(np.count_nonzero(reduce(np.logical_or, differs)))
