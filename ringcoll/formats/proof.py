"""The proof of a program: its steps in an order that their waiting allows, executed on symbols.

A symbol is a set of contributions: `(rank, chunk)` is a chunk of a rank's input. A sum has the
contributions of everything that was added. The program is right if it ends (no step waits for
ever), if the order in which two thread blocks use a chunk is always determined, and if every output
holds the result of the collective. `Schedule.check` proves the same for a schedule, for one rank r,
because all ranks are alike; here every rank is checked.
"""

from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from ringcoll.formats.program import At, ChunkPlace, MscclProgram, Step
from ringcoll.schedules.schedule import ScheduleError

#: The chunks of inputs that were added; a chunk that holds nothing has an empty set.
Value = frozenset[tuple[int, int]]
_NOTHING: Value = frozenset()


def prove(program: MscclProgram) -> tuple[str, ...]:
    """Execute a program on symbols, for every rank.

    Args:
        program: a program of any collective.

    Returns:
        The calls for which it was proved, all that it is for: "in place", "out of place" or both.

    Raises:
        ScheduleError: it is wrong; the message has the rank, the step and the chunk.

    >>> formats.prove(formats.program("psum", "ring", (4,)))
    ('in place', 'out of place')
    """
    program.check()
    order = _StepOrder(program)
    meant = {"in place": program.in_place, "out of place": program.out_of_place}
    places = tuple(place for place, is_meant in meant.items() if is_meant)
    for place in places:
        run = _Run(program, order, place == "in place")
        try:
            run.execute()
            run.check()
        except ScheduleError as error:
            raise type(error)(f"{error} ({place})") from error
    return places


class _StepOrder:
    """An order of the steps of a program in which all can run.

    A step waits for the step before it in its thread block, for the step that it names, and for the
    message that it receives. The n-th message of a connection is sent by the n-th step that sends
    on it, and received by the n-th step that receives on it.

    Raises:
        ScheduleError: steps wait for each other, or for a message that nobody sends.
    """

    def __init__(self, program: MscclProgram) -> None:
        self.program = program
        self.steps = dict(program.steps())
        self.source = self._sources()
        self.waits = {at: self._waits(at, step) for at, step in self.steps.items()}
        try:
            self.order = [*TopologicalSorter(self.waits).static_order()]
        except CycleError as error:
            other, at, *_ = error.args[1]
            raise ScheduleError(f"{at}: it waits for ever, for {other}") from error
        self.place = {at: i for i, at in enumerate(self.order)}
        #: For each step and each thread block of its rank: the last step that is done before it.
        self.done: dict[At, dict[int, int]] = {}
        for at in self.order:
            done = self.done[at] = {}
            for other in self.waits[at]:
                if other.rank == at.rank:
                    for block, last in (*self.done[other].items(), (other.block, other.step)):
                        done[block] = max(done.get(block, -1), last)

    def _sources(self) -> dict[At, At]:
        """For each step that receives, the step that sends."""
        sends, receives = defaultdict[Any, list[At]](list), defaultdict[Any, list[At]](list)
        for at, step in self.steps.items():
            block = self.program.ranks[at.rank].blocks[at.block]
            if step.does.sends:
                sends[at.rank, block.to, block.channel].append(at)
            if step.does.receives:
                receives[block.source, at.rank, block.channel].append(at)
        sources = {}
        for key in {**sends, **receives}:
            for end in (sends[key], receives[key]):
                if len({at.block for at in end}) > 1:
                    why = "two thread blocks have its connection: their messages would mix"
                    raise ScheduleError(f"{end[-1]}: {why}")
            if len(sends[key]) != len(receives[key]):
                sender, receiver, channel = key
                raise ScheduleError(
                    f"messages from rank {sender} to rank {receiver} on channel {channel}: "
                    f"{len(sends[key])} sent, {len(receives[key])} received"
                )
            for sender, receiver in zip(sends[key], receives[key], strict=True):
                sent, received = self.steps[sender].count, self.steps[receiver].count
                if sent != received:
                    why = f"it receives {received} chunks, but {sender} sends {sent}"
                    raise ScheduleError(f"{receiver}: {why}")
                sources[receiver] = sender
        return sources

    def _waits(self, at: At, step: Step) -> list[At]:
        waits = [at._replace(step=at.step - 1)] if at.step else []
        waits += [At(at.rank, *step.after)] if step.after else []
        return waits + ([self.source[at]] if at in self.source else [])

    def before(self, first: At, second: At) -> bool:
        """Whether a step is always done before another step of its rank starts."""
        if self.done[second].get(first.block, -1) >= first.step:
            return True
        # Messages through other ranks may also order the two.
        waiting, seen = [second], {second}
        for at in waiting:  # it grows
            for other in self.waits[at]:
                if other == first:
                    return True
                if other not in seen and self.place[other] > self.place[first]:
                    seen.add(other)
                    waiting.append(other)
        return False


