"""Whether a process's memory stays flat: its resident set along a run, and JAX's arrays.

The resident set is what Linux says in /proc/self/statm, after Python's garbage is collected and
what glibc keeps of freed memory is handed back: a fourth of all after some hundred compilations,
now more and now less.
"""

import ctypes
import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

_STATM = Path("/proc/self/statm")

#: Flat is what grows by less than so many bytes a call over the last half of the run,
LIMIT = 4096
#: if that has so many samples. The first half is for caches to fill and for the allocator.
FEWEST = 8


@dataclass(frozen=True)
class Sample:
    """What is held after so many calls.

    Attributes:
        calls: so many.
        resident: bytes.
        arrays: of `jax.live_arrays()`.
    """

    calls: int
    resident: int
    arrays: int


def is_known() -> bool:
    """Whether this system says what is resident."""
    return _STATM.exists()


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sample(calls: int) -> Sample:
    """Now, after so many calls."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return Sample(calls, resident(), len(jax.live_arrays()))


def last_half(samples: Sequence[Sample]) -> list[Sample]:
    """Those from the middle of the run on."""
    return [s for s in samples if 2 * s.calls >= samples[-1].calls]


def slope(samples: Sequence[Sample]) -> float:
    """Bytes a call: that of the line through them, by least squares."""
    return float(np.polyfit([s.calls for s in samples], [s.resident for s in samples], 1)[0])


def growth(samples: Sequence[Sample]) -> float:
    """Bytes a call, over the last half of the run."""
    return slope(last_half(samples))


def is_judged(samples: Sequence[Sample]) -> bool:
    """Whether there are enough of them."""
    return bool(samples) and len(last_half(samples)) >= FEWEST


def is_flat(samples: Sequence[Sample]) -> bool:
    """Whether the last half grows by less than `LIMIT` bytes a call, and by no array."""
    late = last_half(samples)
    return growth(samples) < LIMIT and late[-1].arrays <= late[0].arrays
