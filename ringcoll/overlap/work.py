"""Count the FLOPs and the moved bytes of an instruction from its text."""

import re
from collections import Counter
from math import prod

import numpy as np

from ringcoll.overlap.hlo import Computation, Instruction, Module
from ringcoll.overlap.kernels import is_kernel, work_of
from ringcoll.overlap.transfers import COLLECTIVES

#: Opcodes that only name, group or reinterpret values.
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
#: Opcodes that return every element of their operand, in a different type, shape or place.
RENAMING = ("bitcast", "copy", "convert", "transpose", "reshape")
#: Opcodes that, in a fusion, pass on a buffer or send it.
_PASSING = ("tuple", *COLLECTIVES)


def is_free(instruction: Instruction) -> bool:
    """Whether an instruction takes no time."""
    if instruction.opcode == "custom-call":
        return instruction.attribute("custom_call_target") in FREE_TARGETS
    return instruction.opcode in FREE


def flops(module: Module, computation: Computation, instruction: Instruction) -> float:
    """The floating-point operations of an instruction's matmuls and kernels: two a multiply-add."""
    if is_kernel(instruction):
        return work_of(computation, instruction).flops
    if instruction.opcode == "convolution":
        return 2.0 * _multiply_adds(computation, instruction)
    if instruction.opcode == "dot" or _is_gemm(instruction):
        if instruction.operands[0] not in computation.by_name:
            return 0.0
        lhs = computation.by_name[instruction.operands[0]].shapes[0]
        contracted = instruction.attribute("lhs_contracting_dim(?:ension)?s") or ""
        size = prod(lhs.dims[int(d)] for d in re.findall(r"\d+", contracted))
        return 2.0 * instruction.shapes[0].elements * size
    return sum(
        flops(module, where, inner)
        for where, inner in module.within(instruction)
        if inner.opcode in _MATMULS or _is_gemm(inner) or is_kernel(inner)
    )


def width(module: Module, computation: Computation, instruction: Instruction) -> float:
    """The bytes of an element of the widest operand of an instruction's matmuls; 0 without any."""
    inside = [(computation, instruction), *module.within(instruction)]
    factors = (
        operand.shapes[0]
        for where, inner in inside
        if inner.opcode in _MATMULS or _is_gemm(inner)
        for operand in where.operands(inner)[:2]
    )
    return max((shape.bytes / max(1, shape.elements) for shape in factors), default=0.0)


def _is_gemm(instruction: Instruction) -> bool:
    """Whether an instruction calls a library's matmul, as on GPUs and CPUs."""
    target = instruction.attribute("custom_call_target") or ""
    return instruction.opcode == "custom-call" and re.search("gemm|matmul", target) is not None


def _multiply_adds(computation: Computation, instruction: Instruction) -> int:
    """The multiply-adds of a convolution, without those on padding or holes of a dilation.

    (TPU programs have a batched matmul as a convolution over a dilated batch. Most of its window
    is on holes.)
    """
    lhs, rhs = (operand.shapes[0].dims for operand in computation.operands(instruction)[:2])
    labels = re.split("_|->", instruction.attribute("dim_labels") or "bf_io->bf")
    window = instruction.attribute("window") or "{}"

    def of_window(key: str, default: int) -> list[int]:
        match = re.search(rf"{key}=([\dx]+)", window)
        return [int(n) for n in match[1].split("x")] if match else [default] * 9

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
    """The bytes that an instruction reads and writes, by memory space (0 is main memory).

    If an array is only sliced, only the slice counts, also in nested fusions. If it is updated in
    place, only the update counts. Buffers that a fusion only passes on or sends do not count.
    """
    if instruction.opcode.endswith("-start"):
        return _copy_traffic(computation, instruction)
    moved: Counter[int] = Counter()
    body = _body(module, instruction)
    for number, operand in enumerate(computation.operands(instruction)):
        for shape in operand.shapes:
            if body and number in body.parameters:
                read = _part_read(module, body, body.parameters[number], shape.elements, 1.0)
            else:
                read = _part_read_by(module, instruction, operand, shape.elements, 1.0)
            moved[shape.space] += round(shape.bytes * min(1.0, read))
    inner, root = (body, body.root) if body else (computation, instruction)
    parts = inner.operands(root) if root.opcode == "tuple" else [root]
    for number, shape in enumerate(instruction.shapes):
        part = parts[number] if number < len(parts) else root
        if part is not root and part.opcode in ("parameter", *_PASSING):
            continue
        if number and _is_gemm(instruction):
            continue  # memory for the library's own use
        moved[shape.space] += round(shape.bytes * _part_written(module, inner, part))
    return moved


