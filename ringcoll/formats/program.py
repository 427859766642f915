"""A collective in the form of other tools: a program for each rank, of thread blocks and steps.

Ranks may have different programs; in a `Schedule`, all ranks do the same. A rank has three buffers
of chunks: its input (i), its output (o) and scratch (s). A thread block runs its steps in order,
sends to one rank and receives from one rank. Its messages to another rank on one channel arrive in
order. `Kind` says what a step does. `ringcoll.formats.proof` executes a program on symbols.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ringcoll.schedules.schedule import ScheduleError

#: The collectives that have programs; pmean, pmax and pmin run the program of psum.
COLLECTIVES = ("all_gather", "psum_scatter", "psum", "all_to_all")
#: The most chunks of a buffer: a proof with more would take minutes and gigabytes.
MOST_CHUNKS = 2**16
BUFFERS = {"i": "input", "o": "output", "s": "scratch"}


class Kind(NamedTuple):
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
KINDS = {
    "s": Kind(reads=True, sends=True),
    "r": Kind(receives=True, writes=True),
    "rcs": Kind(receives=True, writes=True, sends=True),
    "rrs": Kind(receives=True, reads=True, sends=True),
    "rrc": Kind(receives=True, reads=True, writes=True),
    "rrcs": Kind(receives=True, reads=True, writes=True, sends=True),
    "cpy": Kind(reads=True, writes=True),
    "re": Kind(reads=True, adds=True, writes=True),
    "nop": Kind(),  # it only waits
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
        kind: one of `KINDS`.
        source: the place that it reads, if its kind reads.
        target: the place that it writes, if its kind writes.
        count: the number of chunks.
        after: a thread block of this rank and a step of it that must be done before; None for none.
        line: the number of its line in the file.
    """

    kind: str
    source: ChunkPlace
    target: ChunkPlace
    count: int = 1
    after: tuple[int, int] | None = None
    line: int = 0

    @property
    def does(self) -> Kind:
        """What the step does."""
        return KINDS[self.kind]

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
    line: int = 0


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank does: the chunks of its buffers, and its thread blocks."""

    inputs: int
    outputs: int
    scratch: int
    blocks: tuple[Block, ...]
    line: int = 0

    def chunks(self, buffer: str) -> int:
        """The chunks of a buffer."""
        return {"i": self.inputs, "o": self.outputs, "s": self.scratch}[buffer]


@dataclass(frozen=True)
class Program:
    """A collective as thread blocks of steps, for every rank.

    Attributes:
        name: the name of the algorithm.
        collective: one of `COLLECTIVES`.
        ranks: the program of each rank.
        in_place, out_of_place: whether it is for calls in place, and for calls out of place.
        protocol: LL, LL128 or Simple.
        file: the file that it was read from, for errors.
    """

    name: str
    collective: str
    ranks: tuple[RankProgram, ...]
    in_place: bool = True
    out_of_place: bool = True
    protocol: str = "Simple"
    file: str = ""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def chunks(self) -> int:
        """The chunks of the full vector."""
        return max((max(r.inputs, r.outputs) for r in self.ranks), default=0)

    @property
    def channels(self) -> int:
        """The number of channels."""
        return 1 + max((b.channel for r in self.ranks for b in r.blocks), default=0)

    def steps(self) -> Iterator[tuple[At, Step]]:
        """All steps, by rank and thread block."""
        for rank, program in enumerate(self.ranks):
            for number, block in enumerate(program.blocks):
                for i, step in enumerate(block.steps):
                    yield At(rank, number, i), step

    def block(self, at: At) -> Block:
        """The thread block of a step."""
        return self.ranks[at.rank].blocks[at.block]

    def step(self, at: At) -> Step:
        """The step at this place."""
        return self.block(at).steps[at.step]

    def wrong(self, at: At, why: str) -> ScheduleError:
        """The error of a step: it names the file and line, rank, thread block and step."""
        return self.wrong_at(self.step(at).line, f"{at}: {why}")

    def wrong_at(self, line: int, why: str) -> ScheduleError:
        """An error with the file and the line, if the program was read from a file."""
        where = f"{self.file}, line {line}: " if line else f"{self.file}: " if self.file else ""
        return ScheduleError(where + why)

    def check_indices(self) -> None:
        """Refuse a program that names a rank, chunk, thread block or step that does not exist.

        Raises:
            ScheduleError: it does; the message has the line, if it was read from a file.
        """
        if not self.ranks or not self.chunks:
            raise self.wrong_at(0, "a program without ranks, or without chunks of input and output")
        if self.collective not in COLLECTIVES:
            known = ", ".join(COLLECTIVES)
            raise self.wrong_at(0, f"no collective {self.collective!r}; there are {known}")
        if not (self.in_place or self.out_of_place):
            raise self.wrong_at(0, "it is meant for calls neither in place nor out of place")
        if self.collective != "psum" and self.chunks % self.size:
            why = f"{self.chunks} chunks do not divide among {self.size} ranks"
            raise self.wrong_at(0, f"{self.collective}: {why}")
        for rank, one in enumerate(self.ranks):
            most = max(one.inputs, one.outputs, one.scratch)
            if most > MOST_CHUNKS:
                why = (
                    f"rank {rank} has a buffer of {most} chunks, and at most {MOST_CHUNKS} are read"
                )
                raise self.wrong_at(one.line, why)
            self._check_connections(rank)
        for at, step in self.steps():
            self._check_step(at, step)

    def _check_connections(self, rank: int) -> None:
        taken: dict[tuple[str, int, int], int] = {}
        for number, block in enumerate(self.ranks[rank].blocks):
            for does, peer in (("sends to", block.to), ("receives from", block.source)):
                if peer is None:
                    continue
                where = f"rank {rank}, thread block {number}: it {does} rank {peer}"
                if not 0 <= peer < self.size:
                    why = f"{where}, but ranks are 0 to {self.size - 1}"
                    raise self.wrong_at(block.line, why)
                if peer == rank:
                    raise self.wrong_at(block.line, f"{where}, itself; use a cpy")
                other = taken.setdefault((does, peer, block.channel), number)
                if other != number:
                    why = f"{where} on channel {block.channel}, as thread block {other} does"
                    raise self.wrong_at(block.line, f"{why}: their messages would mix")

    def _check_step(self, at: At, step: Step) -> None:
        if step.kind not in KINDS:
            known = ", ".join(KINDS)
            raise self.wrong(at, f"there is no step of type {step.kind!r}; there are {known}")
        block, rank = self.block(at), self.ranks[at.rank]
        if step.does.sends and block.to is None:
            raise self.wrong(at, f"{step.kind} sends, but its thread block sends to no rank")
        if step.does.receives and block.source is None:
            raise self.wrong(
                at, f"{step.kind} receives, but its thread block receives from no rank"
            )
        if step.count < 1 and any(step.does):
            raise self.wrong(at, f"{step.kind} of {step.count} chunks; give 1 or more")
        for place in [step.source] * step.does.reads + [step.target] * step.does.writes:
            if place.buffer not in BUFFERS:
                known = ", ".join(BUFFERS)
                raise self.wrong(at, f"there is no buffer {place.buffer!r}; there are {known}")
            chunks, last = rank.chunks(place.buffer), place.first + step.count - 1
            if place.first < 0 or last >= chunks:
                wrong = place.first if place.first < 0 else last
                why = f"{place.buffer}[{wrong}], but rank {at.rank} has {chunks} chunks of"
                raise self.wrong(at, f"{why} {BUFFERS[place.buffer]}")
        if step.after is not None:
            other, number = step.after
            if not 0 <= other < len(rank.blocks):
                raise self.wrong(at, f"it waits for thread block {other}, which is not there")
            if not 0 <= number < len(rank.blocks[other].steps):
                why = f"it waits for thread block {other}, step {number}, which is not there"
                raise self.wrong(at, why)
