"""The compute time of an instruction, and the source of that figure."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import inf

from ringcoll.overlap.chips import MATMUL_SHARES, Chip, Gpu, NotMeasured
from ringcoll.overlap.hlo import HOST, Computation, Instruction, Module
from ringcoll.overlap.kernels import ATTENTION_SHARE, is_kernel, work_of
from ringcoll.overlap.work import flops, is_free, traffic, width

#: The sources of times, best first.
SOURCES: Mapping[str, str] = {
    "given": "what was given for kernels",
    "profile": "the cycles of the static profile of the generated code",
    "estimate": "the compiler's estimated_cycles of a matmul",
    "share": "FLOPs over a share of the FLOP/s, as the text was written before there were cycles",
    "measured": "measured matmuls of other shapes: a start, and a rate of FLOP/s",
    "estimated": "the cost_estimate of kernels: FLOPs over FLOP/s, or bytes over the memory's rate",
    "attention": f"FLOPs of attention kernels at {ATTENTION_SHARE:.0%} of FLOP/s, as on one v6e-8",
    "unpriced": "kernels without a price: the bytes of operands and results, which is the least",
    "roofline": "bytes over the bandwidth of the memory or FLOPs over FLOP/s, where that is "
    "longer than the cycles or there are none",
}

#: What the compiler writes for cycles that it cannot estimate, as for some matmuls of tpu7x.
_NO_ESTIMATE = 2**63 - 1

#: How far compiler-estimated reports are off profiled ones: the number of programs compared; then
#: the least and the largest difference of compute and total in per cent, and of the exposed share
#: in points. Measured on 2026-11-22 with libtpu 0.0.52 and jax 0.12.0.1, rounded outwards: the
#: programs of `python -m ringcoll overlap --profile` and `python -m benchmarks overlap --profile`,
#: each once. (For five more, the compiler aborted.) No factor corrects the estimates: the best one
#: lowers the root mean square error of compute only from 5.8 to 4.0 % on v5p, and from 9.0 to 7.0 %
#: on v6e.
ERRORS: Mapping[str, tuple[int, str, str, str]] = {
    "v5e": (13, "0 to +4", "-1 to +4", "-2 to +2"),
    "v5p": (11, "-4 to +14", "-9 to +10", "-7 to +3"),
    "v6e": (12, "-11 to +19", "-7 to +5", "-11 to +3"),
    "tpu7x": (4, "+8 to +17", "0 to +9", "-5 to -1"),
}


def source_in_words(source: str, chip: Chip | Gpu) -> str:
    """The source of a time in words; for an estimate, with the error measured on this chip."""
    if isinstance(chip, Gpu):
        if source == "measured":
            return f"{SOURCES[source]} (median error {chip.error})"
        return "bytes over the bandwidth of the memory" if source == "roofline" else SOURCES[source]
    if source == "share":
        known = "" if chip.name in MATMUL_SHARES else "nobody measured it: "
        return f"{SOURCES[source]} ({known}{chip.matmul_share:.0%})"
    if source != "estimate":
        return SOURCES[source]
    error = "how far off is not measured on this chip"
    if chip.name in ERRORS:
        programs, compute, total, exposed = ERRORS[chip.name]
        error = (
            f"{programs} programs measured: compute {compute} %, total {total} %, exposed "
            f"{exposed} points off the profile"
        )
    return f"{SOURCES[source]} ({error})"


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, their key in `SOURCES` ("" if nothing is done), and FLOPs of matmuls and kernels.

    A copy waits in a queue, "memory" or "host". note is for readers of the report.
    """

    seconds: float = 0.0
    source: str = ""
    flops: float = 0.0
    queue: str = ""
    note: str = ""


