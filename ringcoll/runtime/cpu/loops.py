"""Make loops with collectives, and collectives outside of them, wait for each other on XLA:CPU.

XLA:CPU runs two collectives one after the other. But if a loop (or a branch) has collectives
inside, it starts the next collective as soon as the loop has *begun*, unless a result of the loop
is among its operands. Then some devices wait in the loop and others in the collective, for each
other: the program hangs, aborts, or mixes up messages (`docs/xla_cpu_loops.md`). This happens more
often with a schedule of many messages than with one built-in.

An operation waits for its operands. So, in the lowered program, an operand of every loop with
collectives is made to depend on all collectives before the loop, and an operand of every collective
after the loop is made to depend on the loop, unless it already does. The operand goes through a
`select` whose condition is always true; the compiler cannot know that. A program without such loops
is not changed.
"""

import re
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import and_, or_

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from ringcoll.runtime import lowering

_WHILE, _CALL, _MAPPED = "stablehlo.while", "func.call", "sdy.manual_computation"
#: Operations that XLA:CPU runs asynchronously. (It inlines functions where they are called.)
_LOOPS = frozenset((_WHILE, "stablehlo.case", "stablehlo.if"))

#: Operations with several parts; a part may need only some of the operands.
_IN_PARTS = frozenset((_CALL, "stablehlo.optimization_barrier"))

#: What an operation does: it does not send, it sends, or it runs a loop that sends.
NOTHING, SENDS, LOOPS = range(3)


def keep_apart(module: ir.Module) -> None:
    """Make loops that send wait for the sends before them, and later sends wait for the loops.

    Parts of a program with axes that the compiler shards are not changed: there it is not known
    which device has the first element of an array.

    Args:
        module: a whole program, only for CPU.
    """
    names: set[str] = set()

    def look(op: ir.Operation) -> ir.WalkResult:
        names.add(op.name)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    if names.isdisjoint(_LOOPS):
        return
    program = _Program(module)
    for block in program.blocks(program.functions["main"].operation, None):
        operations = [op.operation for op in block.operations]
        kinds = [program.kind(op) for op in operations]
        if LOOPS in kinds:
            walk = _Walk()
            for op, kind in zip(operations, kinds, strict=True):
                walk.visit(op, kind)


class _Program:
    """What each operation of a program does, and the blocks in which every axis is manual."""

    def __init__(self, module: ir.Module) -> None:
        self.functions = ir.SymbolTable(module.operation)
        self.kinds: dict[str, int] = {}  # what each function does
        self.found: set[tuple[str, frozenset[str] | None]] = set()

    def called(self, op: ir.Operation) -> str | None:
        """The function that an operation calls; None if it does not call one."""
        if op.name != _CALL:
            return None
        return str(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)

    def kind(self, op: ir.Operation) -> int:
        """What an operation does, together with the operations inside it."""
        if op.name in lowering.COLLECTIVES:
            return SENDS
        if name := self.called(op):
            if name not in self.kinds:
                self.kinds[name] = self.kind(self.functions[name].operation)
            return self.kinds[name]
        inside = max(map(self.kind, lowering.inside(op)), default=NOTHING)
        return LOOPS if inside and op.name in _LOOPS else inside

    def axes(self, mapped: ir.Operation) -> frozenset[str]:
        """The axes of the mesh of a `shard_map`."""
        (name,) = set(re.findall(r"@([\w$.]+)", str(mapped.attributes["out_shardings"])))
        return _names(self.functions[name].operation.attributes["mesh"])

    def blocks(self, op: ir.Operation, axes: frozenset[str] | None) -> Iterator[ir.Block]:
        """The blocks inside an operation in which all axes are manual.

        `axes` are those that are not manual yet; None means that no mesh is known yet.
        """
        if op.name == _MAPPED:
            axes = self.axes(op) if axes is None else axes
            axes -= _names(op.attributes["manual_axes"])
        if name := self.called(op):
            if (name, axes) in self.found:
                return
            self.found.add((name, axes))
            op = self.functions[name].operation
        for region in op.regions:
            for block in region.blocks:
                if axes is not None and not axes:
                    yield block
                for inner in list(block.operations):
                    yield from self.blocks(inner.operation, axes)


