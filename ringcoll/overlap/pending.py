"""Transfers that are under way, and the values of a program that hold their state."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ringcoll.overlap.hlo import Computation, Instruction
from ringcoll.overlap.transfers import Transfer

#: Opcodes that pass on their first operand and the transfer that it holds.
_PASSES_ON = ("get-tuple-element", "bitcast", "opt-barrier", "copy", "add-dependency")


@dataclass(eq=False)
class Pending:
    """A transfer that is under way, or has come.

    If `wire` is None, it is a copy in the chip's memory or, if flops > 0, a matmul on a second
    stream of a GPU; then it waits in `queue` for others of its kind. `before` has the sums of
    compute, flops and matmuls at the time it began. `gathers`: what comes is a gathered array, or
    a shard of one. `by_send`: a send started it.
    """

    name: str
    wire: Transfer | None
    seconds: float
    flops: float = 0.0
    queue: str = "memory"
    end: float | None = None  # None: an update will begin it
    before: dict[str, float] = field(default_factory=dict)
    gathers: bool = False
    by_send: bool = False


#: The transfers that a value holds; a tuple holds those of its elements.
Held = Pending | tuple["Held", ...] | None


class Scope(NamedTuple):
    """A running computation, and the transfers that its values hold, by name of the value."""

    computation: Computation
    held: dict[str, Held]

    def operand_transfers(self, instruction: Instruction) -> list[Held]:
        """The transfers that the operands of an instruction hold."""
        return [self.held.get(name) for name in instruction.operands]

    def result_transfers(self, instruction: Instruction) -> Held:
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


def _flat(held: Held) -> Iterator[Pending]:
    if isinstance(held, Pending):
        yield held
    elif held:
        for part in held:
            yield from _flat(part)