class _Run:
    """One execution, in place or out of place."""

    def __init__(self, program: MscclProgram, order: _StepOrder, in_place: bool) -> None:
        self.program, self.order, self.in_place = program, order, in_place
        self.share = program.chunks // program.size  # the chunks of a shard; psum does not use it
        self.writer: dict[tuple[int, ChunkPlace], At] = {}
        self.readers = defaultdict[tuple[int, ChunkPlace], list[At]](list)
        self.sent: dict[At, tuple[Value, ...]] = {}
        inputs = self.share if program.collective == "all_gather" else program.chunks
        self.values: dict[tuple[int, ChunkPlace], Value] = {
            (rank, self.real(rank, ChunkPlace("i", i))): frozenset([(rank, i)])
            for rank in range(program.size)
            for i in range(inputs)
        }

    def real(self, rank: int, place: ChunkPlace) -> ChunkPlace:
        """The place in memory. In a call in place, input and output are the same memory."""
        kind, ahead = self.program.collective, rank * self.share
        if self.in_place and place.buffer == "i" and kind != "psum_scatter":
            return ChunkPlace("o", place.first + (ahead if kind == "all_gather" else 0))
        if self.in_place and place.buffer == "o" and kind == "psum_scatter":
            return ChunkPlace("i", place.first + ahead)
        return place

    def execute(self) -> None:
        """Execute every step, in order."""
        for at in self.order.order:
            step = self.order.steps[at]
            parts = [self.sent[self.order.source[at]]] if step.does.receives else []
            if step.does.reads:
                parts.append(tuple(self._read(at, p) for p in step.source.cells(step.count)))
            if step.does.adds:
                parts.append(tuple(self._read(at, p) for p in step.target.cells(step.count)))
            values = tuple(self._sum(at, column) for column in zip(*parts, strict=True))
            for place, value in zip(step.written, values, strict=bool(step.written)):
                self._write(at, place, value)
            if step.does.sends:
                self.sent[at] = values

    def _sum(self, at: At, values: tuple[Value, ...]) -> Value:
        added = _NOTHING.union(*values)
        if len(added) < sum(map(len, values)):
            (rank, chunk), *_ = sorted(x for x in added if sum(x in v for v in values) > 1)
            raise ScheduleError(f"{at}: it adds chunk {chunk} of rank {rank} twice")
        return added

    def _read(self, at: At, place: ChunkPlace) -> Value:
        key = at.rank, self.real(at.rank, place)
        self._check_ordered(at, place, "reads", self.writer.get(key), "writes")
        self.readers[key].append(at)
        if key not in self.values:
            raise ScheduleError(f"{at}: it reads {place}, which holds nothing yet")
        return self.values[key]

    def _write(self, at: At, place: ChunkPlace, value: Value) -> None:
        key = at.rank, self.real(at.rank, place)
        self._check_ordered(at, place, "writes", self.writer.get(key), "writes")
        for reader in self.readers.pop(key, []):
            self._check_ordered(at, place, "writes", reader, "reads")
        self.values[key], self.writer[key] = value, at

    def _check_ordered(
        self, at: At, place: ChunkPlace, does: str, other: At | None, did: str
    ) -> None:
        """Refuse two steps that use a chunk if nothing determines which of them is first."""
        if other is None or other.block == at.block or self.order.before(other, at):
            return
        raise ScheduleError(
            f"{at}: it {does} {place}, and thread block {other.block}, step {other.step} {did} it; "
            "nothing determines which is first: one must wait for the other"
        )

    def wanted(self, rank: int) -> Iterator[Value]:
        """What each chunk of the output must hold."""
        program, share = self.program, self.share
        for i in range(share if program.collective == "psum_scatter" else program.chunks):
            if program.collective == "all_gather":
                yield frozenset([(i // share, i % share)])
            elif program.collective == "all_to_all":
                yield frozenset([(i // share, rank * share + i % share)])
            else:
                ahead = rank * share if program.collective == "psum_scatter" else 0
                yield frozenset((r, ahead + i) for r in range(program.size))

    def check(self) -> None:
        """Refuse the first output that does not hold what it must hold."""
        for rank in range(self.program.size):
            for i, wanted in enumerate(self.wanted(rank)):
                key = rank, self.real(rank, ChunkPlace("o", i))
                value = self.values.get(key, _NOTHING)
                if value == wanted:
                    continue
                verb = "lacks" if wanted - value else "also holds"
                source, chunk = min(wanted - value or value - wanted)
                why = f"at the end, o[{i}] {verb} chunk {chunk} of rank {source}"
                why += f"; {self.writer[key]} wrote it last" if key in self.writer else ""
                raise ScheduleError(f"rank {rank} does not get chunk {i}: {why}")
