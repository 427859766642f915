"""Makes loops with collectives, and collectives beside them, wait for each other on XLA:CPU.

XLA:CPU runs two collectives one after the other. But if a loop (or a branch) has collectives
inside, it starts the next collective as soon as the loop has *begun*, unless a result of the loop
is among its operands. Then some devices wait in the loop and others in the collective, for each
other: the program hangs, aborts, or mixes up messages (`docs/xla_cpu_loops.md`). A schedule of
many messages runs into this more often than one built-in does.

An operation waits for its operands. So, in the lowered program, an operand of every loop with
collectives is made to need all collectives before the loop, and an operand of every collective
after the loop is made to need the loop, unless one depends on the other already. The operand goes
through a `select` whose condition is always true, which the compiler cannot know. A program
without such loops is not changed.
"""

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

_COLLECTIVES = frozenset(
    f"stablehlo.{name}"
    for name in (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "collective_broadcast",
        "collective_permute",
        "reduce_scatter",
    )
)
_WHILE, _CALL, _MAPPED = "stablehlo.while", "func.call", "sdy.manual_computation"
#: Operations that XLA:CPU runs asynchronously. (It inlines functions where they are called.)
_LOOPS = frozenset((_WHILE, "stablehlo.case", "stablehlo.if"))

#: What an operation does: neither, it sends, or it runs a loop that sends.
NOTHING, SENDS, LOOPS = range(3)

#: JAX's event after a program has been lowered and before it is compiled.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


class _Lowered(threading.local):
    """The programs that a thread is lowering, and the axes of their meshes."""

    def __init__(self) -> None:
        self.axes: dict[ir.Module, frozenset[str]] = {}


_lowered = _Lowered()


def watch(ctx: mlir.LoweringRuleContext) -> None:
    """Call `keep_apart` on the program of a context as soon as it has been lowered.

    Programs for several platforms are left alone, and so are meshes with axes that the compiler
    shards: there it is not known which device has the first element of an array.
    """
    module = ctx.module_context.module
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.manual_axes) == set(mesh.axis_names) and len(ctx.module_context.platforms) == 1:
        _listen()
        _lowered.axes[module] = frozenset(mesh.axis_names)


def _listen() -> None:
    """Register again for every collective, since a program may clear JAX's listeners."""
    with suppress(AssertionError, ValueError):  # it was not registered
        jax.monitoring.unregister_event_duration_listener(_when_lowered)
    jax.monitoring.register_event_duration_secs_listener(_when_lowered)


def _when_lowered(event: str, duration_secs: float, **_: str | int) -> None:
    if event != _LOWERED:
        return
    for module in list(_lowered.axes):
        if _is_whole(module):  # else the event was of another program, lowered in between
            with module.context, ir.Location.unknown():
                keep_apart(module, _lowered.axes.pop(module))
    while len(_lowered.axes) > 8:  # an error stopped these; they will never be whole
        del _lowered.axes[next(iter(_lowered.axes))]


def _is_whole(module: ir.Module) -> bool:
    functions = ir.SymbolTable(module.operation)
    if "main" not in functions:
        return False
    (block,) = functions["main"].regions[0].blocks
    return len(block.operations) > 0 and block.operations[-1].operation.name == "func.return"


def keep_apart(module: ir.Module, axes: frozenset[str]) -> None:
    """Make loops that send, and what sends before and after them, wait for each other.

    Args:
        module: a whole program.
        axes: the axes of its mesh.
    """
    program = _Program(module)
    for block in program.blocks(program.functions["main"].operation, axes):
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
        self.kinds: dict[str, int] = {}  # of functions
        self.found: set[tuple[str, frozenset[str]]] = set()

    def called(self, op: ir.Operation) -> str | None:
        """The function that an operation calls, if it does."""
        if op.name != _CALL:
            return None
        return str(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)

    def kind(self, op: ir.Operation) -> int:
        """What an operation does, together with the operations inside it."""
        if op.name in _COLLECTIVES:
            return SENDS
        if name := self.called(op):
            if name not in self.kinds:
                self.kinds[name] = self.kind(self.functions[name].operation)
            return self.kinds[name]
        inside = max(map(self.kind, _inside(op)), default=NOTHING)
        return LOOPS if inside and op.name in _LOOPS else inside

    def blocks(self, op: ir.Operation, axes: frozenset[str]) -> Iterator[ir.Block]:
        """The blocks inside an operation in which all of these axes are manual."""
        if op.name == _MAPPED:
            axes -= frozenset(re.findall(r'"(\w+)"', str(op.attributes["manual_axes"])))
        if name := self.called(op):
            if (name, axes) in self.found:
                return
            self.found.add((name, axes))
            op = self.functions[name].operation
        for region in op.regions:
            for block in region.blocks:
                if not axes:
                    yield block
                for inner in list(block.operations):
                    yield from self.blocks(inner.operation, axes)


