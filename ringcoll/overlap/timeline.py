"""A scheduled program run on paper: one stream of instructions, and the wire under it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ringcoll.overlap.chips import Chip
from ringcoll.overlap.costs import Costs, memory_seconds
from ringcoll.overlap.hlo import Computation, Instruction, Module
from ringcoll.overlap.loops import trip_count
from ringcoll.overlap.network import FAR, Link, Network
from ringcoll.overlap.transfers import COLLECTIVES, Transfer, transfer
from ringcoll.overlap.work import copied, flops

#: Turns of a loop that are run one by one before equal ones are only counted.
TURNS = 16
_MARKERS = {"AsyncCollectiveStart": "start", "AsyncCollectiveDone": "done"}
_PASSES_ON = ("get-tuple-element", "tuple", "bitcast", "opt-barrier", "copy")


class Segment(NamedTuple):
    """A stretch of the timeline: `row` is compute, memory, exposed, wire or skipped."""

    row: str
    start: float
    stop: float
    label: str


@dataclass
class Pending:
    """What was started and has not been waited for.

    A transfer; or, where wire is None, a copy within the chip's memory, or (flops > 0) a matmul
    on another stream of a GPU.
    """

    name: str
    wire: Transfer | None
    seconds: float
    end: float | None  # None: announced, but not begun
    before: tuple[float, float, float]  # compute, FLOPs, matmuls done until its start
    flops: float


class Timeline:
    """What running a program once costs; see `run`. `tally` sums by kind and by transfer.

    Args:
        module: the program.
        network: where its ranks are.
        chip: what it runs on; None: count only, every time is 0.
        profile: cycles by instruction; see `Costs`.
    """

    def __init__(
        self, module: Module, network: Network, chip: Chip | None, profile: Mapping[str, int]
    ) -> None:
        self._module, self._network, self._chip = module, network, chip
        self._costs = Costs(module, chip, profile)
        self.now = 0.0
        self.tally: defaultdict[tuple, float] = defaultdict(float)
        self.transfers: dict[str, tuple[Transfer, bool]] = {}  # and whether asynchronous
        self.segments: list[Segment] = []
        self.notes: set[str] = set()
        self.unread: set[str] = set()  # instructions whose times are not known, by name
        self._free: defaultdict[Link | str, float] = defaultdict(float)
        self._pending: dict[str, Pending] = {}
        self._carried: dict[str, str] = {}  # what holds the state of which pending transfer
        self._roles: dict[str, tuple] = {}

    def run(self) -> "Timeline":
        """Run the program from its first instruction to its last."""
        self._run(self._module.entry)
        return self

    def _run(self, computation: Computation) -> None:
        for instruction in computation.instructions:
            self._step(computation, instruction)

    def _step(self, computation: Computation, instruction: Instruction) -> None:
        match instruction.opcode:
            case "while":
                return self._loop(computation, instruction)
            case "call":
                for called in self._module.called(instruction):
                    self._run(called)
                return None
            case "conditional":
                self.notes.add("of a conditional, the longest branch is taken")
                branches = list(self._module.called(instruction))
                return self._run(max(branches, key=self._length)) if branches else None
        role, where, what = self._role(computation, instruction)
        if role == "start":
            self._start(instruction, where, what)
        elif role == "update":
            self._update(instruction)
        elif role == "done":
            self._done(instruction)
        elif role == "synchronous":
            self._start(instruction, where, what, synchronous=True)
            self._done(instruction)
        else:
            self._compute(computation, instruction, role == "carrier")
        return None

    def _length(self, computation: Computation) -> float:
        return sum(self._costs.of(computation, i).seconds for i in computation.instructions)

    def _role(self, computation: Computation, instruction: Instruction) -> tuple:
        """start, update, done, synchronous, carrier or compute; and the collective, if any."""
        if instruction.name not in self._roles:
            self._roles[instruction.name] = self._find_role(computation, instruction)
        return self._roles[instruction.name]

    def _find_role(self, computation: Computation, instruction: Instruction) -> tuple:
        base, _, phase = instruction.opcode.rpartition("-")
        if instruction.opcode in COLLECTIVES:
            return "synchronous", computation, instruction
        if phase in ("update", "done"):
            return phase, None, None
        if base in COLLECTIVES:  # its phase is start
            return "start", computation, instruction
        if base in ("send", "recv"):
            self.notes.add("transfers to and from the host are taken as free")
            return "compute", None, None
        if instruction.opcode != "fusion" and phase != "start":
            return "compute", None, None
        inside = list(self._module.within(instruction))
        found = [(c, i) for c, i in inside if i.opcode.removesuffix("-start") in COLLECTIVES]
        where, what = found[0] if found else (computation, None)
        if phase == "start":
            return "start", where, what
        if what is None:
            return "compute", None, None
        for _, inner in inside:  # a fusion that begins, goes on with or ends a collective
            if role := _MARKERS.get(inner.attribute("custom_call_target") or ""):
                return role, where, what
        if any(self._sends(name, what) for name in instruction.operands):
            return "carrier", None, None
        if what.opcode == "all-reduce" and where.name.startswith("all-reduce-scatter"):
            what = replace(what, opcode="reduce-scatter")  # each rank keeps only its slice
        return "synchronous", where, what

    def _sends(self, name: str, collective: Instruction) -> bool:
        """Whether a name carries the state of this very collective, not yet waited for."""
        pending = self._pending.get(self._carried.get(name, ""))
        return bool(pending and pending.wire and pending.wire.kind == collective.opcode)

    def _start(
        self,
        instruction: Instruction,
        where: Computation,
        what: Instruction | None,
        synchronous: bool = False,
    ) -> None:
        wire, seconds, work = None, 0.0, 0.0
        if what is not None:
            wire = transfer(where, what, self._network, self._chip)
            if wire.hops > FAR and self._network.stated:
                self.notes.add(
                    f"warning: {instruction.name} goes {wire.hops} hops; order the devices so that "
                    "neighbours are neighbours: overlap.mesh(topology, axis=size)"
                )
            seconds = wire.seconds
            # A GPU's compiler writes start and done even of what blocks the stream, and says so.
            synchronous = synchronous or instruction.attribute("is_sync") == "true"
            self.transfers[instruction.name] = wire, not synchronous
        else:
            work = flops(self._module, where, instruction)
            if not instruction.operands:
                self.notes.add("what runs on sparse cores, but for collectives, is taken as free")
            elif self._chip and instruction.attribute("cross_program_prefetch_index") is None:
                seconds = memory_seconds(copied(where, instruction), self._chip)
        # A matmul that is still running counts as under what starts now.
        beside = [pending.flops for pending in self._pending.values() if pending.flops]
        before = (
            self.tally["compute",],
            self.tally["flops",] - sum(beside),
            self.tally["matmuls",] - len(beside),
        )
        self.tally["flops",] += work
        self.tally["matmuls",] += work > 0
        pending = Pending(instruction.name, wire, seconds, None, before, work)
        self._pending[instruction.name] = pending
        self._carried[instruction.name] = instruction.name
        if instruction.operands:  # else an update brings them
            self._begin(pending)

    def _begin(self, pending: Pending) -> None:
        queues = pending.wire.links if pending.wire else {"memory"}
        start = max(self.now, *(self._free[queue] for queue in queues)) if queues else self.now
        pending.end = start + pending.seconds
        for queue in queues:
            self._free[queue] = pending.end
        if pending.wire:
            for queue in queues:
                self.tally["busy", queue] += pending.seconds
            self._draw("wire", start, pending.end, pending.name)

    def _update(self, instruction: Instruction) -> None:
        pending = self._find(instruction)
        if pending:
            self._carried[instruction.name] = pending.name
            if pending.end is None:
                self._begin(pending)

    def _find(self, instruction: Instruction) -> Pending | None:
        """The transfer that an instruction waits for or goes on with."""
        for name in (instruction.name, *instruction.operands):
            pending = self._pending.get(self._carried.get(name, ""))
            if pending:
                return pending
        self.notes.add("transfers that start in one turn of a loop and end in the next are free")
        return None

    def _done(self, instruction: Instruction) -> None:
        pending = self._find(instruction)
        if pending is None:
            return
        del self._pending[pending.name]
        end = max(self.now, pending.end or 0.0)
        waited = end - self.now
        row = "exposed" if pending.wire else "memory"
        self._draw(row, self.now, end, pending.name)
        self.now = end
        self.tally[row,] += waited
        if pending.wire:
            between = zip(("compute", "flops", "matmuls"), pending.before, strict=True)
            for key, before in between:
                self.tally[pending.name, key] += self.tally[key,] - before
            self.tally[pending.name, "bare"] += self.tally["matmuls",] == pending.before[2]
            self.tally[pending.name, "exposed"] += waited
            self.tally[pending.name, "count"] += 1

    def _compute(self, computation: Computation, instruction: Instruction, carrier: bool) -> None:
        for name in instruction.operands:
            if name in self._carried and (carrier or instruction.opcode in _PASSES_ON):
                self._carried.setdefault(instruction.name, self._carried[name])
        cost = self._costs.of(computation, instruction)
        if cost.source:
            self.tally["source", cost.source] += cost.seconds
        self.tally["compute",] += cost.seconds
        self.tally["flops",] += cost.flops
        self.tally["matmuls",] += cost.flops > 0
        self._draw("compute", self.now, self.now + cost.seconds, instruction.name)
        self.now += cost.seconds

    def _loop(self, computation: Computation, instruction: Instruction) -> None:
        turns = trip_count(self._module, computation, instruction)
        if turns is None:
            self.notes.add(f"the turns of {instruction.name} cannot be read: it is run once")
            self.unread.add(instruction.name)
            turns = 1
        body = self._module.computations[(instruction.attribute("body") or "").lstrip("%")]
        self._carry(computation, instruction, body)
        last: dict[tuple, float] = {}
        for turn in range(turns):
            before, start = self.tally.copy(), self.now
            self._run(body)
            grown = {k: v - before.get(k, 0.0) for k, v in self.tally.items()}
            if turn + 1 >= TURNS and _equal(grown, last):
                self._skip(turns - turn - 1, grown, start)
                return
            last = grown

    def _carry(self, computation: Computation, loop: Instruction, body: Computation) -> None:
        """A loop may go on with a transfer that was begun before it, and is ended after it."""
        for place, name in enumerate(computation.operands(loop)[0].operands):
            if name in self._carried:
                for users in (body.users[body.parameters[0].name], computation.users[loop.name]):
                    for user in users:
                        if user.opcode == "get-tuple-element" and user.number("index") == place:
                            self._carried[user.name] = self._carried[name]

    def _skip(self, turns: int, grown: Mapping[tuple, float], start: float) -> None:
        """Count turns of a loop that are like the last, which began at `start`."""
        for key, value in grown.items():
            self.tally[key] += turns * value
        later = turns * (self.now - start)
        for queue, free in self._free.items():
            if free > start:
                self._free[queue] = free + later
        self._draw("skipped", self.now, self.now + later, f"{turns} more turns")
        self.now += later

    def _draw(self, row: str, start: float, stop: float, label: str) -> None:
        if stop > start:
            self.segments.append(Segment(row, start, stop, label))


def _equal(a: Mapping[tuple, float], b: Mapping[tuple, float]) -> bool:
    both = ((a.get(key, 0.0), b.get(key, 0.0)) for key in {*a, *b})
    return all(abs(x - y) <= 1e-9 * max(abs(x), abs(y)) for x, y in both)
