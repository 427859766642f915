"""How often a loop runs, read off the text."""

import re

from ringcoll.overlap.hlo import Computation, Instruction, Module


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of a `while` runs; None if that cannot be read off the text.

    Taken from `known_trip_count` or, where the compiler wrote none or a negative one, from
    a counter that starts at a constant, grows by a constant and is compared with one.
    """
    known = re.search(r"-?\d+", loop.attribute("known_trip_count") or "")
    if known and int(known[0]) >= 0:
        return int(known[0])
    condition, body = (
        module.computations[(loop.attribute(key) or "").lstrip("%")] for key in ("condition", "body")
    )
    test, place, inner = condition.root, condition, condition.root
    if test.opcode == "fusion":  # the comparison is wrapped
        place = next(module.called(test))
        inner = place.root
    if inner.opcode != "compare":
        return None
    sides = []
    for name in inner.operands:
        side = place.by_name[name]
        if side.opcode == "parameter" and place is not condition:
            side = condition.by_name[test.operands[int(side.operands[0])]]
        sides.append(side)
    direction = inner.attribute("direction")
    if direction in ("GT", "GE"):
        sides, direction = sides[::-1], {"GT": "LT", "GE": "LE"}[direction]
    index = sides[0].number("index")
    start_of = computation.operands(loop)
    if sides[0].opcode != "get-tuple-element" or index is None or direction not in ("LT", "LE", "NE"):
        return None
    limit = _constant(condition, sides[1])
    start = _constant(computation, computation.by_name.get(start_of[0].operands[index]))
    step = _step(body, index)
    if limit is None or start is None or not step:
        return None
    return max(0, -((start - limit - (direction == "LE")) // step))


def _step(body: Computation, index: int) -> int | None:
    """By how much the body adds to element `index` of the carry."""
    total, at = 0, body.by_name.get(body.root.operands[index])
    while at is not None and at.opcode in ("add", "copy", "bitcast"):
        constants = [c for c in map(lambda i: _constant(body, i), body.operands(at)) if c is not None]
        others = [i for i in body.operands(at) if _constant(body, i) is None]
        total += sum(constants)
        at = others[0] if len(others) == 1 else None
    if at is None or at.opcode != "get-tuple-element" or at.number("index") != index:
        return None
    return total


def _constant(computation: Computation, instruction: Instruction | None) -> int | None:
    while instruction is not None and instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = next(iter(computation.operands(instruction)), None)
    if instruction is None or instruction.opcode != "constant":
        return None
    value = instruction.operands[0] if instruction.operands else ""
    return int(value) if re.fullmatch(r"-?\d+", value) else None
