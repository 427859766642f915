"""Measure whether the live memory of a process stays flat during a run.

Live memory is memory that is allocated and not freed, after garbage collection. glibc counts it in
bytes (`mallinfo2`, all threads); Python's allocator, which has separate memory, counts it in
blocks. (The resident set would not do: a page is resident while anything on it is live, and
compiled programs that are dropped leave more and more such pages.)
"""

import ctypes
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

#: Memory is flat if it grows by fewer bytes per call than this in the last half of a run,
LIMIT = 4096
#: and by fewer blocks of Python's allocator (of at most 512 bytes) per call than this.
BLOCKS = 8
#: The fewest samples in the last half with which memory is judged. (In the first half caches fill.)
FEWEST = 8


class _Mallinfo2(ctypes.Structure):
    """The struct `mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@dataclass(frozen=True)
class MemorySample:
    """The memory of the process after a number of calls.

    Attributes:
        calls: the number of calls so far.
        live: live bytes of malloc.
        blocks: live blocks of Python's allocator.
        arrays: the number of `jax.live_arrays()`.
    """

    calls: int
    live: int
    blocks: int
    arrays: int


def is_known() -> bool:
    """Whether this system's malloc reports the live bytes."""
    return hasattr(ctypes.CDLL(None), "mallinfo2")


def sample(calls: int) -> MemorySample:
    """Take a sample now, after this many calls."""
    gc.collect()
    return MemorySample(calls, _live(), sys.getallocatedblocks(), len(jax.live_arrays()))


def _live() -> int:
    """Bytes that malloc has allocated and not freed, including mapped ones."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def last_half(samples: Sequence[MemorySample]) -> list[MemorySample]:
    """The samples of the last half of the run."""
    return [s for s in samples if 2 * s.calls >= samples[-1].calls]


def growth(samples: Sequence[MemorySample], of: str) -> float:
    """The growth of an attribute per call: the slope of a line by least squares."""
    return float(np.polyfit([s.calls for s in samples], [getattr(s, of) for s in samples], 1)[0])


def is_judged(samples: Sequence[MemorySample]) -> bool:
    """Whether there are enough samples to judge."""
    return bool(samples) and len(last_half(samples)) >= FEWEST


def is_flat(samples: Sequence[MemorySample]) -> bool:
    """Whether the last half grows by less than `LIMIT` bytes and `BLOCKS` a call, and no array."""
    late = last_half(samples)
    few = growth(late, "live") < LIMIT and growth(late, "blocks") < BLOCKS
    return few and late[-1].arrays <= late[0].arrays
