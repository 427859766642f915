"""Data whose sums are exact in any order, and what counts as wrong.

Any number of ranks may add it up in any order, so that a right result is right to the
last bit, whatever the algorithm: there is no tolerance to hide behind.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np


def exact(shape: Sequence[int], dtype: Any, ranks: int) -> np.ndarray:
    """Small integers that count up and start again, whose sum over `ranks` is exact.

    No partial sum needs more digits than the dtype has. They start again after a prime
    number of elements, so that no two blocks or ranks hold the same where blocks are of
    a round size: what goes to the wrong place shows.

    Args:
        shape: of the data of all ranks, if ranks are to differ.
        dtype: any but bool and complex.
        ranks: the most contributions that will be added up.
    """
    kind = jnp.dtype(dtype)
    if jnp.issubdtype(kind, jnp.floating):
        largest = 2 ** (int(jnp.finfo(kind).nmant) + 1)
    else:
        largest = int(jnp.iinfo(kind).max)
    period = _prime_up_to(max(min(largest, 2**24) // ranks, 2))
    return np.resize(np.arange(period).astype(kind), prod(shape)).reshape(shape)


def _prime_up_to(largest: int) -> int:
    return next(
        p for p in range(largest, 1, -1) if all(p % d for d in range(2, int(p**0.5) + 1))
    )


def count_wrong(result: np.ndarray, *truths: np.ndarray) -> int:
    """How many elements differ, in any bit, from any of the truths; all, if of another kind."""
    if any((result.shape, result.dtype) != (truth.shape, truth.dtype) for truth in truths):
        return result.size
    bits = np.dtype(f"u{result.itemsize}")
    differs = [result.view(bits) != truth.view(bits) for truth in truths]
    return int(np.count_nonzero(np.logical_or.reduce(differs)))
