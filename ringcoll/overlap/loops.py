"""Read from the text how often a loop runs."""

import re

from ringcoll.overlap.hlo import Computation, Instruction, Module


def called(module: Module, loop: Instruction, key: str) -> Computation:
    """The condition or the body of a loop."""
    return module.computations[(loop.attribute(key) or "").lstrip("%")]


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of a `while` runs; None if the text does not say.

    The compiler may write it as `known_trip_count`. If there is none, or a negative one, it is
    computed from a counter that starts at a constant, grows by a constant and is compared with a
    constant.
    """
    known = re.search(r"-?\d+", loop.attribute("known_trip_count") or "")
    if known and int(known[0]) >= 0:
        return int(known[0])
    condition, body = (called(module, loop, key) for key in ("condition", "body"))
    tested = _test(module, condition)
    if tested is None:
        return None
    counter, limit, inclusive = tested
    index = counter.number("index")
    if counter.opcode != "get-tuple-element" or index is None:
        return None
    carry = computation.operands(loop)[0]
    if carry.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    first = _constant(computation, computation.by_name.get(carry.operands[index]))
    last, step = _constant(condition, limit), _step(body, index)
    if first is None or last is None or not step:
        return None
    return max(0, -((first - last - inclusive) // step))


def _test(module: Module, condition: Computation) -> tuple[Instruction, Instruction, bool] | None:
    """The counter, the limit, and whether the loop also runs if they are equal; None if unknown."""
    test = condition.root
    place = condition
    if test.opcode == "fusion":  # the comparison is inside a fusion
        place = next(module.called(test))
    compare = place.root
    if compare.opcode != "compare":
        return None
    sides = place.operands(compare)
    if place is not condition:
        outside = condition.operands(test)
        sides = [outside[int(s.operands[0])] if s.opcode == "parameter" else s for s in sides]
    direction = compare.attribute("direction")
    if direction in ("GT", "GE"):
        sides = sides[::-1]
    elif direction not in ("LT", "LE", "NE"):
        return None
    return sides[0], sides[1], direction in ("LE", "GE")


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
