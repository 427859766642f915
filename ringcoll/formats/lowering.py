"""From a schedule to a program: moves become steps of thread blocks.

Every rank has a thread block for each rank and lane that it sends to, one for each that it receives
from, and one for copies and additions. The program works on the output (all-gather, all-reduce) or
on a copy of the input in scratch, so it is right in place and out of place. A step waits for
another thread block if it needs its data, or would overwrite what that block still needs.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm, prod

from ringcoll.formats.program import COLLECTIVES, Block, ChunkPlace, MscclProgram, RankProgram, Step
from ringcoll.schedules.phases import Carries, Phase, phases
from ringcoll.schedules.registry import ALL_REDUCES, ScheduleLike, build, in_lax

#: The most ranks of a file. A larger file would be too large to read, and slow to write.
MOST_RANKS = 512
#: The ranks that a thread block sends to and receives from, and its channel.
_Key = tuple[int | None, int | None, int]
_LOCAL: _Key = (None, None, 0)


def program(collective: str, algorithm: ScheduleLike, shape: Sequence[int]) -> MscclProgram:
    """The program of a collective by an algorithm, for every rank.

    A chunk is a lane's share of a shard; in all-reduces that send whole vectors, a lane's share of
    the vector.

    Args:
        collective: all_gather, psum_scatter, psum (also pmean, pmax, pmin) or all_to_all, or
            another name of one of these.
        algorithm: a name, schedule or function, as `algorithms.build` takes it.
        shape: the sizes of the axes, major first.

    Raises:
        ValueError: as `algorithms.build`; MSCCL has no such collective; there are too many ranks.

    >>> ring = formats.program("all_reduce", "ring", (4,))
    >>> ring.size, ring.chunks, len(ring.ranks[0].blocks)
    (4, 4, 5)
    """
    if prod(shape) > MOST_RANKS:
        raise ValueError(f"{prod(shape)} ranks: a file has a program for at most {MOST_RANKS}")
    kind = in_lax(collective)
    kind = "psum" if kind in ALL_REDUCES and kind != "pbroadcast" else kind
    if kind not in COLLECTIVES:
        known = ", ".join(COLLECTIVES)
        raise ValueError(f"{collective}: MSCCL has no such collective; choose from {known}")
    built = build(kind, algorithm, tuple(shape))
    name = algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "schedule")
    return _Lowering(kind, phases(kind, built), prod(shape)).program(f"{collective}_{name}")


class _Lowering:
    """The steps of all ranks, phase by phase."""

    def __init__(self, collective: str, run: list[Phase], size: int) -> None:
        self.collective, self.run, self.size = collective, run, size
        sends_vectors = all(phase.carries is Carries.VECTORS for phase in run)
        #: The number of chunks of a shard (or of a vector): the lanes of every phase divide it.
        self.share = lcm(*(phase.schedule.lanes for phase in run))
        self.chunks = self.share * (1 if sends_vectors else size)
        self.ranks = [_Steps() for _ in range(size)]

    def program(self, name: str) -> MscclProgram:
        """The program, with all its phases."""
        for rank, steps in enumerate(self.ranks):
            self._start(rank, steps)
        for phase in self.run:
            if phase.carries is Carries.VECTORS:
                self._stage(phase)
            else:
                self._rounds(phase)
        for rank, steps in enumerate(self.ranks):
            self._end(rank, steps)
        inputs = self.share if self.collective == "all_gather" else self.chunks
        outputs = self.share if self.collective == "psum_scatter" else self.chunks
        programs = tuple(steps.program(inputs, outputs) for steps in self.ranks)
        return MscclProgram(name, self.collective, programs)

    def _shard(self, buffer: str, number: int) -> ChunkPlace:
        return ChunkPlace(buffer, number * self.share)

    def _start(self, rank: int, steps: "_Steps") -> None:
        """Copy the input to the place where the rounds work on it."""
        if self.collective == "all_gather":
            steps.copy(self._shard("i", 0), self._shard("o", rank), self.share)
        elif self.collective == "all_to_all":
            for slot in range(self.size):
                to = self.run[0].along(rank, slot)
                steps.copy(self._shard("i", to), self._shard("s", slot), self.share)
        else:
            buffer = "o" if self.collective == "psum" else "s"
            steps.copy(self._shard("i", 0), self._shard(buffer, 0), self.chunks)

    def _end(self, rank: int, steps: "_Steps") -> None:
        """Copy the result from scratch to the output."""
        if self.collective == "psum_scatter":
            steps.copy(self._shard("s", rank), self._shard("o", 0), self.share)
        elif self.collective == "all_to_all":
            for slot in range(self.size):
                origin = self.run[0].along(rank, slot, -1)
                steps.copy(self._shard("s", slot), self._shard("o", origin), self.share)

    def _rounds(self, phase: Phase) -> None:
        buffer = "o" if self.collective in ("all_gather", "psum") else "s"
        by_slot = phase.carries is Carries.BLOCKS

        def place(rank: int, offset: int) -> ChunkPlace:
            return self._shard(buffer, offset if by_slot else phase.along(rank, offset, -1))

        self._send(phase, "rrc" if phase.carries is Carries.SUMS else "r", place)

    def _stage(self, phase: Phase) -> None:
        """Gather whole vectors in scratch, and add them in the order of the ranks."""
        moves = [move for moves in phase.rounds for move in moves]
        offsets = {0}.union(*(phase.schedule.arrivals(move) for move in moves))
        members = [sorted(phase.along(rank, o, -1) for o in offsets) for rank in range(self.size)]

        def place(rank: int, offset: int) -> ChunkPlace:
            return self._shard("s", members[rank].index(phase.along(rank, offset, -1)))

        for rank, steps in enumerate(self.ranks):
            steps.copy(self._shard("o", 0), place(rank, 0), self.share)
        self._send(phase, "r", place)
        for steps in self.ranks:
            for number in range(len(offsets)):
                parts = self._shard("s", number), self._shard("o", 0)
                steps.add(_LOCAL, Step("re" if number else "cpy", *parts, self.share))

    def _send(self, phase: Phase, kind: str, place: Callable[[int, int], ChunkPlace]) -> None:
        """The rounds of a phase: in each, first all ranks send, and then all receive."""
        width = self.share // phase.schedule.lanes
        for moves in phase.rounds:
            post = []
            for move in moves:
                by_slot = phase.carries is Carries.BLOCKS
                arrivals = move.offsets if by_slot else phase.schedule.arrivals(move)
                for rank, steps in enumerate(self.ranks):
                    to = phase.schedule.step(rank, move.axis, move.shift)
                    sent = [_later(place(rank, o), move.lane * width) for o in move.offsets]
                    got = [_later(place(to, o), move.lane * width) for o in arrivals]
                    for source, target, count in _runs(sent, got, width):
                        step = Step("s", source, target, count)
                        steps.add((to, None, move.lane), step)
                        source = target if kind == "rrc" else source
                        step = Step(kind, source, target, count)
                        post.append((to, (None, rank, move.lane), step))
            for to, key, step in post:
                self.ranks[to].add(key, step)


def _later(place: ChunkPlace, chunks: int) -> ChunkPlace:
    return place._replace(first=place.first + chunks)


def _runs(
    sources: list[ChunkPlace], targets: list[ChunkPlace], width: int
) -> list[tuple[ChunkPlace, ChunkPlace, int]]:
    """Pairs of places of `width` chunks each; pairs that continue each other are joined."""
    runs: list[tuple[ChunkPlace, ChunkPlace, int]] = []
    for source, target in sorted(zip(sources, targets, strict=True)):
        if runs:
            before, there, count = runs[-1]
            if (source, target) == (_later(before, count), _later(there, count)):
                runs[-1] = (before, there, count + width)
                continue
        runs.append((source, target, width))
    return runs


class _Steps:
    """The thread blocks of one rank while they grow. Every step waits for what it needs."""

    def __init__(self) -> None:
        self.blocks: dict[_Key, list[Step]] = {}
        #: By two thread blocks: the last step of the second for which the first has waited.
        self.waited: dict[tuple[_Key, int], int] = {}
        self.writer: dict[ChunkPlace, tuple[int, int]] = {}
        self.readers = defaultdict[ChunkPlace, dict[int, int]](dict)

    def copy(self, source: ChunkPlace, target: ChunkPlace, count: int) -> None:
        """Add a step that copies chunks."""
        self.add(_LOCAL, Step("cpy", source, target, count))

    def add(self, key: _Key, step: Step) -> None:
        """Add a step to a thread block, after empty steps that wait for others."""
        steps = self.blocks.setdefault(key, [])
        block = list(self.blocks).index(key)
        needs = [self.writer[at] for at in (*step.read, *step.written) if at in self.writer]
        needs += [reader for at in step.written for reader in self.readers[at].items()]
        waits = []
        for other, last in sorted(needs, reverse=True):
            if other != block and self.waited.get((key, other), -1) < last:
                self.waited[key, other] = last
                waits.append((other, last))
        steps += [replace(step, kind="nop", count=0, after=after) for after in waits[:-1]]
        steps.append(replace(step, after=waits[-1] if waits else None))
        here = block, len(steps) - 1
        for place in step.read:
            self.readers[place][block] = here[1]
        for place in step.written:
            self.writer[place], self.readers[place] = here, {}

    def program(self, inputs: int, outputs: int) -> RankProgram:
        """The program of this rank, with as much scratch as its thread blocks use."""
        blocks = tuple(Block(*key, tuple(steps)) for key, steps in self.blocks.items())
        used = [place for block in blocks for step in block.steps for place in step.written]
        scratch = max((place.first + 1 for place in used if place.buffer == "s"), default=0)
        return RankProgram(inputs, outputs, scratch, blocks)