class _Walk:
    """Goes through the operations of a block in order, and adds the operands."""

    def __init__(self) -> None:
        self.loop: ir.Operation | None = None  # the last loop that sends
        self.is_over: ir.Value | None = None  # true once that loop has run
        self.behind: set[ir.Value] = set()  # the values that need that loop
        self.sent: list[ir.Operation] = []  # the operations that send, since that loop
        self.needs: dict[ir.Value, int] = {}  # which of these a value needs, as bits
        self.last = 0  # which of these no other of them needs, as bits

    def visit(self, op: ir.Operation, kind: int) -> None:
        """The next operation."""
        bits, is_behind = 0, self.loop is None
        for value in _operands(op):
            bits |= self.needs.get(value, 0)
            is_behind = is_behind or value in self.behind
        if kind and not is_behind:
            assert self.loop is not None
            if self.is_over is None:
                self.is_over = _are_there(_made_by_turns(self.loop) or self.loop.results, op)
            _let_wait(op, self.is_over)
            is_behind = True
        if kind == LOOPS:
            before = [x for i, x in enumerate(self.sent) if (self.last & ~bits) >> i & 1]
            _let_wait(op, _are_there([value for x in before for value in x.results], op))
            self.loop, self.is_over, self.behind = op, None, set(_made_by_turns(op))
            self.sent, self.needs, self.last = [], {}, 0
            return
        if kind == SENDS:
            mine = 1 << len(self.sent)
            self.sent.append(op)
            self.last = self.last & ~bits | mine
            bits |= mine
        if bits:
            self.needs.update(dict.fromkeys(op.results, bits))
        if is_behind:
            self.behind.update(op.results)


def _inside(op: ir.Operation) -> Iterator[ir.Operation]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation


def _operands(op: ir.Operation) -> Iterator[ir.Value]:
    """The operands of an operation and of those inside it, which may use values from outside."""
    yield from op.operands
    for inner in _inside(op):
        yield from _operands(inner)


def _made_by_turns(loop: ir.Operation) -> list[ir.Value]:
    """The results that need a loop to be over; none of a function's, which are not known."""
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
    """A condition that is always true and needs these values, made just before an operation."""
    found = None
    with ir.InsertionPoint(op), op.location:
        for value in filter(_size, values):
            bit = _any(_sample(value))
            found = bit if found is None else stablehlo.or_(found, bit)
        if found is None:
            return None
        # No bit is above 1, but compilers do not look at the range of a number.
        number = stablehlo.convert(_scalar(ir.IntegerType.get_signless(32)), found)
        at_most = stablehlo.ComparisonDirectionAttr.get("LE")
        return stablehlo.compare(number, mlir.ir_constant(np.int32(1)), at_most)


def _sample(value: ir.Value) -> ir.Value:
    """A few elements, as bits, from every part that a lane or a round may have made."""
    shape, of = value.type.shape, value.type.element_type
    if isinstance(of, ir.ComplexType):
        value, of = stablehlo.real(value), of.element_type
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


def _let_wait(op: ir.Operation, condition: ir.Value | None) -> None:
    """Make an operation wait for a condition: its operands become a choice by it."""
    if condition is None:
        return
    operands = [(i, value) for i, value in enumerate(op.operands) if _size(value)]
    if op.name == _WHILE:  # It waits for all its operands, so one is enough: not its counter, from
        # which compilers read the number of turns.
        operands = sorted(operands, key=lambda each: (not each[1].type.shape, _size(each[1])))[:1]
    elif op.name != _CALL:
        operands = operands[:1]
    with ir.InsertionPoint(op), op.location:
        for i, value in operands:
            op.operands[i] = stablehlo.select(condition, value, _other(value))


def _other(value: ir.Value) -> ir.Value:
    """Any other value: if both were the same, the compiler would remove the choice."""
    of = value.type.element_type
    if of == ir.IntegerType.get_signless(1):
        return stablehlo.not_(value)
    unlikely = stablehlo.convert(_scalar(of), mlir.ir_constant(np.int32(107)))
    return stablehlo.broadcast_in_dim(value.type, unlikely, mlir.dense_int_array([]))
