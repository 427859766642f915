"""The proof of a program: its steps in an order that their waiting allows, executed on symbols.

A symbol is a set of contributions: `(rank, chunk)` is a chunk of a rank's input. A sum has the
contributions of everything that was added. The program is right if it ends (no step waits for
ever), if the order in which two thread blocks use a chunk is always determined, and if every output
holds the result of the collective. `Schedule.check` proves the same for a schedule, for one rank r,
because all ranks are alike; here every rank is checked.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ringcoll.formats.order import StepOrder
from ringcoll.formats.program import At, ChunkPlace, Program
from ringcoll.schedules.schedule import ScheduleError

#: The chunks of inputs that were added; a chunk that holds nothing has an empty set.
Value = frozenset[tuple[int, int]]
_NOTHING: Value = frozenset()
_PLACES = ("in place", "out of place")


@dataclass(frozen=True, slots=True)
class SentChunks:
    """What a step sends: the round, the sender, the receiver, and the values of its chunks."""

    round: int
    sender: int
    receiver: int
    channel: int
    at: At
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Proof:
    """A program that is right, and what it did when it was executed.

    Attributes:
        program: the program that was proved.
        places: "in place", "out of place" or both: the kinds of calls for which it was proved.
        messages: the messages in the order in which they were sent.
        added: the most chunks that one rank adds, or that are added one after the other.
        wrote: (round, rank, value) for each value that a rank has at the start (round 0) or writes.
        buffered: how many messages a connection must be able to hold so that no rank waits for
            ever.
        overwrites_input: whether a rank's input changes when the call is out of place.
    """

    program: Program
    places: tuple[str, ...]
    messages: tuple[SentChunks, ...]
    added: int
    wrote: tuple[tuple[int, int, Value], ...] = field(repr=False)
    buffered: int
    overwrites_input: bool

    @cached_property
    def rounds(self) -> int:
        """The number of rounds: the longest chain of messages in which each waits for the last."""
        return max((message.round for message in self.messages), default=0)

    def held(self) -> list[list[set[Value]]]:
        """The values that each rank has or had after each round; round 0 is the start."""
        have = [set[Value]() for _ in range(self.program.size)]
        frames = []
        for number in range(self.rounds + 1):
            for _, rank, value in (one for one in self.wrote if one[0] == number):
                have[rank].add(value)
            frames.append([set(values) for values in have])
        return frames


def prove(program: Program, place: str | None = None) -> Proof:
    """Execute a program on symbols, for every rank.

    Args:
        program: a program of any collective.
        place: "in place" or "out of place" to prove it only for such calls; None: for all calls
            that it is for.

    Raises:
        ScheduleError: it is wrong; the message has the file and line if there are any, the rank,
            the step and the chunk.

    >>> proved = formats.prove(formats.program("psum", "ring", (4,)))
    >>> proved.rounds, len(proved.messages), proved.places
    (6, 24, ('in place', 'out of place'))
    """
    program.check_indices()
    order = StepOrder(program)
    meant = zip(_PLACES, (program.in_place, program.out_of_place), strict=True)
    places = tuple(name for name, is_meant in meant if is_meant) if place is None else (place,)
    runs = []
    for name in places:
        run = _Run(program, order, name == "in place")
        try:
            run.execute()
            run.check()
        except ScheduleError as error:
            raise type(error)(f"{error} ({name})") from error
        runs.append(run)
    last = runs[-1]
    overwrites = last.overwrites_input and not last.in_place
    messages, wrote = tuple(last.messages), tuple(last.wrote)
    added = max([*last.added, *last.chain.values()])
    return Proof(program, places, messages, added, wrote, order.buffered(), overwrites)


class _Run:
    """One execution, in place or out of place."""

    def __init__(self, program: Program, order: StepOrder, in_place: bool) -> None:
        self.program, self.order, self.in_place = program, order, in_place
        self.share = program.chunks // program.size  # the chunks of a shard; psum does not use it
        self.values: dict[tuple[int, ChunkPlace], Value] = {}
        self.writer: dict[tuple[int, ChunkPlace], At] = {}
        self.readers = defaultdict[tuple[int, ChunkPlace], list[At]](list)
        self.messages: list[SentChunks] = []
        self.sent: dict[At, tuple[Value, ...]] = {}
        self.added = [0] * program.size
        self.chain: dict[At, int] = {}  # for each step, the most chunks added in turn up to it
        self.overwrites_input = False
        inputs = self.share if program.collective == "all_gather" else program.chunks
        self.start = {
            (rank, self.real(rank, ChunkPlace("i", i))): frozenset([(rank, i)])
            for rank in range(program.size)
            for i in range(inputs)
        }
        self.values |= self.start
        self.wrote = [(0, rank, value) for (rank, _), value in self.start.items()]

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
            added = max(len(parts) - 1, 0) * len(values)
            self.added[at.rank] += added
            before = (self.chain[other] for other in self.order.waits[at])
            self.chain[at] = added + max(before, default=0)
            for place, value in zip(step.written, values, strict=bool(step.written)):
                self._write(at, place, value)
            if step.does.sends:
                self.sent[at] = values
                block = self.program.block(at)
                assert block.to is not None  # `check_indices` has checked this
                number = self.order.round[at]
                sent = SentChunks(number, at.rank, block.to, block.channel, at, values)
                self.messages.append(sent)

    def _sum(self, at: At, values: tuple[Value, ...]) -> Value:
        added = frozenset[tuple[int, int]]().union(*values)
        if len(added) < sum(map(len, values)):
            (rank, chunk), *_ = sorted(x for x in added if sum(x in v for v in values) > 1)
            raise self.program.wrong(at, f"it adds chunk {chunk} of rank {rank} twice")
        return added

    def _read(self, at: At, place: ChunkPlace) -> Value:
        key = at.rank, self.real(at.rank, place)
        self._ordered(at, place, "reads", self.writer.get(key), "writes")
        self.readers[key].append(at)
        value = self.values.get(key, _NOTHING)
        if not value:
            raise self.program.wrong(at, f"it reads {place}, which holds nothing yet")
        return value

    def _write(self, at: At, place: ChunkPlace, value: Value) -> None:
        key = at.rank, self.real(at.rank, place)
        self._ordered(at, place, "writes", self.writer.get(key), "writes")
        for reader in self.readers.pop(key, []):
            self._ordered(at, place, "writes", reader, "reads")
        self.overwrites_input |= key in self.start and value != self.start[key]
        self.values[key], self.writer[key] = value, at
        self.wrote.append((self.order.rounds[at], at.rank, value))

    def _ordered(self, at: At, place: ChunkPlace, does: str, other: At | None, did: str) -> None:
        """Refuse two steps that use a chunk if nothing determines which of them is first."""
        if other is None or other.block == at.block or self.order.before(other, at):
            return
        why = (
            f"it {does} {place}, and thread block {other.block}, step {other.step} {did} it; "
            "nothing says which is first: one must wait for the other"
        )
        raise self.program.wrong(at, why)

    def wanted(self, rank: int) -> Iterator[Value]:
        """What each chunk of the output must hold."""
        program, share = self.program, self.share
        everybody = range(program.size)
        for i in range(share if program.collective == "psum_scatter" else program.chunks):
            if program.collective == "all_gather":
                yield frozenset([(i // share, i % share)])
            elif program.collective == "all_to_all":
                yield frozenset([(i // share, rank * share + i % share)])
            else:
                ahead = rank * share if program.collective == "psum_scatter" else 0
                yield frozenset((r, ahead + i) for r in everybody)

    def check(self) -> None:
        """Refuse the first output that does not hold what it must hold."""
        for rank in range(self.program.size):
            for i, wanted in enumerate(self.wanted(rank)):
                key = rank, self.real(rank, ChunkPlace("o", i))
                found = self.values.get(key, _NOTHING)
                if found != wanted:
                    raise self._wrong_result(rank, i, found, wanted)

    def _wrong_result(self, rank: int, chunk: int, found: Value, wanted: Value) -> ScheduleError:
        place = ChunkPlace("o", chunk)
        why = f"rank {rank} does not get chunk {chunk}: at the end {place} holds "
        if not found:
            why += "nothing"
        elif wanted - found == wanted:
            why += in_words(found)
        elif missing := wanted - found:
            why += f"{in_words(found)}, without {in_words(missing)}"
        else:
            why += f"{in_words(found - wanted)} too"
        writer = self.writer.get((rank, self.real(rank, place)))
        if writer is None:
            return self.program.wrong_at(self.program.ranks[rank].line, why)
        why += f"; thread block {writer.block}, step {writer.step} wrote it last"
        return self.program.wrong_at(self.program.step(writer).line, why)


def in_words(value: Value) -> str:
    """Contributions in words, such as "chunk 1 of ranks 0, 2", chunk by chunk."""
    by_chunk = defaultdict[int, list[int]](list)
    for rank, chunk in sorted(value):
        by_chunk[chunk].append(rank)
    parts = [
        f"chunk {chunk} of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        for chunk, ranks in sorted(by_chunk.items())
    ]
    return " and ".join(parts if len(parts) < 4 else [*parts[:2], f"{len(parts) - 2} more chunks"])
