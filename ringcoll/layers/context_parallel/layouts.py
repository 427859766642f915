"""Which positions of a sequence each rank holds."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

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


def check_layout(layout: Any, n: int, length: int) -> None:
    """Refuse an unknown layout, and a sequence of `length` that cannot be cut over n ranks."""
    if layout not in tuple(LAYOUTS):  # in a tuple, so that it need not be hashable
        raise ValueError(f"layout={layout!r}; choose from {', '.join(LAYOUTS)}")
    multiple = max(n, 1) * PARTS[layout]
    if n < 1 or length < 0 or length % multiple:
        raise ValueError(
            f"{length} positions over n={n} ranks, layout={layout!r}; pad the sequence to a "
            f"multiple of {multiple}"
        )