class Costs:
    """Prices of the instructions of one program.

    Args:
        module: the program.
        chip: the chip it runs on; None: only FLOPs are counted.
        profile: cycles by name of instruction, from the static profile. They are used for every
            instruction that does the same.

    `given` has seconds of a run of kernels, by patterns of their names; the first that fits counts.
    `unpriced` has the names of kernels that ran and have no price.
    """

    def __init__(self, module: Module, chip: Chip | Gpu | None, profile: Mapping[str, int]) -> None:
        self._module, self._chip, self._profile = module, chip, profile
        self.given: Mapping[str, float] = {}
        self.unpriced: set[str] = set()
        self._known: dict[tuple[str, str], Cost] = {}

    def of(self, computation: Computation, instruction: Instruction) -> Cost:
        """The cost of an instruction that is not a collective."""
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
        inside = [(computation, instruction), *self._module.within(instruction)]
        if kernel := next((one for one in inside if is_kernel(one[1])), None):
            cycles = self._cycles(computation, instruction, work)[1]
            return self._price_kernel(*kernel, cycles / getattr(self._chip, "clock", inf))
        moved = traffic(self._module, computation, instruction)
        roof = memory_seconds(moved, self._chip)
        if moved[HOST] or instruction.opcode.endswith("-start"):
            return Cost(roof, queue="host" if moved[HOST] else "memory")
        if isinstance(self._chip, Gpu):
            matmul = self.matmul(computation, instruction, work)
            return Cost(matmul, "measured", work) if matmul > roof else Cost(roof, "roofline", work)
        source, cycles = self._cycles(computation, instruction, work)
        if work and not (source or self._profile or self._has_estimates):
            rate = self._chip.flops * self._chip.matmul_share
            source, cycles = "share", work / rate * self._chip.clock
        if not (source and _is_narrow(computation, instruction)):
            roof = max(roof, work / self._chip.flops)
        seconds = cycles / self._chip.clock
        # Cycles leave out the wait for the memory: for an addition of large arrays they are a
        # third of its time. And some profiles have only a fifth of the cycles of a matmul.
        return Cost(seconds, source, work) if seconds >= roof else Cost(roof, "roofline", work)

    def _price_kernel(self, computation: Computation, kernel: Instruction, least: float) -> Cost:
        """The cost of a kernel, at least some seconds."""
        assert self._chip
        work = work_of(computation, kernel)
        for pattern, seconds in self.given.items():
            if fnmatchcase(kernel.name, pattern):
                return Cost(seconds, "given", work.flops)
        roof = memory_seconds(traffic(self._module, computation, kernel), self._chip)
        if work.source == "unpriced" or isinstance(self._chip, Gpu):
            self.unpriced.add(kernel.name)
            return Cost(max(roof, least), "unpriced", work.flops)
        share = ATTENTION_SHARE if work.source == "attention" else 1.0
        moving = work.bytes / self._chip.hbm if work.bytes else roof
        seconds = max(moving, least, work.flops / self._chip.flops / share)
        return Cost(seconds, work.source, work.flops, note=work.note)

    def matmul(self, computation: Computation, instruction: Instruction, work: float) -> float:
        """The seconds of the matmuls of an instruction on a GPU; `work` is their FLOPs."""
        assert isinstance(self._chip, Gpu)
        wide = width(self._module, computation, instruction)
        return self._chip.matmul(work, wide) if work else 0.0

    def _cycles(
        self, computation: Computation, instruction: Instruction, work: float
    ) -> tuple[str, float]:
        """The key in `SOURCES` and the compiler's cycles for an instruction; ("", 0) if none."""
        cycles = self._profile.get(instruction.name)
        if cycles is None and self._profile:
            cycles = self._alike.get(self._signature(computation, instruction))
        if cycles is not None:
            return "profile", cycles
        # For other instructions the estimate is a ranking score, 7 to 35 times too high.
        estimate = instruction.number("estimated_cycles") if work else None
        return ("estimate", estimate) if estimate not in (None, 0, _NO_ESTIMATE) else ("", 0)

    @cached_property
    def _has_estimates(self) -> bool:
        """Whether the text has the compiler's cycles of any matmul: those that were compiled do."""
        return any(
            "estimated_cycles" in instruction.attributes and flops(self._module, body, instruction)
            for body in self._module.computations.values()
            for instruction in body.instructions
        )

    @cached_property
    def _alike(self) -> dict[str, int]:
        """Cycles by signature: the compiler profiles only one of several equal instructions."""
        return {
            self._signature(computation, instruction): self._profile[instruction.name]
            for computation in self._module.computations.values()
            for instruction in computation.instructions
            if instruction.name in self._profile
        }

    def _signature(self, computation: Computation, instruction: Instruction) -> str:
        """A text that is equal for instructions that do the same: names are left out."""
        shapes = [str(o.shapes) for o in computation.operands(instruction)]
        lines = [_nameless(instruction), *shapes]
        for body in self._module.called(instruction):
            place = {i.name: str(n) for n, i in enumerate(body.instructions)}
            for inner in body.instructions:
                lines += [place.get(name, name) for name in inner.operands]
                lines.append(self._signature(body, inner))
        return "|".join(lines)


def _nameless(instruction: Instruction) -> str:
    """The opcode, shapes and attributes of an instruction, without names."""
    names = r"metadata=\{[^}]*\}|(calls|to_apply)=%?[\w.\-]+"
    attributes = re.sub(names, "", instruction.attributes)
    return f"{instruction.opcode}{instruction.shapes}{attributes}"


def _is_narrow(computation: Computation, instruction: Instruction) -> bool:
    """Whether an instruction reads numbers narrower than bf16: matrix units are faster then."""
    shapes = [shape for operand in computation.operands(instruction) for shape in operand.shapes]
    return any(shape.bytes < 2 * shape.elements for shape in shapes)


def memory_seconds(moved: Counter[int], chip: Chip | Gpu) -> float:
    """The seconds to move these bytes; they are given by memory space (0 is main memory)."""
    if moved[HOST] and isinstance(chip, Gpu):
        raise NotMeasured(f"a copy between {chip.name} and the memory of its host")
    near = sum(n for space, n in moved.items() if space not in (0, HOST))
    by_host = moved[HOST] / chip.host if isinstance(chip, Chip) else 0.0
    return max(moved[0] / chip.hbm, near / chip.vmem, by_host)
