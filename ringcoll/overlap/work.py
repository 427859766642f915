"""What an instruction does, read off its text: FLOPs, and bytes moved."""

import re
from collections import Counter
from math import prod

import numpy as np

from ringcoll.overlap.hlo import Computation, Instruction, Module

#: What only names, groups or reinterprets what is there.
FREE = frozenset(
    [
        *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
        *("partition-id", "replica-id", "opt-barrier", "add-dependency", "domain"),
    ]
)
#: Custom calls that only name or reserve memory.
FREE_TARGETS = frozenset(["ConcatBitcast", "AllocateBuffer", "Sharding"])
_MATMULS = ("dot", "convolution")
_SLICES = ("slice", "dynamic-slice", "gather")
#: In a fusion, what hands on a buffer as it is, or leaves it to the wire.
_PASSING = (
    *("tuple", "all-gather", "all-reduce", "reduce-scatter", "all-to-all"),
    "collective-permute",
)


def is_free(instruction: Instruction) -> bool:
    """Whether it costs nothing to run."""
    if instruction.opcode == "custom-call":
        return instruction.attribute("custom_call_target") in FREE_TARGETS
    return instruction.opcode in FREE


def flops(module: Module, computation: Computation, instruction: Instruction) -> float:
    """The floating-point operations of its matmuls: two per multiply-add."""
    if instruction.opcode == "convolution":
        return 2.0 * _multiply_adds(computation, instruction)
    if instruction.opcode == "dot" or _is_gemm(instruction):
        lhs = computation.by_name.get(instruction.operands[0])
        contracted = instruction.attribute("lhs_contracting_dim(?:ension)?s") or ""
        if lhs is None:
            return 0.0
        size = prod(lhs.shapes[0].dims[int(d)] for d in re.findall(r"\d+", contracted))
        return 2.0 * instruction.shapes[0].elements * size
    return sum(
        2.0 * _multiply_adds(c, i) if i.opcode == "convolution" else flops(module, c, i)
        for c, i in module.within(instruction)
        if i.opcode in _MATMULS or _is_gemm(i)
    )


def _is_gemm(instruction: Instruction) -> bool:
    """Whether it calls a library's matmul, as on a GPU or CPU."""
    target = instruction.attribute("custom_call_target") or ""
    return instruction.opcode == "custom-call" and re.search("gemm|matmul", target) is not None


def _multiply_adds(computation: Computation, instruction: Instruction) -> int:
    """Those of a convolution, leaving out what meets padding or the holes of a dilation.

    (A TPU writes a batched matmul as a convolution over a dilated batch, in which most of
    the window meets holes.)
    """
    lhs, rhs = (operand.shapes[0].dims for operand in computation.operands(instruction)[:2])
    labels = re.split("_|->", instruction.attribute("dim_labels") or "bf_io->bf")
    window = instruction.attribute("window") or "{}"

    def of_window(key: str, default: int) -> list[int]:
        found = re.search(rf"{key}=([\dx]+)", window)
        return [int(n) for n in found[1].split("x")] if found else [default] * 9

    pads = re.search(r"pad=([-\dx_]+)", window)
    low = [int(p.split("_")[0]) for p in pads[1].split("x")] if pads else [0] * 9
    stride, holes, rhs_holes = (of_window(key, 1) for key in ("stride", "lhs_dilate", "rhs_dilate"))
    out = instruction.shapes[0].dims
    result = out[labels[2].index("b")] * out[labels[2].index("f")] * rhs[labels[1].index("i")]
    for d in range(sum(c.isdigit() for c in labels[2])):
        size, taps, steps = (
            dims[label.index(str(d))] for dims, label in zip((lhs, rhs, out), labels, strict=True)
        )
        at = stride[d] * np.arange(steps)[:, None] + rhs_holes[d] * np.arange(taps) - low[d]
        result *= int(((at >= 0) & (at <= (size - 1) * holes[d]) & (at % holes[d] == 0)).sum())
    return result


def traffic(module: Module, computation: Computation, instruction: Instruction) -> Counter[int]:
    """The bytes that it reads and writes, by memory space (0 is main memory).

    Of what is only sliced, the slice counts; of what is updated in place, the update. What a
    fusion only passes on, or a transfer that is spread over it, moves by no work of its own.
    """
    moved: Counter[int] = Counter()
    bodies = list(module.called(instruction)) if instruction.opcode == "fusion" else []
    for number, operand in enumerate(computation.operands(instruction)):
        for shape in operand.shapes:
            if bodies and number in bodies[0].parameters:
                read = _read(bodies[0], bodies[0].parameters[number], shape.bytes)
            else:
                read = _read_by(instruction, operand.name, shape.bytes)
            moved[shape.space] += round(read)
    inner, root = (bodies[0], bodies[0].root) if bodies else (computation, instruction)
    parts = inner.operands(root) if root.opcode == "tuple" else [root]
    for number, shape in enumerate(instruction.shapes):
        part = parts[number] if number < len(parts) else root
        if part is not root and part.opcode in ("parameter", *_PASSING):
            continue
        moved[shape.space] += round(_written(inner, part, shape.bytes))
    return moved


def copied(computation: Computation, start: Instruction) -> Counter[int]:
    """The bytes that an asynchronous copy or slice moves, by memory space.

    The result of a copy-start is (copy, source, ...), that of any other (sources, result, ...).
    """
    sources = computation.operands(start)
    made = start.shapes[0 if start.opcode == "copy-start" else len(sources)]
    moved: Counter[int] = Counter()
    for space in (sources[0].shapes[0].space, made.space):
        moved[space] += round(made.bytes)
    return moved


def _read(body: Computation, parameter: Instruction, whole: float) -> float:
    """How much of a parameter a fusion reads."""
    users = body.users[parameter.name]
    return min(whole, sum(_read_by(user, parameter.name, whole) for user in users))


def _read_by(user: Instruction, name: str, whole: float) -> float:
    if user.opcode in _PASSING:
        return 0.0
    if user.operands[0] == name:
        if user.opcode in _SLICES:
            return user.bytes
        if user.opcode == "dynamic-update-slice":
            return 0.0
    return whole


def _written(body: Computation, instruction: Instruction, whole: float) -> float:
    while instruction.opcode in ("bitcast", "copy", "convert") and body.operands(instruction):
        instruction = body.operands(instruction)[0]
    if instruction.opcode == "dynamic-update-slice":
        return body.by_name[instruction.operands[1]].bytes
    return whole
