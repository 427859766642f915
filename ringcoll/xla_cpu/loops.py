"""Make loops with collectives, and collectives outside of them, wait for each other on XLA:CPU.

XLA:CPU runs two collectives one after the other. But if a loop (or a branch) has collectives
inside, it starts the next collective as soon as the loop has *begun*, unless a result of the loop
is among its operands. Then some devices wait in the loop and others in the collective, for each
other: the program hangs, aborts, or mixes up messages (`docs/xla_cpu_loops.md`).

An operation waits for its operands. So an operand of every loop with collectives is made to depend
on all collectives before the loop, and an operand of the collectives after the loop is made to
depend on the loop. The operand goes through a `select` whose condition is always true; the compiler
cannot know that. A program without such loops is not changed.

JAX records an event when it has lowered a program, before it is compiled. Then this file decides
which operations have to wait, and after that it changes them. A part of a program that it does not
know stays as JAX lowered it. If it fails, the whole program stays so. The same holds if JAX records
no event, as inside `jax.experimental.custom_partitioning`.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial, reduce
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

#: The event that JAX records when a program has been lowered, before it is compiled.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"

#: How the names of the operations begin that send.
_COLLECTIVES = ("stablehlo.all_", "stablehlo.collective_", "stablehlo.reduce_scatter")
_WHILE, _CALL, _MAPPED = "stablehlo.while", "func.call", "sdy.manual_computation"
#: Operations that XLA:CPU runs asynchronously. (It inlines functions where they are called.)
_ASYNCHRONOUS = frozenset((_WHILE, "stablehlo.case", "stablehlo.if"))

#: Operations with several parts; a part may need only some of the operands.
_IN_PARTS = frozenset((_CALL, "stablehlo.optimization_barrier"))

#: An operation that has to wait until some values of its block are there.
_Wait = tuple[ir.Operation, tuple[ir.Value, ...]]

#: What an operation does: it does not send, it sends, or it runs a loop that sends.
_NOTHING, _SENDS, _LOOPS = range(3)

#: The programs that are being lowered, and the thread that lowers each. (Thread-local storage will
#: not do: XLA destroys that of its own threads without the interpreter's lock.)
_programs: WeakKeyDictionary[ir.Module, int] = WeakKeyDictionary()
_listeners: list[Callable[..., None]] = []
_lock = threading.Lock()


def keep_apart(context: mlir.ModuleContext) -> None:
    """Change a program, which this thread is lowering for CPU, when all of it has been lowered."""
    module = context.module
    if list(context.platforms) != ["cpu"]:
        return
    with _lock:
        if module in _programs:
            return
        _take_lowered()  # Forget programs whose event was not heard: they may have been compiled.
        _programs[module] = threading.get_ident()
        # Listen anew each time, because other code may clear JAX's listeners. The old listener goes
        # after the new one has come, because other threads lower programs too.
        _listeners.append(partial(_when_lowered))
        jax.monitoring.register_event_duration_secs_listener(_listeners[-1])
        while len(_listeners) > 1:
            with suppress(AssertionError, ValueError):  # other code has cleared it
                jax.monitoring.unregister_event_duration_listener(_listeners.pop(0))


def _when_lowered(event: str, duration_secs: float, **_: str | int) -> None:
    if event != _LOWERED:
        return
    with _lock:
        lowered = _take_lowered()
    for module in lowered:
        try:
            with module.context, ir.Location.unknown():
                _write(list(_decided(module)))
        except Exception:  # the program runs without the change, as one of lax does
            logging.getLogger(__name__).warning(
                "a program's loops and collectives stay as JAX lowered them", exc_info=True
            )


def _take_lowered() -> list[ir.Module]:
    """Take the programs that this thread has lowered out of `_programs`."""
    own = threading.get_ident()
    mine = [module for module, thread in list(_programs.items()) if thread == own]
    lowered = list(filter(_is_complete, mine))
    for module in lowered:
        del _programs[module]
    return lowered


def _is_complete(module: ir.Module) -> bool:
    functions = ir.SymbolTable(module.operation)
    if "main" not in functions:
        return False
    operations = list(functions["main"].regions[0].blocks[0].operations)
    return bool(operations) and operations[-1].operation.name == "func.return"


def _decided(module: ir.Module) -> Iterator[tuple[ir.Block, list[_Wait]]]:
    """The operations that have to wait, block by block.

    Parts of a program with axes that the compiler shards are left out: there it is not known which
    device has the first element of an array.
    """
    program = _Program(module)
    for block in program.blocks(program.functions["main"].operation, None):
        operations = [op.operation for op in block.operations]
        kinds = [program.kind(op) for op in operations]
        if _LOOPS in kinds:
            yield block, _waits(zip(operations, kinds, strict=True))


class _Program:
    """What each operation of a program does, and the blocks in which every axis is manual."""

    def __init__(self, module: ir.Module) -> None:
        self.functions = ir.SymbolTable(module.operation)
        self.kinds: dict[str, int] = {}  # what each function does
        self.seen: set[tuple[str, frozenset[str] | None]] = set()

    def called(self, op: ir.Operation) -> str | None:
        """The function that an operation calls; None if it does not call one."""
        if op.name != _CALL:
            return None
        return str(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)

    def kind(self, op: ir.Operation) -> int:
        """What an operation does, together with the operations inside it."""
        if op.name.startswith(_COLLECTIVES):
            return _SENDS
        if name := self.called(op):
            if name not in self.kinds:
                self.kinds[name] = self.kind(self.functions[name].operation)
            return self.kinds[name]
        inside = max(map(self.kind, _inside(op)), default=_NOTHING)
        return _LOOPS if inside and op.name in _ASYNCHRONOUS else inside

    def axes(self, mapped: ir.Operation) -> frozenset[str] | None:
        """The axes of the mesh of a `shard_map`; None if it does not name one mesh."""
        shardings = f"{mapped.attributes['in_shardings']} {mapped.attributes['out_shardings']}"
        names = set(re.findall(r"@([\w$.]+)", shardings))
        if len(names) != 1:  # it has neither operands nor results
            return None
        return _names(self.functions[names.pop()].operation.attributes["mesh"])

    def blocks(self, op: ir.Operation, axes: frozenset[str] | None) -> Iterator[ir.Block]:
        """The blocks inside an operation in which all axes are manual.

        `axes` are those that are not manual yet; None means that no mesh is known yet.
        """
        if op.name == _MAPPED:
            axes = self.axes(op) if axes is None else axes
            if axes is None:
                return
            axes -= _names(op.attributes["manual_axes"])
        if name := self.called(op):
            if (name, axes) in self.seen:
                return
            self.seen.add((name, axes))
            op = self.functions[name].operation
        for region in op.regions:
            for block in region.blocks:
                if axes is not None and not axes:
                    yield block
                for inner in block.operations:
                    yield from self.blocks(inner.operation, axes)


def _waits(operations: Iterable[tuple[ir.Operation, int]]) -> list[_Wait]:
    """Which operations of a block have to wait, from all its operations and what each does."""
    waits: list[_Wait] = []
    loop: tuple[ir.Value, ...] = ()  # the results of the last loop that sends
    sent: list[ir.Value] = []  # the results of the operations since that loop that send
    behind: set[ir.Value] = set()  # the values that depend on an operation that waits for that loop
    for op, kind in operations:
        if kind == _LOOPS:
            waits.append((op, (*loop, *sent)))
            loop, sent, behind = tuple(op.results), [], set()
            continue
        operands = list(_operands(op))
        depends = all if op.name in _IN_PARTS else any
        is_behind = bool(operands) and depends(x in behind for x in operands)
        if kind == _SENDS:
            sent.extend(op.results)
            if loop and not is_behind:
                waits.append((op, loop))
                is_behind = True
        if is_behind:
            behind.update(op.results)
    return waits


def _inside(op: ir.Operation) -> Iterator[ir.Operation]:
    """The operations directly in an operation's regions."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation


