"""What a compiled program communicates, and how much of that nothing hides.

The model. A chip runs one stream of instructions, in the order of the scheduled text. Beside
it run the links to its neighbours, each direction a queue, first in, first out, and the copies
between its memories, one more queue. A collective-permute takes hops x bytes / one-way rate of
a link, and 1 us a hop, from the moment when it is started and its links are free; the stream
waits where its result is asked for (`-done`), and that wait is *exposed* communication. A
collective without start and done is exposed whole. A built-in collective is granted what no
algorithm can beat: all that a rank gets, over all its links at once, without latency, and, where
it is spread over other work by the compiler, from its start to its end; it occupies the links
between the members of each of its groups. A loop counts as often as it turns; a transfer
that one turn starts and the next waits for counts in each. The copy of weights at the start of
a program is charged to it. Computing takes the cycles of the static profile where there is
one; else, for a matmul, the compiler's estimate; but never less than bytes over the bandwidth of
the memory or, for bf16, FLOPs over FLOP/s. Where an array is sliced or updated in place,
also in nested fusions, only the slice or the update is read and written.
A report names what it cannot read: a kernel with remote copies, send and recv, a loop whose turns
are not known.
Nothing else takes time: no launch, no contention for memory, no other program, and all ranks
start together.
"""

from ringcoll.overlap.chips import CHIPS, Chip
from ringcoll.overlap.compilation import compile_for
from ringcoll.overlap.hlo import HloError
from ringcoll.overlap.program import Program
from ringcoll.overlap.reading import assert_overlapped, report
from ringcoll.overlap.report import Report, Row
from ringcoll.overlap.topology import hops, mesh

__all__ = [
    "CHIPS",
    "Chip",
    "HloError",
    "Program",
    "Report",
    "Row",
    "assert_overlapped",
    "compile_for",
    "hops",
    "mesh",
    "report",
]
