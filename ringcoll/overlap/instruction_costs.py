"""The seconds that an instruction computes for, and where the figure is from."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ringcoll.overlap.chips import Chip
from ringcoll.overlap.hlo import Computation, Instruction, Module
from ringcoll.overlap.work import flops, is_free, traffic

#: Where a time can come from, best first.
SOURCES: Mapping[str, str] = {
    "profile": "the cycles of the static profile of the generated code",
    "estimate": "the compiler's estimated_cycles of a matmul",
    "roofline": "bytes over the bandwidth of the memory or FLOPs over FLOP/s, where that is "
    "longer than the cycles or there are none",
}


class Error(NamedTuple):
    """How far reports from estimates are off reports from the profile, over some programs.

    Each field has the least and the most: of compute and total in percent of the profile's, of
    the exposed share in points.
    """

    programs: int
    compute: tuple[int, int]
    total: tuple[int, int]
    exposed: tuple[int, int]

    def __str__(self) -> str:
        compute, total, exposed = (
            " to ".join(f"{n:+d}" if n else "0" for n in least_and_most)
            for least_and_most in (self.compute, self.total, self.exposed)
        )
        return (
            f"{self.programs} programs measured: compute {compute} %, total {total} %, exposed "
            f"{exposed} points off the profile"
        )


#: Measured on 2026-11-22, libtpu 0.0.52, jax 0.12.0.1, rounded outwards, by `compile_for` with
#: `profile=True`: the five examples of `overlap.examples` (8192 x 8192 x 28672, three of them
#: 2048 x 4096 x 14336) and forms of `python -m benchmarks overlap --profile`, forward and with
#: gradients, on v5e:4x2, v5p:2x2x2, v6e:4x2 and tpu7x:2x2x1, each program counted once; on
#: five more the compiler aborted. Estimates are not corrected by a factor: the best factor brings
#: the root mean square of the compute's error only from 5.8 to 4.0 % on v5p (0.96) and from 9.0 to
#: 7.0 % on v6e (0.94), and part of the difference is the wait for the memory, which the profile
#: leaves out.
ERRORS: Mapping[str, Error] = {
    "v5e": Error(13, (0, 4), (-1, 4), (-2, 2)),
    "v5p": Error(11, (-4, 14), (-9, 10), (-7, 3)),
    "v6e": Error(12, (-11, 19), (-7, 5), (-11, 3)),
    "tpu7x": Error(4, (8, 17), (0, 9), (-5, -1)),
}


def explained(source: str, chip: Chip) -> str:
    """Where a time comes from; for an estimate, how far estimates were off on this chip."""
    if source != "estimate":
        return SOURCES[source]
    known = ERRORS.get(chip.name, "how far off is not measured on this chip")
    return f"{SOURCES[source]} ({known})"


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, from which of `SOURCES` ("" where nothing is done), and FLOPs of matmuls."""

    seconds: float = 0.0
    source: str = ""
    flops: float = 0.0


class Costs:
    """Prices of the instructions of one program.

    Args:
        module: the program.
        chip: what it runs on; None prices nothing, and counts FLOPs only.
        profile: cycles by name of instruction, from the static profile; an instruction
            that does the same as one that was profiled takes the same.
    """

    def __init__(self, module: Module, chip: Chip | None, profile: Mapping[str, int]) -> None:
        self._module, self._chip, self._profile = module, chip, profile
        self._known: dict[tuple[str, str], Cost] = {}

    def of(self, computation: Computation, instruction: Instruction) -> Cost:
        """The price of one instruction, which is not a collective."""
        key = computation.name, instruction.name
        if key not in self._known:
            self._known[key] = self._price(computation, instruction)
        return self._known[key]

    def _price(self, computation: Computation, instruction: Instruction) -> Cost:
        if is_free(instruction):
            return Cost()
        work = flops(self._module, computation, instruction)
        if self._chip is None:
            return Cost(flops=work)
        roof = memory_seconds(traffic(self._module, computation, instruction), self._chip)
        source, cycles = self._cycles(computation, instruction, work)
        if not (source and _is_narrow(computation, instruction)):
            roof = max(roof, work / self._chip.flops)
        seconds = cycles / self._chip.clock
        # Cycles leave out the wait for the memory: an addition of large arrays would come for a
        # third of its time. And some profiles count a matmul for a fifth of its.
        return Cost(seconds, source, work) if seconds >= roof else Cost(roof, "roofline", work)

    def _cycles(
        self, computation: Computation, instruction: Instruction, work: float
    ) -> tuple[str, float]:
        """Those that the compiler counts, and by which of `SOURCES`; ("", 0) if none do."""
        cycles = self._profile.get(instruction.name)
        if cycles is None and self._profile:
            cycles = self._alike.get(self._signature(computation, instruction))
        if cycles is not None:
            return "profile", cycles
        # That of anything else is a ranking score, 7 to 35 times too high.
        estimate = instruction.number("estimated_cycles") if work else None
        return ("estimate", estimate) if estimate else ("", 0)

    @cached_property
    def _alike(self) -> dict[str, int]:
        """Cycles by what an instruction does: the compiler profiles one of each kind."""
        return {
            self._signature(computation, instruction): self._profile[instruction.name]
            for computation in self._module.computations.values()
            for instruction in computation.instructions
            if instruction.name in self._profile
        }

    def _signature(self, computation: Computation, instruction: Instruction) -> str:
        """What an instruction does, without any names."""
        shapes = [str(o.shapes) for o in computation.operands(instruction)]
        lines = [_nameless(instruction), *shapes]
        for body in self._module.called(instruction):
            place = {i.name: str(n) for n, i in enumerate(body.instructions)}
            for inner in body.instructions:
                lines += [place.get(name, name) for name in inner.operands]
                lines.append(self._signature(body, inner))
        return "|".join(lines)


def _nameless(instruction: Instruction) -> str:
    names = r"metadata=\{[^}]*\}|(calls|to_apply)=%?[\w.\-]+"
    attributes = re.sub(names, "", instruction.attributes)
    return f"{instruction.opcode}{instruction.shapes}{attributes}"


def _is_narrow(computation: Computation, instruction: Instruction) -> bool:
    """Whether it reads narrower numbers than bf16, which matrix units multiply quicker."""
    shapes = [shape for operand in computation.operands(instruction) for shape in operand.shapes]
    return any(shape.bytes < 2 * shape.elements for shape in shapes)


def memory_seconds(moved: Counter[int], chip: Chip) -> float:
    """The seconds in which bytes by memory space (0 is main memory) can be moved."""
    return max(moved[0] / chip.hbm, sum(n for space, n in moved.items() if space) / chip.vmem)
