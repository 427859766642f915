"""Read from the text how often a loop runs."""

import re

from ringcoll.overlap.hlo import Computation, Instruction, Module


def loop_part(module: Module, loop: Instruction, key: str) -> Computation:
    """The condition or the body of a loop."""
    return module.computations[(loop.attribute(key) or "").lstrip("%")]


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of a `while` runs; None if the text does not say.

    Compilers for CPUs and GPUs write it as `known_trip_count`. If there is none, or a negative
    one, it is computed from a counter that starts at a constant, changes by a constant and is
    compared with a constant. The compiler for TPUs puts the counter on the left.
    """
    known = re.search(r"-?\d+", loop.attribute("known_trip_count") or "")
    if known and int(known[0]) >= 0:
        return int(known[0])
    condition, body = (loop_part(module, loop, key) for key in ("condition", "body"))
    test = condition.root
    direction = test.attribute("direction")
    if test.opcode != "compare" or direction not in _COMPARED:
        return None
    up, beyond = _COMPARED[direction]
    counter, limit = condition.operands(test)
    index = counter.number("index")
    carry = computation.operands(loop)[0]
    if index is None or carry.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    first = _constant(computation, computation.by_name.get(carry.operands[index]))
    last, step = _constant(condition, limit), _step(body, index)
    if first is None or last is None or not step or up * step < 0:
        return None
    turns, rest = divmod(last + beyond - first, step)
    if not up and (rest or turns < 0):
        return None  # it passes the limit without being equal to it
    return max(0, turns + bool(rest))


#: Which way a counter must go (0: either), and what to add to its limit.
_COMPARED = {"LT": (1, 0), "LE": (1, 1), "GT": (-1, 0), "GE": (-1, -1), "NE": (0, 0)}


def _step(body: Computation, index: int) -> int | None:
    """How much the body adds to element `index` of the carry; None if it does something else."""
    total, at = 0, body.by_name.get(body.root.operands[index])
    while at is not None and at.opcode in ("add", "copy", "bitcast"):
        others = []
        for operand in body.operands(at):
            constant = _constant(body, operand)
            if constant is None:
                others.append(operand)
            else:
                total += constant
        at = others[0] if len(others) == 1 else None
    if at is None or at.opcode != "get-tuple-element" or at.number("index") != index:
        return None
    return total


def _constant(computation: Computation, instruction: Instruction | None) -> int | None:
    """The whole number that an instruction is; None if it is not a constant."""
    while instruction is not None and instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = next(iter(computation.operands(instruction)), None)
    if instruction is None or instruction.opcode != "constant":
        return None
    value = instruction.operands[0] if instruction.operands else ""
    return int(value) if re.fullmatch(r"-?\d+", value) else None
