"""What a profiler's trace says: how long a rank is at messages, at work, at both.

(At messages it also is while it waits for who sends.)
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

#: Operations that are there while those within them run.
_AROUND = ("while", "conditional", "call")

Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Busy:
    """Seconds of a call, means over the ranks.

    Attributes:
        wire: at messages.
        work: at everything else.
        shorter: the lesser of the two.
        both: at once.
    """

    wire: float
    work: float
    shorter: float
    both: float

    @property
    def hidden(self) -> float:
        """Both, of the shorter; nothing, if there is none."""
        return self.both / self.shorter if self.shorter else 0.0


def busy(program: Callable[[], Any], compiled: jax.stages.Compiled, times: int = 3) -> Busy:
    """Of a program that is run so often, in every process.

    Args:
        program: runs until it is done.
        compiled: the same, compiled: says what is a collective.
        times: how often.
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
    """Instruction, device, start and end in seconds, of one program."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        for event in json.load(file)["traceEvents"]:
            args = event.get("args", {})
            if event.get("ph") == "X" and args.get("hlo_module") == module:
                start = float(event["ts"]) / 1e6
                device = str(args.get("device_ordinal"))
                yield args["hlo_op"], device, (start, start + float(event["dur"]) / 1e6)


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The same time, as spans that do not meet."""
    made: Spans = []
    for start, end in sorted(spans):
        if made and start <= made[-1][1]:
            made[-1] = made[-1][0], max(made[-1][1], end)
        else:
            made.append((start, end))
    return made


def both(some: Spans, others: Spans) -> Spans:
    meet = ((max(a[0], b[0]), min(a[1], b[1])) for a in some for b in others)
    return [(start, end) for start, end in meet if start < end]


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