def _operands(op: ir.Operation) -> Iterator[ir.Value]:
    """The operands of an operation and of all operations inside it."""
    yield from op.operands
    for inner in _inside(op):
        yield from _operands(inner)


def _names(attribute: ir.Attribute) -> frozenset[str]:
    return frozenset(re.findall(r'"([^"]*)"', str(attribute)))


def _size(value: ir.Value) -> int:
    """The number of elements; 0 if it is not an array of a known shape."""
    if not isinstance(value.type, ir.RankedTensorType) or not value.type.has_static_shape:
        return 0
    return int(np.prod(value.type.shape, dtype=int))


def _write(changes: list[tuple[ir.Block, list[_Wait]]]) -> None:
    """Make operations wait. If that fails, take all changes back."""
    kept = {op.operation for block, _ in changes for op in block.operations}
    replaced: list[tuple[ir.Operation, int, ir.Value]] = []
    try:
        for _, waits in changes:
            numbers: dict[tuple[ir.Value, ...], ir.Value | None] = {}
            for op, values in waits:
                with ir.InsertionPoint(op), op.location:
                    if values not in numbers:
                        numbers[values] = _number_of(values)
                    if (number := numbers[values]) is not None:
                        for i, value in _operands_to_wait(op):
                            replaced.append((op, i, value))
                            op.operands[i] = _when_there(number, value)
    except Exception:
        for op, i, value in reversed(replaced):
            op.operands[i] = value
        for block, _ in changes:
            for added in reversed([op.operation for op in block.operations]):
                if added not in kept:
                    added.erase()
        raise


