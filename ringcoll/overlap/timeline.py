"""Simulate a scheduled program: one stream of instructions, and transfers at the same time."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import NamedTuple

from ringcoll.overlap.chips import Chip, Gpu
from ringcoll.overlap.hlo import Computation, Instruction, Module, loop_part, trip_count
from ringcoll.overlap.instruction_costs import Cost, Costs
from ringcoll.overlap.kernels import is_kernel
from ringcoll.overlap.transfers import Action, Role, Transfer, rings, role_of, transfer
from ringcoll.overlap.work import flops
from ringcoll.placement.network import FAR, Link, Network

#: How many turns of a loop are simulated at least. After that, equal turns are only counted.
TURNS = 16
#: The beginnings of the opcodes of copies within a chip.
_COPIES = ("copy", "slice", "dynamic")
#: The queue of the matmuls on other streams of a GPU. They take turns with the main stream.
_MATMULS = "matmuls"
#: The name of the whole program among those of its instructions.
WHOLE = ""
#: Opcodes that pass on their first operand and the transfer that it holds.
_PASSES_ON = ("get-tuple-element", "bitcast", "opt-barrier", "copy", "add-dependency")


class Sums(NamedTuple):
    """Sums over a run, of the whole program or of one instruction; times are in seconds.

    Those of a transfer say what ran between its start and its end.
    """

    compute: float = 0.0
    flops: float = 0.0
    matmuls: float = 0.0
    exposed: float = 0.0  # waits for collectives
    memory: float = 0.0  # waits for copies in the chip
    host: float = 0.0  # waits for copies to and from the host
    runs: float = 0.0  # of collectives, to their ends
    without_matmul: float = 0.0  # of these, with no matmul under them

    def plus(self, other: "Sums", times: float = 1.0) -> "Sums":
        """These sums, and the others so many times."""
        return Sums(*(a + times * b for a, b in zip(self, other, strict=True)))


_NOTHING = Sums()


@dataclass(eq=False)
class Pending:
    """A transfer that is under way, or has come.

    If `wire` is None, it is a copy in the chip's memory, or between it and the host's or, if flops
    > 0, a matmul on a second stream of a GPU; then it waits in `queue` for others of its kind.
    `before` has the sums of the program when it began. `gathers`: what comes is a gathered array,
    or a shard of one. `by_send`: a send started it.
    """

    name: str
    wire: Transfer | None
    seconds: float
    flops: float = 0.0
    queue: str = "memory"
    end: float | None = None  # None: an update will begin it
    before: Sums = _NOTHING
    gathers: bool = False
    by_send: bool = False


#: The transfers that a value holds; a tuple holds those of its elements.
HeldTransfers = Pending | tuple["HeldTransfers", ...] | None


class Scope(NamedTuple):
    """A running computation, and the transfers that its values hold, by name of the value."""

    computation: Computation
    held: dict[str, HeldTransfers]

    def operand_transfers(self, instruction: Instruction) -> list[HeldTransfers]:
        """The transfers that the operands of an instruction hold."""
        return [self.held.get(name) for name in instruction.operands]

    def result_transfers(self, instruction: Instruction) -> HeldTransfers:
        """The transfers that the result of an instruction holds, if it passes them on."""
        operands = self.operand_transfers(instruction)
        if not any(operands):
            return None
        if instruction.opcode == "tuple":
            return tuple(operands)
        if instruction.opcode not in _PASSES_ON:
            return None
        whole, place = operands[0], instruction.number("index")
        return whole[place] if isinstance(whole, tuple) and place is not None else whole

    def pending(self, instruction: Instruction) -> Iterator[Pending]:
        """Every transfer that the operands of an instruction hold."""
        return _flat(tuple(self.operand_transfers(instruction)))


def _flat(held: HeldTransfers) -> Iterator[Pending]:
    if isinstance(held, Pending):
        yield held
    elif held:
        for part in held:
            yield from _flat(part)


class Segment(NamedTuple):
    """A stretch of the timeline: `row` is compute, memory, host, exposed, wire or skipped.

    label names an instruction; source and at are its source line, as in `Row`. ways are the
    directions of the links that a transfer occupies, such as "axis 0 +".
    """

    row: str
    start: float
    stop: float
    label: str
    ways: tuple[str, ...] = ()
    source: str = ""
    at: str = ""


class Timeline:
    """One simulated run of a program; see `run`.

    `sums` are those of the program and, by name, of its instructions. `sources` says of each that
    computes where its time is from.

    Args:
        module: the program.
        network: the places of its ranks.
        chip: the chip it runs on; None: collectives are only counted, and every time is 0.
        profile: cycles by instruction; see `Costs`.
    """

    def __init__(
        self, module: Module, network: Network, chip: Chip | Gpu | None, profile: Mapping[str, int]
    ) -> None:
        self._module, self._network, self._chip = module, network, chip
        self.costs = Costs(module, chip, profile)
        self.now = 0.0
        self.sums: defaultdict[str, Sums] = defaultdict(Sums)
        self.sources: dict[str, str] = {}
        self.transfers: dict[str, tuple[Transfer, bool]] = {}  # the bool: is it asynchronous?
        self.segments: list[Segment] = []
        self.notes: set[str] = set()
        self.unread: set[str] = set()  # names of instructions whose times are unknown
        self.crossed: set[str] = set()  # of gathers whose product gathers over another axis too
        self._free: defaultdict[Link | str, float] = defaultdict(float)
        self._pending: list[Pending] = []
        self._roles: dict[tuple[str, str], Role] = {}
        self._worst: dict[tuple[str, str], int] = {}  # of a conditional, the branch that is taken
        self._branches: dict[str, Timeline] = {}

    def alike(self, chip: Chip | Gpu | None) -> "Timeline":
        """A timeline of the same program that has not run, with the same prices of compute."""
        other = Timeline(self._module, self._network, chip, {})
        other.costs, other._roles, other._worst = self.costs, self._roles, self._worst
        return other

    def run(self) -> "Timeline":
        """Simulate the program from its first instruction to its last."""
        self._run(self._module.entry, [])
        for pending in self._pending:
            if pending.wire:
                self._mark_unread(pending.name, "its end cannot be found")
        return self

    def _mark_unread(self, name: str, why: str) -> None:
        """Note that the communication of an instruction cannot be read."""
        self.unread.add(name)
        self.notes.add(f"{name} is not counted as communication: {why}")

    def _run(self, computation: Computation, given: Sequence[HeldTransfers]) -> HeldTransfers:
        """Run a computation on operands that hold `given`; return the transfers in its result."""
        parameters = computation.parameters.items()
        scope = Scope(computation, {i.name: given[n] for n, i in parameters if n < len(given)})
        for instruction in computation.instructions:
            if instruction.opcode != "parameter":
                scope.held[instruction.name] = self._step(scope, instruction)
        return scope.held.get(computation.root.name)

    def _step(self, scope: Scope, instruction: Instruction) -> HeldTransfers:
        operands, bodies = (
            scope.operand_transfers(instruction),
            list(self._module.called(instruction)),
        )
        key = scope.computation.name, instruction.name
        match instruction.opcode:
            case "while":
                return self._loop(scope, instruction)
            case "call" if bodies:
                return self._run(bodies[0], operands)
            case "conditional" if bodies:
                self.notes.add("of a conditional, the branch with most exposed is taken")
                for body in bodies:  # report what could not be read, of every branch
                    self.unread |= self._branch_timeline(body).unread
                    self.notes |= self._branch_timeline(body).notes
                if key not in self._worst:
                    every = [self._branch_timeline(body).rank for body in bodies]
                    self._worst[key] = every.index(max(every))
                taken = self._worst[key]
                return self._run(bodies[taken], operands[1 + taken :][:1])
        if key not in self._roles:
            self._roles[key] = role_of(self._module, scope.computation, instruction)
        return self._run_instruction(self._roles[key], scope, instruction)

    def _branch_timeline(self, computation: Computation) -> "Timeline":
        """The timeline of a computation that runs by itself."""
        if computation.name not in self._branches:
            alone = self.alike(self._chip)
            alone._branches = self._branches
            alone._run(computation, [])
            self._branches[computation.name] = alone
        return self._branches[computation.name]

    @property
    def rank(self) -> tuple[float, float, int]:
        """How bad a branch is: its exposed time, its time, its number of collectives."""
        return self.whole.exposed, self.now, len(self.transfers)

    @property
    def whole(self) -> Sums:
        """The sums of the whole program."""
        return self.sums[WHOLE]

    def _add(self, name: str, more: Sums) -> None:
        self.sums[name] = self.sums[name].plus(more)

    def _run_instruction(self, role: Role, scope: Scope, instruction: Instruction) -> HeldTransfers:
        """Run one instruction; return the transfers in its result."""
        if role.unread:
            self._mark_unread(instruction.name, role.unread)
        carries = None
        match role.phase:
            case Action.START if role.group:
                return tuple(
                    self._start(replace(instruction, name=what.name), Role(role.phase, where, what))
                    for where, what in role.group
                )
            case Action.START:
                return self._start(instruction, role)
            case Action.UPDATE:
                for pending in self._find(scope, instruction):
                    if pending.end is None:
                        self._begin(pending)
                return scope.held.get(instruction.operands[0])
            case Action.DONE:
                found = self._find(scope, instruction)
                for pending in found:
                    self._done(pending)
                return found[0] if len(found) == 1 else None
            case Action.SPREAD:
                carries = next(iter(self._find(scope, instruction, role.what)), None)
        if role.what and not carries:
            return self._done(self._start(instruction, role, synchronous=True))
        arrived = [p for p in scope.pending(instruction) if p.gathers and p not in self._pending]
        if self._compute(scope.computation, instruction).flops:
            if len({frozenset(rings(p.wire.members)) for p in arrived if p.wire}) > 1:
                self.crossed |= {pending.name for pending in arrived}
            arrived = []
        held = carries or scope.result_transfers(instruction)
        return held or (tuple(dict.fromkeys(arrived)) if len(instruction.shapes) == 1 else None)

    def _start(self, instruction: Instruction, role: Role, synchronous: bool = False) -> Pending:
        """Start a transfer, a copy or a matmul on a second stream."""
        where, what = role.where, role.what
        pending = Pending(instruction.name, None, 0.0, by_send=instruction.opcode == "send")
        if what is not None:
            pending.wire = self._transfer(instruction.name, where, what)
            pending.seconds = pending.wire.seconds
            ours = "ringcoll.all_gather" in (what.attribute("op_name") or "")
            pending.gathers = ours or pending.wire.kind == "all-gather"
            # A GPU's compiler also writes start and done for collectives that block the stream.
            synchronous = synchronous or instruction.attribute("is_sync") == "true"
            self.transfers[instruction.name] = pending.wire, not synchronous
        else:
            pending.flops = flops(self._module, where, instruction)
            inside = self._module.within(instruction)
            self._add(WHOLE, Sums(flops=pending.flops, matmuls=pending.flops > 0))
            if pending.flops and isinstance(self._chip, Gpu):
                pending.queue = _MATMULS
                pending.seconds = self.costs.matmul(where, instruction, pending.flops)
                self._count_compute(instruction, pending.seconds, "measured")
            elif not instruction.operands and not any(is_kernel(i) for _, i in inside):
                self.notes.add("what runs on sparse cores, except collectives, is taken as free")
            elif self._chip:
                if instruction.attribute("cross_program_prefetch_index") is not None:
                    # The program before this one may fetch the weights, but that is unknown. In
                    # any case the memory is busy with them once in each run.
                    self.notes.add("fetching weights at the start of a program is charged to it")
                cost = self.costs.of(where, instruction)
                pending.queue, pending.seconds = cost.queue or "memory", cost.seconds
        self._pending.append(pending)
        if instruction.operands:  # without operands, it begins at the update that brings them
            self._begin(pending)
        return pending

    def _transfer(self, name: str, where: Computation, what: Instruction) -> Transfer:
        if name in self.transfers:
            return self.transfers[name][0]
        wire = transfer(where, what, self._network, self._chip)
        if wire.hops > FAR and self._network.stated:
            self.notes.add(
                f"warning: a {wire.kind} goes {wire.hops} hops; order the devices so that "
                "neighbours are neighbours: ringcoll.mesh(topology, axis=size)"
            )
        return wire

    def _begin(self, pending: Pending) -> None:
        """Begin a pending transfer as soon as its queues are free."""
        # A matmul that still runs counts as under the transfer that starts now.
        beside = [other.flops for other in self._pending if other.flops]
        under = Sums(max(0.0, self._free[_MATMULS] - self.now), sum(beside), len(beside))
        pending.before = self.whole.plus(under, -1)
        queues = pending.wire.links if pending.wire else {pending.queue}
        start = max(self.now, *(self._free[queue] for queue in queues)) if queues else self.now
        pending.end = start + pending.seconds
        for queue in queues:
            self._free[queue] = pending.end
        if pending.wire:
            ways = self._network.ways(pending.wire.links)
            self._add_segment("wire", start, pending.end, pending.name, ways)
        elif pending.queue == _MATMULS:
            self._add_segment("compute", start, pending.end, pending.name)

    def _find(
        self, scope: Scope, instruction: Instruction, collective: Instruction | None = None
    ) -> list[Pending]:
        """The transfers that an instruction waits for or continues: a fusion's is one.

        With `collective`, it must be of the same kind.
        """
        # What was sent comes where a recv ends. Nothing else says to which recv a send belongs.
        sent = [p for p in self._pending if p.by_send] * (instruction.opcode == "recv-done")
        found = [
            pending
            for pending in dict.fromkeys([*scope.pending(instruction), *sent])
            if pending in self._pending
            if not collective or (pending.wire and pending.wire.kind == collective.opcode)
        ]
        if not (found or collective or instruction.opcode.startswith((*_COPIES, "send", "recv"))):
            self._mark_unread(instruction.name, "its start cannot be found")
        return found[:1] if instruction.opcode == "fusion" else found

    def _done(self, pending: Pending) -> Pending:
        """Wait for a transfer, and count how much of it was exposed."""
        self._pending.remove(pending)
        if pending.end is None:  # no update began it
            self._begin(pending)
        end = max(self.now, pending.end or 0.0)
        # A matmul on a second stream of a GPU may run meanwhile; it counts as compute.
        idle = min(end, max(self.now, self._free[_MATMULS]))
        waited = end - idle
        row = "exposed" if pending.wire else "host" if pending.queue == "host" else "memory"
        self._add_segment(row, idle, end, pending.name)
        self.now = end
        self._add(WHOLE, Sums(**{row: waited}))
        if pending.wire:
            under = self.whole.plus(pending.before, -1)._replace(memory=0.0, host=0.0)
            alone = under.matmuls == 0
            self._add(pending.name, under._replace(exposed=waited, runs=1, without_matmul=alone))
        return pending

    def _compute(self, computation: Computation, instruction: Instruction) -> Cost:
        cost = self.costs.of(computation, instruction)
        if cost.source == "roofline" and instruction.opcode == "custom-call":
            self.notes.add("a custom call is priced by the bytes of its operands and results")
        self.notes |= {cost.note} - {""}
        if cost.queue:  # a copy without start and done
            self._pending.append(Pending(instruction.name, None, cost.seconds, queue=cost.queue))
            self._done(self._pending[-1])
            return cost
        self._count_compute(instruction, cost.seconds, cost.source)
        self._add(WHOLE, Sums(flops=cost.flops, matmuls=cost.flops > 0))
        start = max(self.now, self._free[_MATMULS]) if cost.seconds else self.now
        self._add_segment("compute", start, start + cost.seconds, instruction.name)
        self.now = start + cost.seconds
        return cost

    def _count_compute(self, instruction: Instruction, seconds: float, source: str) -> None:
        if seconds:
            self.sources[instruction.name] = source
            for name in (WHOLE, instruction.name):
                self._add(name, Sums(compute=seconds))

    def _loop(self, scope: Scope, instruction: Instruction) -> HeldTransfers:
        """Run a loop. Transfers in its carry continue into the next turn and out of the loop."""
        turns = trip_count(self._module, scope.computation, instruction)
        if turns is None:
            self.notes.add(f"the turns of {instruction.name} cannot be read: it is run once")
            # A loop that sends nothing matters only to times.
            if self._chip or role_of(self._module, scope.computation, instruction).sends:
                self.unread.add(instruction.name)
            turns = 1
        condition, body = (loop_part(self._module, instruction, k) for k in ("condition", "body"))
        tests = any(role_of(self._module, condition, i).sends for i in condition.instructions)
        (carry,) = scope.operand_transfers(instruction)
        last: dict[str, Sums] = {}
        for turn in range(turns):
            before, start, older = self.sums.copy(), self.now, list(self._pending)
            if tests:
                self._run(condition, [carry])
            carry = self._run(body, [carry])
            grown = {name: sums.plus(before[name], -1) for name, sums in self.sums.items()}
            alike = (all(map(isclose, grown[name], last.get(name, _NOTHING))) for name in grown)
            if turn + 1 >= TURNS and all(alike):
                self._skip(turns - turn - 1, grown, start, older)
                break
            last = grown
        if tests:
            self._run(condition, [carry])
        return carry

    def _skip(
        self, turns: int, grown: Mapping[str, Sums], start: float, older: Sequence[Pending]
    ) -> None:
        """Count further turns of a loop that equal the last turn, which began at `start`."""
        for name, more in grown.items():
            self.sums[name] = self.sums[name].plus(more, turns)
        later = turns * (self.now - start)
        for queue, free in self._free.items():
            if free > start:
                self._free[queue] = free + later
        for pending in self._pending:
            # A transfer that this turn began stands for the one that the last turn begins.
            if pending not in older and pending.end is not None:
                pending.end += later
                pending.before = pending.before.plus(grown[WHOLE], turns)
        self._add_segment("skipped", self.now, self.now + later, f"{turns} more turns")
        self.now += later

    def _add_segment(
        self, row: str, start: float, stop: float, label: str, ways: tuple[str, ...] = ()
    ) -> None:
        if stop > start:
            self.segments.append(Segment(row, start, stop, label, ways))