class _Walk:
    """Goes through the operations of a block in order, and adds dependencies to their operands."""

    def __init__(self) -> None:
        self.loop: ir.Operation | None = None  # the last loop that sends
        self.made: list[ir.Value] = []  # the results of that loop that are ready only at its end
        self.is_over: ir.Value | None = None  # a number, 0 or 1, that is ready after that loop
        self.behind: set[ir.Value] = set()  # the values that depend on that loop
        self.sent: list[ir.Operation] = []  # the operations since that loop that send
        self.needs: dict[ir.Value, int] = {}  # which of `sent` a value depends on, as bits
        self.last = 0  # those of `sent` on which no other depends, as bits

    def visit(self, op: ir.Operation, kind: int) -> None:
        """Go through the next operation."""
        bits, is_behind = self.known_of(op)
        if kind and not is_behind:
            assert self.loop is not None
            if self.is_over is None:
                self.is_over = _are_there(self.made or self.loop.results, op)
            _let_wait(op, self.is_over)
            is_behind = True
        if kind == LOOPS:
            before = [x for i, x in enumerate(self.sent) if (self.last & ~bits) >> i & 1]
            _let_wait(op, _are_there([value for x in before for value in x.results], op))
            self.loop, self.made, self.is_over = op, _made_by_turns(op), None
            # Leave out scalars: a compiler may know to which number a loop counts.
            self.behind = {value for value in self.made if value.type.shape}
            self.sent, self.needs, self.last = [], {}, 0
            return
        if kind == SENDS:
            mine = 1 << len(self.sent)
            self.sent.append(op)
            self.last = self.last & ~bits | mine
            bits |= mine if op.name != _CALL else 0
        if bits:
            self.needs.update(dict.fromkeys(op.results, bits))
        if is_behind:
            self.behind.update(op.results)

    def known_of(self, op: ir.Operation) -> tuple[int, bool]:
        """What an operation depends on: which of the sends, as bits, and whether on the loop."""
        operands = list(lowering.operands(op))
        if not operands or op.name in _LOOPS:  # a loop may return an operand unchanged
            return 0, self.loop is None
        in_parts = op.name in _IN_PARTS
        bits = reduce(and_ if in_parts else or_, [self.needs.get(x, 0) for x in operands])
        are_behind = [self.loop is None or x in self.behind for x in operands]
        return bits, (all if in_parts else any)(are_behind)


def _names(attribute: ir.Attribute) -> frozenset[str]:
    return frozenset(re.findall(r'"([^"]*)"', str(attribute)))


def _made_by_turns(loop: ir.Operation) -> list[ir.Value]:
    """The results of a loop that are ready only at its end; for a function call, none is known."""
    if loop.name == _CALL:
        return []
    if loop.name != _WHILE:
        return list(loop.results)
    (body,) = loop.regions[1].blocks
    *_, end = body.operations
    carried = zip(loop.results, body.arguments, end.operation.operands, strict=True)
    return [result for result, before, after in carried if before != after]


def _size(value: ir.Value) -> int:
    """The number of elements; 0 if it is not an array of a known shape."""
    if not isinstance(value.type, ir.RankedTensorType) or not value.type.has_static_shape:
        return 0
    return int(np.prod(value.type.shape, dtype=int))


def _scalar(of: ir.Type) -> ir.RankedTensorType:
    return ir.RankedTensorType.get([], of)


def _are_there(values: Iterable[ir.Value], op: ir.Operation) -> ir.Value | None:
    """A number, 0 or 1, that depends on these values, computed just before an operation."""
    found = None
    with ir.InsertionPoint(op), op.location:
        for value in filter(_size, values):
            bit = _any(_sample(value))
            found = bit if found is None else stablehlo.or_(found, bit)
        if found is None:
            return None
        return stablehlo.convert(_scalar(ir.IntegerType.get_signless(32)), found)


def _sample(value: ir.Value) -> ir.Value:
    """A few elements as bits, from every part that another lane or round may have computed."""
    shape = value.type.shape
    strides = [max(1, size // 8) for size in shape]
    bounds = [mlir.dense_int_array(x) for x in ([0] * len(shape), shape, strides)]
    some = stablehlo.slice(value, *bounds)
    bit = ir.IntegerType.get_signless(1)
    return stablehlo.convert(ir.RankedTensorType.get(some.type.shape, bit), some)


def _any(bits: ir.Value) -> ir.Value:
    if not bits.type.shape:
        return bits
    bit = _scalar(bits.type.element_type)
    dims = mlir.dense_int_array(range(len(bits.type.shape)))
    reduced = stablehlo.ReduceOp([bit], [bits], [mlir.ir_constant(np.False_)], dims)
    with ir.InsertionPoint(reduced.regions[0].blocks.append(bit, bit)) as inside:
        stablehlo.return_([stablehlo.or_(*inside.block.arguments)])
    return reduced.result


def _let_wait(op: ir.Operation, number: ir.Value | None) -> None:
    """Make an operation wait for a number, 0 or 1, by a `select` on its operands."""
    if number is None:
        return
    operands = [(i, value) for i, value in enumerate(op.operands) if _size(value)]
    if op.name == _WHILE:  # It waits for all its operands, so the two smallest are enough: a
        # compiler may drop one. Avoid the counter if possible: it says how many turns there are.
        operands = sorted(operands, key=lambda each: (not each[1].type.shape, _size(each[1])))[:2]
    elif op.name != _CALL:
        operands = operands[:1]
    at_most = stablehlo.ComparisonDirectionAttr.get("LE")
    with ir.InsertionPoint(op), op.location:
        for i, value in operands:
            # Compilers do not look at the range of a number, but they would compare two constants.
            is_there = stablehlo.compare(number, mlir.ir_constant(np.int32(1)), at_most)
            other = stablehlo.convert(_scalar(value.type.element_type), number)
            other = stablehlo.broadcast_in_dim(value.type, other, mlir.dense_int_array([]))
            op.operands[i] = stablehlo.select(is_there, value, other)
