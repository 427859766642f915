"""From a schedule to a program: moves become steps of thread blocks.

Every rank has a thread block for each rank and lane that it sends to, one for each that it receives
from, and one for copies and additions. The program works on the output (all-gather, all-reduce) or
on a copy of the input in scratch, so it is right in place and out of place. A step waits for
another thread block if it needs its data, or if its round would start before the previous one.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm, prod

from ringcoll.formats.program import (
    COLLECTIVES,
    KINDS,
    Block,
    ChunkPlace,
    Program,
    RankProgram,
    Step,
)
from ringcoll.schedules.phases import Carries, Phase, phases
from ringcoll.schedules.registry import ALL_REDUCES, Algorithm, build, in_lax, listed_name

#: The most ranks of a file. A larger file would be too large to read, and slow to write.
MOST_RANKS = 512
#: The purpose of a thread block: "send", "receive" or "local", the other rank, and the channel.
_Key = tuple[str, int, int]
_LOCAL: _Key = ("local", -1, 0)


def program(collective: str, algorithm: Algorithm, shape: Sequence[int]) -> Program:
    """The program of a collective by an algorithm, for every rank.

    A chunk is a lane's share of a shard; in all-reduces that send whole vectors, a lane's share of
    the vector.

    Args:
        collective: all_gather, psum_scatter, psum (also pmean, pmax, pmin) or all_to_all, or
            another name of one of these.
        algorithm: a name, schedule or function, as `algorithms.build` takes it.
        shape: the sizes of the axes, major first.

    Raises:
        ValueError: as `algorithms.build`; or other tools do not have the collective.

    >>> made = formats.program("all_reduce", "ring", (4,))
    >>> made.size, made.chunks, len(made.ranks[0].blocks)
    (4, 4, 5)
    """
    kind = in_lax(collective)
    kind = "psum" if kind in ALL_REDUCES and kind != "pbroadcast" else kind
    if kind not in COLLECTIVES:
        known = ", ".join(COLLECTIVES)
        raise ValueError(f"{collective}: other tools have no such collective; choose from {known}")
    if prod(shape) > MOST_RANKS:
        why = "a file has a program for each"
        raise ValueError(f"{prod(shape)} ranks: {why}, at most {MOST_RANKS}")
    built = build(kind, algorithm, tuple(shape))
    name = listed_name(kind, algorithm) if isinstance(algorithm, str) else ""
    name = name or getattr(algorithm, "__name__", "schedule")
    return _Lowering(kind, phases(kind, built), prod(shape)).program(f"{collective}_{name}")


class _Lowering:
    """The steps of all ranks, phase by phase."""

    def __init__(self, collective: str, run: list[Phase], size: int) -> None:
        self.collective, self.run, self.size = collective, run, size
        self.sends_vectors = all(phase.carries is Carries.VECTORS for phase in run)
        #: The number of chunks of a shard (or of a vector): the lanes of every phase divide it.
        self.share = lcm(*(phase.schedule.lanes for phase in run))
        self.chunks = self.share * (1 if self.sends_vectors else size)
        self.ranks = [_Steps() for _ in range(size)]
        self.rounds = 0

    def program(self, name: str) -> Program:
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
        vector, shard = self.chunks, self.chunks // self.size
        inputs = shard if self.collective == "all_gather" else vector
        outputs = shard if self.collective == "psum_scatter" else vector
        programs = tuple(steps.program(inputs, outputs) for steps in self.ranks)
        return Program(name, self.collective, programs)

    def _start(self, rank: int, steps: "_Steps") -> None:
        """Copy the input to the place where the rounds work on it."""
        if self.collective == "all_gather":
            steps.copy(ChunkPlace("i", 0), ChunkPlace("o", rank * self.share), self.share)
        elif self.collective == "psum":
            steps.copy(ChunkPlace("i", 0), ChunkPlace("o", 0), self.chunks)
        elif self.collective == "psum_scatter":
            steps.copy(ChunkPlace("i", 0), ChunkPlace("s", 0), self.chunks)
        else:
            for slot in range(self.size):
                to = self.run[0].along(rank, slot)
                source, target = (
                    ChunkPlace("i", to * self.share),
                    ChunkPlace("s", slot * self.share),
                )
                steps.copy(source, target, self.share)

    def _end(self, rank: int, steps: "_Steps") -> None:
        """Copy the result from scratch to the output."""
        if self.collective == "psum_scatter":
            steps.copy(ChunkPlace("s", rank * self.share), ChunkPlace("o", 0), self.share)
        elif self.collective == "all_to_all":
            for slot in range(self.size):
                origin = self.run[0].along(rank, slot, -1)
                source, target = (
                    ChunkPlace("s", slot * self.share),
                    ChunkPlace("o", origin * self.share),
                )
                steps.copy(source, target, self.share)

    def _rounds(self, phase: Phase) -> None:
        buffer = "o" if self.collective in ("all_gather", "psum") else "s"
        by_slot = phase.carries is Carries.BLOCKS

        def place(rank: int, offset: int) -> ChunkPlace:
            shard = offset if by_slot else phase.along(rank, offset, -1)
            return ChunkPlace(buffer, shard * self.share)

        self._send(phase, "rrc" if phase.carries is Carries.SUMS else "r", place)

    def _stage(self, phase: Phase) -> None:
        """Gather whole vectors in scratch, and add them in the order of the ranks."""
        moves = [move for moves in phase.rounds for move in moves]
        offsets = {0}.union(*(phase.schedule.arrivals(move) for move in moves))
        members = [sorted(phase.along(rank, o, -1) for o in offsets) for rank in range(self.size)]

        def place(rank: int, offset: int) -> ChunkPlace:
            slot = members[rank].index(phase.along(rank, offset, -1))
            return ChunkPlace("s", slot * self.share)

        for rank, steps in enumerate(self.ranks):
            steps.copy(ChunkPlace("o", 0), place(rank, 0), self.share)
        self._send(phase, "r", place)
        for steps in self.ranks:
            for number in range(len(offsets)):
                parts = ChunkPlace("s", number * self.share), ChunkPlace("o", 0)
                steps.add(_LOCAL, Step("re" if number else "cpy", *parts, self.share))

    def _send(self, phase: Phase, kind: str, place: Callable[[int, int], ChunkPlace]) -> None:
        """The rounds of a phase: in each, first all ranks send, and then all receive."""
        width = self.share // phase.schedule.lanes
        by_slot = phase.carries is Carries.BLOCKS
        for moves in phase.rounds:
            self.rounds += 1
            post = []
            for move in moves:
                arrivals = move.offsets if by_slot else phase.schedule.arrivals(move)
                for rank, steps in enumerate(self.ranks):
                    to = phase.schedule.step(rank, move.axis, move.shift)
                    pairs = [
                        (
                            _later(place(rank, sent), move.lane * width),
                            _later(place(to, got), move.lane * width),
                        )
                        for sent, got in zip(move.offsets, arrivals, strict=True)
                    ]
                    for source, target, count in _runs(pairs, width):
                        step = Step("s", source, target, count)
                        steps.add(("send", to, move.lane), step, self.rounds)
                        source = target if KINDS[kind].reads else source
                        step = Step(kind, source, target, count)
                        post.append((to, ("receive", rank, move.lane), step))
            for to, key, step in post:
                self.ranks[to].add(key, step, self.rounds)


def _later(place: ChunkPlace, chunks: int) -> ChunkPlace:
    return place._replace(first=place.first + chunks)


def _runs(
    pairs: list[tuple[ChunkPlace, ChunkPlace]], width: int
) -> list[tuple[ChunkPlace, ChunkPlace, int]]:
    """Pairs of places of `width` chunks each; pairs that continue each other are joined."""
    runs: list[tuple[ChunkPlace, ChunkPlace, int]] = []
    for source, target in sorted(pairs):
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
        self.blocks: dict[_Key, int] = {}
        self.steps: list[list[Step]] = []
        #: After each step of each thread block: the last step of every thread block that is done.
        self.done: list[list[dict[int, int]]] = []
        #: After each step of each thread block: how many rounds have been received.
        self.rounds: list[list[int]] = []
        self.writer: dict[ChunkPlace, tuple[int, int]] = {}
        self.readers: defaultdict[ChunkPlace, dict[int, int]] = defaultdict(dict)
        self.received: dict[int, tuple[int, int]] = {}  # for each round, a step that received in it

    def copy(self, source: ChunkPlace, target: ChunkPlace, count: int) -> None:
        """Add a step that copies chunks."""
        self.add(_LOCAL, Step("cpy", source, target, count))

    def add(self, key: _Key, step: Step, number: int = 0) -> None:
        """Add a step of a round to a thread block, after empty steps that wait for others."""
        block = self.blocks.setdefault(key, len(self.blocks))
        if block == len(self.steps):
            for grows in (self.steps, self.done, self.rounds):
                grows.append([])
        read, written = step.read, step.written
        needs = {self.writer[place] for place in (*read, *written) if place in self.writer}
        needs |= {one for place in written for one in self.readers[place].items()}
        done = dict(self.done[block][-1]) if self.done[block] else {}
        rounds = self.rounds[block][-1] if self.rounds[block] else 0
        waits: list[tuple[int, int]] = []

        def wait(other: int, last: int) -> None:
            nonlocal rounds
            if other == block or done.get(other, -1) >= last:
                return
            waits.append((other, last))
            for one, until in (*self.done[other][last].items(), (other, last)):
                done[one] = max(done.get(one, -1), until)
            rounds = max(rounds, self.rounds[other][last])

        for other, last in sorted(needs, key=lambda need: -need[1]):
            wait(other, last)
        if step.does.sends and rounds < number - 1:
            wait(*self.received[number - 1])
        if step.does.receives:
            rounds = max(rounds, number)
        for after in waits[:-1]:
            self._append(block, replace(step, kind="nop", count=0, after=after), done, rounds)
        self._append(block, replace(step, after=waits[-1] if waits else None), done, rounds)
        here = block, len(self.steps[block]) - 1
        for place in read:
            self.readers[place][block] = here[1]
        for place in written:
            self.writer[place], self.readers[place] = here, {}
        if step.does.receives:
            self.received[number] = here

    def _append(self, block: int, step: Step, done: dict[int, int], rounds: int) -> None:
        self.steps[block].append(step)
        self.done[block].append(done)
        self.rounds[block].append(rounds)

    def program(self, inputs: int, outputs: int) -> RankProgram:
        """The program of this rank, with as much scratch as its thread blocks use."""
        used = [
            place.first + step.count
            for steps in self.steps
            for step in steps
            for place in (step.source, step.target)
            if place.buffer == "s" and step.kind != "nop"
        ]
        blocks = []
        for (does, peer, channel), number in self.blocks.items():
            to, source = peer if does == "send" else None, peer if does == "receive" else None
            blocks.append(Block(to, source, channel, tuple(self.steps[number])))
        return RankProgram(inputs, outputs, max(used, default=0), tuple(blocks))
