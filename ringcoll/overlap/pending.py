"""Transfers that were started and not yet waited for, and the values that hold their state."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ringcoll.overlap.hlo import Computation, Instruction
from ringcoll.overlap.transfers import Transfer

#: What hands on its first operand, and with it the state of a transfer, if any.
_PASSES_ON = ("get-tuple-element", "bitcast", "opt-barrier", "copy", "add-dependency")


@dataclass(eq=False)
class Pending:
    """A transfer that is under way.

    Or, where wire is None, a copy within the chip's memory, or (flops > 0) a matmul on another
    stream of a GPU. `before` is what had been computed when it began.
    """

    name: str
    wire: Transfer | None
    seconds: float
    flops: float = 0.0
    end: float | None = None  # None: announced, but not begun
    before: dict[str, float] = field(default_factory=dict)


#: What a value holds: a tuple holds what its elements do.
Held = Pending | tuple["Held", ...] | None


class Scope(NamedTuple):
    """A computation that is run, and what its values hold, by name."""

    computation: Computation
    held: dict[str, Held]

    def given(self, instruction: Instruction) -> list[Held]:
        """What the operands of an instruction hold."""
        return [self.held.get(name) for name in instruction.operands]

    def passed(self, instruction: Instruction) -> Held:
        """What the result of an instruction holds, if it only names, groups or copies."""
        given = self.given(instruction)
        if not any(given):
            return None
        if instruction.opcode == "tuple":
            return tuple(given)
        if instruction.opcode not in _PASSES_ON:
            return None
        whole, place = given[0], instruction.number("index")
        return whole[place] if isinstance(whole, tuple) and place is not None else whole

    def pending(self, instruction: Instruction) -> Iterator[Pending]:
        """Every transfer that the operands of an instruction hold."""
        return _flat(tuple(self.given(instruction)))


def _flat(held: Held) -> Iterator[Pending]:
    if isinstance(held, Pending):
        yield held
    elif held:
        for part in held:
            yield from _flat(part)
