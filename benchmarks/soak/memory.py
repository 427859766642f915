"""Whether a process's memory stays flat: what is live in it along a run, and JAX's arrays.

What is live is what has been allocated and not freed, after Python's garbage is collected: bytes
by glibc's own count (`mallinfo2`, of all threads), and blocks of Python's allocator, which takes
its memory elsewhere. The resident set (/proc/self/statm) is shown beside it, not judged: a page
stays resident while anything on it is live, and programs that are compiled and dropped leave
ever more such pages behind, whoever wrote them.
"""

import ctypes
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

_STATM = Path("/proc/self/statm")

#: Flat is what grows by less than so many bytes a call over the last half of the run,
LIMIT = 4096
#: and by less than so many of Python's blocks, of 512 bytes at most,
BLOCKS = 8
#: if that has so many samples. The first half is for caches to fill.
FEWEST = 8


class _Mallinfo2(ctypes.Structure):
    """That of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@dataclass(frozen=True)
class MemorySample:
    """What is held after so many calls.

    Attributes:
        calls: so many.
        resident: bytes.
        live: bytes, of malloc.
        blocks: of Python.
        arrays: of `jax.live_arrays()`.
    """

    calls: int
    resident: int
    live: int
    blocks: int
    arrays: int


def is_known() -> bool:
    """Whether this system says what is resident, and its malloc what is live."""
    return _STATM.exists() and hasattr(ctypes.CDLL(None), "mallinfo2")


def sample(calls: int) -> MemorySample:
    """Now, after so many calls."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return MemorySample(calls, resident, _live(), sys.getallocatedblocks(), len(jax.live_arrays()))


def _live() -> int:
    """Bytes that malloc has given and not got back, mapped ones among them."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    said = mallinfo2()
    return int(said.uordblks + said.hblkhd)


def last_half(samples: Sequence[MemorySample]) -> list[MemorySample]:
    """Those from the middle of the run on."""
    return [s for s in samples if 2 * s.calls >= samples[-1].calls]


def growth(samples: Sequence[MemorySample], of: str) -> float:
    """Of that attribute, a call: the slope of the line through them, by least squares."""
    return float(np.polyfit([s.calls for s in samples], [getattr(s, of) for s in samples], 1)[0])


def is_judged(samples: Sequence[MemorySample]) -> bool:
    """Whether there are enough of them."""
    return bool(samples) and len(last_half(samples)) >= FEWEST


def is_flat(samples: Sequence[MemorySample]) -> bool:
    """Whether the last half grows by less than `LIMIT` bytes and `BLOCKS` a call, and no array."""
    late = last_half(samples)
    few = growth(late, "live") < LIMIT and growth(late, "blocks") < BLOCKS
    return few and late[-1].arrays <= late[0].arrays
