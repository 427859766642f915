"""A collective in the form of MSCCL: a program for each rank, of thread blocks and steps.

Ranks may have different programs; in a `Schedule`, all ranks do the same. A rank has three buffers
of chunks: its input (i), its output (o) and scratch (s). A thread block runs its steps in order,
sends to one rank and receives from one rank. Its messages to a rank on one channel arrive in
order. `StepKind` describes a step. `ringcoll.formats.proof` executes a program on symbols.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ringcoll.schedules.schedule import ScheduleError

#: The collectives that have programs; pmean, pmax and pmin run the program of psum.
COLLECTIVES = ("all_gather", "psum_scatter", "psum", "all_to_all")
#: The most chunks of a buffer: a proof with more would take minutes and gigabytes.
MOST_CHUNKS = 2**16


class StepKind(NamedTuple):
    """What a step does. Its value is the sum of a message, its source and its target.

    Attributes:
        receives: whether a message is part of the value.
        reads: whether the source is part of the value.
        adds: whether the target is part of the value.
        writes: whether the value is written to the target.
        sends: whether the value is sent to the other rank.
    """

    receives: bool = False
    reads: bool = False
    adds: bool = False
    writes: bool = False
    sends: bool = False


#: The kinds of steps by MSCCL's names: r receives, s sends, c copies, rr receives and reduces.
STEP_KINDS = {
    "s": StepKind(reads=True, sends=True),
    "r": StepKind(receives=True, writes=True),
    "rcs": StepKind(receives=True, writes=True, sends=True),
    "rrs": StepKind(receives=True, reads=True, sends=True),
    "rrc": StepKind(receives=True, reads=True, writes=True),
    "rrcs": StepKind(receives=True, reads=True, writes=True, sends=True),
    "cpy": StepKind(reads=True, writes=True),
    "re": StepKind(reads=True, adds=True, writes=True),
    "nop": StepKind(),  # it only waits
}


class ChunkPlace(NamedTuple):
    """The first chunk of a run of chunks in a buffer."""

    buffer: str
    first: int

    def cells(self, count: int) -> list["ChunkPlace"]:
        """The places of `count` chunks, from this one on."""
        return [ChunkPlace(self.buffer, self.first + i) for i in range(count)]

    def __str__(self) -> str:
        return f"{self.buffer}[{self.first}]"


class At(NamedTuple):
    """A step of a thread block of a rank."""

    rank: int
    block: int
    step: int

    def __str__(self) -> str:
        return f"rank {self.rank}, thread block {self.block}, step {self.step}"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a thread block.

    Attributes:
        kind: one of `STEP_KINDS`.
        source: the place that it reads, if its kind reads.
        target: the place that it writes, if its kind writes.
        count: the number of chunks.
        after: a thread block of this rank and a step of it that must be done before; None for none.
    """

    kind: str
    source: ChunkPlace
    target: ChunkPlace
    count: int = 1
    after: tuple[int, int] | None = None

    @property
    def does(self) -> StepKind:
        """What the step does."""
        return STEP_KINDS[self.kind]

    @property
    def read(self) -> list[ChunkPlace]:
        """The chunks that it reads."""
        source = self.source.cells(self.count) if self.does.reads else []
        return source + (self.target.cells(self.count) if self.does.adds else [])

    @property
    def written(self) -> list[ChunkPlace]:
        """The chunks that it writes."""
        return self.target.cells(self.count) if self.does.writes else []


@dataclass(frozen=True, slots=True)
class Block:
    """A thread block: the ranks that it sends to and receives from, if any, and its steps."""

    to: int | None
    source: int | None
    channel: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank does: the chunks of its buffers, and its thread blocks."""

    inputs: int
    outputs: int
    scratch: int
    blocks: tuple[Block, ...]

    @property
    def buffers(self) -> dict[str, int]:
        """The chunks of each buffer."""
        return {"i": self.inputs, "o": self.outputs, "s": self.scratch}


@dataclass(frozen=True)
class MscclProgram:
    """A collective as thread blocks of steps, for every rank.

    Attributes:
        name: the name of the algorithm.
        collective: one of `COLLECTIVES`.
        ranks: the program of each rank.
        in_place, out_of_place: whether it is for calls in place, and for calls out of place.
        protocol: the protocol that its messages are for: LL, LL128 or Simple.
    """

    name: str
    collective: str
    ranks: tuple[RankProgram, ...]
    in_place: bool = True
    out_of_place: bool = True
    protocol: str = "Simple"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def chunks(self) -> int:
        """The chunks of the full vector."""
        return max((max(r.inputs, r.outputs) for r in self.ranks), default=0)

    def steps(self) -> Iterator[tuple[At, Step]]:
        """All steps, by rank and thread block."""
        for rank, program in enumerate(self.ranks):
            for number, block in enumerate(program.blocks):
                for i, step in enumerate(block.steps):
                    yield At(rank, number, i), step

    def check(self) -> None:
        """Refuse a program that cannot be proved, and a step outside of its buffers.

        Raises:
            ScheduleError: it is such a program.
        """
        if not self.chunks:
            raise ScheduleError("a program without ranks, or without chunks of input and output")
        if not (self.in_place or self.out_of_place):
            raise ScheduleError("it is meant for calls neither in place nor out of place")
        if self.collective != "psum" and self.chunks % self.size:
            why = f"{self.chunks} chunks do not divide among {self.size} ranks"
            raise ScheduleError(f"{self.collective}: {why}")
        most = max(max(rank.buffers.values()) for rank in self.ranks)
        if most > MOST_CHUNKS:
            raise ScheduleError(f"a buffer of {most} chunks; at most {MOST_CHUNKS} can be proved")
        for number, rank in enumerate(self.ranks):
            if any(number in (block.to, block.source) for block in rank.blocks):
                raise ScheduleError(f"rank {number} sends to itself; copy by cpy")
        for at, step in self.steps():
            if step.kind not in STEP_KINDS:
                known = ", ".join(STEP_KINDS)
                raise ScheduleError(f"{at}: no kind {step.kind:.40}; choose from {known}")
            if step.count < 1 and any(step.does):
                raise ScheduleError(f"{at}: {step.kind} of {step.count} chunks; name 1 or more")
            for place in [step.source] * step.does.reads + [step.target] * step.does.writes:
                chunks = self.ranks[at.rank].buffers.get(place.buffer, 0)
                if place.first < 0 or place.first + step.count > chunks:
                    why = f"{step.count} chunks from {place} on, but there are {chunks}"
                    raise ScheduleError(f"{at}: {step.kind} of {why}")