def _copy_traffic(computation: Computation, start: Instruction) -> Counter[int]:
    """The bytes that an asynchronous copy or slice moves, by memory space.

    The result of a copy-start is (copy, source, ...); of any other start, (sources, result, ...).
    Of an update in place, the result is the whole array, and the second source is the update.
    """
    sources = computation.operands(start)
    place = 0 if start.opcode == "copy-start" else len(sources)
    result = start.shapes[min(place, len(start.shapes) - 1)]
    updates = start.opcode == "dynamic-update-slice-start"
    source = sources[updates].shapes[0]
    moved: Counter[int] = Counter()
    for space in (source.space, result.space):
        moved[space] += round(source.bytes if updates else result.bytes)
    return moved


def _part_read(
    module: Module, body: Computation, value: Instruction, elements: int, used: float
) -> float:
    """The share of a value that a computation reads. The value has `elements` elements.

    A fusion computes only the elements that are used. If it copies, converts or transposes a value,
    it reads only the elements of which the result is used. `used` is the share of the
    computation's own result that is used.
    """
    parts = [used] if value is body.root else []
    for user in body.users[value.name]:
        needed = used if user is body.root else 1.0
        if user.opcode in (*RENAMING, *_SLICES, "fusion"):
            needed = _part_read(module, body, user, _elements(user), used)
        parts.append(_part_read_by(module, user, value, elements, needed))
    return min(1.0, sum(parts))


def _part_read_by(
    module: Module, user: Instruction, value: Instruction, elements: int, needed: float
) -> float:
    """The share of a value that an instruction reads; its result is used to the share `needed`."""
    if user.opcode in _PASSING:  # what a computed value needs was read to compute it
        return 0.0 if value.opcode == "parameter" else needed
    body = _body(module, user)
    if body:
        places = [n for n, name in enumerate(user.operands) if name == value.name]
        inner = [body.parameters[n] for n in places if n in body.parameters]
        return sum(_part_read(module, body, i, elements, needed) for i in inner)
    if user.opcode in RENAMING:
        return needed
    if user.operands[0] == value.name:
        if user.opcode in _SLICES:
            return needed * _elements(user) / max(1, elements)
        if user.opcode == "dynamic-update-slice":
            return 0.0
    return 1.0


def _part_written(module: Module, body: Computation, root: Instruction) -> float:
    """The share of a result that is written: less than 1 if it is updated in place."""
    while True:
        operands = body.operands(root)
        if inner := _body(module, root):
            body, root = inner, inner.root
        elif root.opcode in ("bitcast", "reshape") and operands:
            root = operands[0]  # a second name for the same buffer
        elif root.opcode == "dynamic-update-slice" and root.operands[1] in body.by_name:
            return _elements(body.by_name[root.operands[1]]) / max(1, _elements(root))
        else:
            return 1.0


def _body(module: Module, instruction: Instruction) -> Computation | None:
    """The computation of a fusion; None for other instructions."""
    return next(module.called(instruction), None) if instruction.opcode == "fusion" else None


def _elements(instruction: Instruction) -> int:
    return sum(shape.elements for shape in instruction.shapes)
