"""Read from a profiler's trace how long a rank sends or receives, computes, and does both.

(The time of a message includes the wait for its sender.)
"""

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measuring import processes
from ringcoll.overlap.hlo import parse
from ringcoll.overlap.transfers import COLLECTIVES

#: Operations that last while other operations inside them run.
_AROUND = ("while", "conditional", "call")

Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Busy:
    """Seconds of a call, as means over the ranks.

    Attributes:
        wire: the time of messages.
        work: the time of all other operations.
        shorter: the shorter of the two.
        both: the time in which both run.
    """

    wire: float
    work: float
    shorter: float
    both: float

    @property
    def hidden(self) -> float:
        """The share of the shorter one that overlaps; 0 if there is none."""
        return self.both / self.shorter if self.shorter else 0.0


def busy(program: Callable[[], Any], compiled: jax.stages.Compiled, times: int = 3) -> Busy:
    """Trace a program in every process.

    Args:
        program: runs it until it is done.
        compiled: the compiled program, which says which operations are collectives.
        times: how often it runs.
    """
    module = parse(compiled.as_text() or "")
    kinds = {
        name: of.opcode.removesuffix("-start")
        for computation in module.computations.values()
        for name, of in computation.by_name.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(times):
                processes.meet()
                program()
        (written,) = Path(folder).glob("plugins/profile/*/*.trace.json.gz")
        spans: dict[tuple[str, bool], Spans] = {}
        for name, device, span in _events(written, module.name):
            if name in kinds and kinds[name] not in _AROUND:
                spans.setdefault((device, kinds[name] in COLLECTIVES), []).append(span)
    found = np.zeros(4, np.float32)
    for device in {device for device, _ in spans}:
        wire, work = (union(spans.get((device, is_wire), [])) for is_wire in (True, False))
        seconds = length(wire), length(work)
        found += *seconds, min(seconds), length(both(wire, work))
    return Busy(*(processes.everyones(found).sum(0) / times / module.ranks).tolist())


def _events(trace: Path, module: str) -> Iterator[tuple[str, str, tuple[float, float]]]:
    """The events of one program: instruction, device, (start, end) in seconds."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        for event in json.load(file)["traceEvents"]:
            args = event.get("args", {})
            if event.get("ph") == "X" and args.get("hlo_module") == module:
                start = float(event["ts"]) / 1e6
                device = str(args.get("device_ordinal"))
                yield args["hlo_op"], device, (start, start + float(event["dur"]) / 1e6)


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The union of spans, as spans that do not touch."""
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def both(some: Spans, others: Spans) -> Spans:
    meet = ((max(a[0], b[0]), min(a[1], b[1])) for a in some for b in others)
    return [(start, end) for start, end in meet if start < end]


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
