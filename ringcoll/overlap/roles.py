"""The role of each instruction in a timeline: work, a step of a transfer, or unknown."""

import re
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

from ringcoll.overlap.hlo import Computation, Instruction, Module
from ringcoll.overlap.transfers import COLLECTIVES, PERMUTE, SEND_RECV_PAIRS, is_collective


class Action(Enum):
    """What an instruction does to a transfer; COMPUTE if it does nothing to one."""

    COMPUTE = auto()
    START = auto()
    UPDATE = auto()
    DONE = auto()
    BLOCKING = auto()  # a collective that starts and ends
    SPREAD = auto()  # a fusion with a collective in it: a part of one under way, or a whole one


class Role(NamedTuple):
    """An action, its computation, and its collective, if any.

    `unread` says what communicates in a way that cannot be priced; "" if nothing does. `group` has
    the collectives of a start that has several, with their computations.
    """

    phase: Action
    where: Computation
    what: Instruction | None = None
    unread: str = ""
    group: tuple[tuple[Computation, Instruction], ...] = ()

    @property
    def sends(self) -> bool:
        """Whether it communicates, in a known or unknown way."""
        return bool(self.what or self.unread)


_MARKERS = {"AsyncCollectiveStart": Action.START, "AsyncCollectiveDone": Action.DONE}
_PHASES = {"start": Action.START, "update": Action.UPDATE, "done": Action.DONE}
#: The beginnings of the names of collectives.
_NAMED = re.compile("all-|collective-|reduce-scatter|ragged-all-")


def role_of(module: Module, computation: Computation, instruction: Instruction) -> Role:
    """The role of an instruction that is not a loop, call or conditional."""
    opcode = instruction.opcode
    base, _, last = opcode.rpartition("-")
    if opcode in COLLECTIVES:
        return Role(Action.BLOCKING, computation, instruction)
    if opcode == "send" and instruction.attribute(SEND_RECV_PAIRS):  # it starts a permute
        return Role(Action.START, computation, replace(instruction, opcode=PERMUTE))
    if opcode == "recv" and instruction.attribute(SEND_RECV_PAIRS):
        return Role(Action.UPDATE, computation)
    phase = _PHASES.get(last, Action.COMPUTE)
    if base in COLLECTIVES and phase is Action.START:
        return Role(phase, computation, instruction)
    if phase in (Action.UPDATE, Action.DONE):
        return Role(phase, computation)
    inside = list(module.within(instruction))
    unread = next(filter(None, map(_unknown, (instruction, *(i for _, i in inside)))), "")
    collectives = [(c, i) for c, i in inside if is_collective(i)]
    if not collectives:
        return Role(phase, computation, None, unread)
    where, what = collectives[0]
    if what.opcode == "all-reduce" and where.name.startswith("all-reduce-scatter"):
        what = replace(what, opcode="reduce-scatter")  # each rank keeps only its slice
    several = len(collectives) > 1 or any(i.opcode in ("while", "conditional") for _, i in inside)
    direct = all(c.name in instruction.called for c, _ in collectives)
    if several and direct and phase is Action.START:
        return Role(phase, where, what, unread, tuple(collectives))
    if several:
        unread = unread or "collectives in one, and only the first is priced, and once"
    if phase is Action.START:
        return Role(phase, where, what, unread)
    if opcode != "fusion":
        return Role(phase, computation, None, unread or f"{opcode} with {what.opcode} in it")
    for _, inner in inside:  # a fusion may start, continue or end a collective
        if marked := _MARKERS.get(inner.attribute("custom_call_target") or ""):
            return Role(marked, where, what, unread)
    return Role(Action.SPREAD, where, what, unread)


def _unknown(instruction: Instruction) -> str:
    """What an instruction sends or waits for, if nothing here can price it; "" if there is none."""
    opcode = instruction.opcode
    base, _, last = opcode.rpartition("-")
    if opcode == "custom-call":
        if instruction.attribute("has_communication") == "true":
            return "a kernel that sends by remote copies of its own"
        if instruction.number("collective_id") is not None:
            return "a kernel that waits for other devices"
    if opcode in ("send", "recv", "infeed", "outfeed"):
        return f"{opcode}, which waits for the host or for another device"
    known = opcode in COLLECTIVES or (base in COLLECTIVES and last in _PHASES)
    return f"{opcode}, an unknown collective" if _NAMED.match(opcode) and not known else ""
