"""Report what a compiled program communicates, and how much of that is exposed.

The model:

- A chip runs one stream of instructions, in the order of the scheduled text. The links to its
  neighbours and the copies between its memories run at the same time. Each direction of a link is
  a queue, first in, first out; the copies are one more queue.
- A collective-permute takes hops x bytes / one-way rate of a link, plus 1 us per hop. It begins
  when it is started and its links are free. The stream waits where the result is needed (`-done`);
  that wait is *exposed* communication.
- All of a collective without start and done is exposed.
- The least time of a built-in collective is that of the best algorithm: a rank receives over all
  its links at once, without latency. The chip states what built-ins were measured to take: a start
  for each link to the farthest rank, and a share of the links' rate. Where nobody measured, they
  take the least. If the compiler spreads one over other work, it runs from its start to its end. It
  occupies the links between the members of each of its groups.
- The body of a loop counts once for each turn. A transfer that one turn starts and the next turn
  waits for counts in each turn. The copy of weights at the start of a program is part of the
  program.
- Compute takes the cycles of the static profile if there is one; if not, a matmul takes the
  compiler's estimate, and in a text without any a measured share of FLOP/s. Compute takes at least
  bytes over the bandwidth of the memory and, for bf16, FLOPs over FLOP/s. If an array is sliced or
  updated in place, also in nested fusions, only the slice or the update is read and written.
- A kernel takes what the caller measured or its `cost_estimate`; an attention kernel of JAX its
  FLOPs, at a measured share of FLOP/s. Of other kernels only the bytes count; a report names them.
- Copies to and from the memory of the host are one more queue, at the rate of the chip's PCIe.
- On a GPU in `CHIPS`, whose machine was measured, collectives and permutes take the measured time
  for these bytes and ranks. A matmul takes a start plus FLOPs over the measured FLOP/s. All other
  work takes bytes over the bandwidth of the memory. Transfers run one after the other. Matmuls on
  several streams take turns.
- Nothing else takes time: no launch, no contention for memory, no other program. All ranks start
  together.

A report names what it cannot read: a kernel with remote copies, a send or a recv without pairs of
ranks, a loop whose number of turns is not known.
"""

from ringcoll.overlap.chips import CHIPS, Chip, Gpu
from ringcoll.overlap.comparison import compare
from ringcoll.overlap.compilation import compile_for
from ringcoll.overlap.hlo import HloError
from ringcoll.overlap.options import OPTIONS
from ringcoll.overlap.program import Program
from ringcoll.overlap.reading import assert_collectives, assert_overlapped, collectives, report
from ringcoll.overlap.report import Report
from ringcoll.overlap.rows import Row
from ringcoll.overlap.wastes import Waste, waste

__all__ = [
    "CHIPS",
    "OPTIONS",
    "Chip",
    "Gpu",
    "HloError",
    "Program",
    "Report",
    "Row",
    "Waste",
    "assert_collectives",
    "assert_overlapped",
    "collectives",
    "compare",
    "compile_for",
    "report",
    "waste",
]
