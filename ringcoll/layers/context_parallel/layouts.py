"""Which positions of a sequence each rank holds."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np


def _contiguous(n: int, length: int) -> np.ndarray:
    """Rank r has part r."""
    return np.arange(n * length).reshape(n, length)


def _zigzag(n: int, length: int) -> np.ndarray:
    """Rank r has parts r and 2n - 1 - r of 2n parts."""
    parts = np.arange(n * length).reshape(2 * n, length // 2)
    return np.concatenate([parts[:n], parts[: n - 1 : -1]], axis=1)


def _striped(n: int, length: int) -> np.ndarray:
    """Rank r has every n-th position, from r on."""
    return np.arange(n * length).reshape(length, n).T


#: By name: (ranks, positions of each) -> the positions `[n, length]`, which grow along a row.
LAYOUTS: Mapping[str, Callable[[int, int], np.ndarray]] = MappingProxyType(
    {"contiguous": _contiguous, "zigzag": _zigzag, "striped": _striped}
)
#: How many parts a rank's positions have. The positions of a part are consecutive or evenly spaced.
PARTS: Mapping[str, int] = MappingProxyType({"contiguous": 1, "zigzag": 2, "striped": 1})


def positions(layout: str, n: int, length: int) -> np.ndarray:
    """The positions of each of n ranks: `[n, length]`, int32."""
    return LAYOUTS[layout](n, length).astype(np.int32)