def _number_of(values: Iterable[ir.Value]) -> ir.Value | None:
    """A number of at least 0 that depends on these values; None if none has a known shape."""
    counts = [_count(value) for value in values if _size(value)]
    return reduce(stablehlo.add, counts) if counts else None


def _count(value: ir.Value) -> ir.Value:
    """How many of a few elements are not 0.

    They are spread over the value, because different lanes and rounds may have computed its parts.
    They are counted, because a compiler that knows some of them still does not know the sum.
    """
    shape, number = value.type.shape, ir.IntegerType.get_signless(32)
    strides = [max(1, size // 8) for size in shape]
    bounds = [mlir.dense_int_array(x) for x in ([0] * len(shape), shape, strides)]
    some = stablehlo.slice(value, *bounds)
    if isinstance(value.type.element_type, ir.ComplexType):
        some = stablehlo.real(some)  # XLA:CPU crashes when it compares complex numbers with 0
    for kind in (ir.IntegerType.get_signless(1), number):
        some = stablehlo.convert(ir.RankedTensorType.get(some.type.shape, kind), some)
    total, zero = ir.RankedTensorType.get([], number), mlir.ir_constant(np.int32(0))
    summed = stablehlo.ReduceOp([total], [some], [zero], mlir.dense_int_array(range(len(shape))))
    with ir.InsertionPoint(summed.regions[0].blocks.append(total, total)) as inside:
        stablehlo.return_([stablehlo.add(*inside.block.arguments)])
    return summed.result


def _operands_to_wait(op: ir.Operation) -> list[tuple[int, ir.Value]]:
    """The operands of an operation that are made to wait, with their places."""
    operands = [(i, value) for i, value in enumerate(op.operands) if _size(value)]
    if op.name == _CALL:
        return operands
    if op.name != _WHILE:
        return operands[:1]
    # It waits for all its operands, so the two smallest are enough: a compiler may drop one. Avoid
    # the counter if possible: it says how many turns there are.
    return sorted(operands, key=lambda each: (not each[1].type.shape, _size(each[1])))[:2]


def _when_there(number: ir.Value, value: ir.Value) -> ir.Value:
    """The value, made to wait for a number of at least 0 by a `select`."""
    # Compilers do not look at the range of a number, but they would compare two constants.
    never, differs = mlir.ir_constant(np.int32(-1)), stablehlo.ComparisonDirectionAttr.get("NE")
    other = stablehlo.convert(ir.RankedTensorType.get([], value.type.element_type), number)
    other = stablehlo.broadcast_in_dim(value.type, other, mlir.dense_int_array([]))
    return stablehlo.select(stablehlo.compare(number, never, differs), value, other)
