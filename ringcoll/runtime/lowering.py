"""Change a program after all of it has been lowered and before it is compiled."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TypeVar

import jax
from jax.extend.mlir import ir

#: The event that JAX records when a program has been lowered, before it is compiled.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"

#: The operations of a lowered program that send.
COLLECTIVES = frozenset(
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

#: The steps at which a program is changed, in their order.
FIRST, LAST = range(2)

_Change = Callable[[ir.Module], None]
C = TypeVar("C", bound=_Change)


class _Programs(threading.local):
    """The programs that a thread is lowering, and their changes."""

    def __init__(self) -> None:
        self.changes: dict[ir.Module, dict[int, _Change]] = {}
        self.changing: set[ir.Module] = set()


_programs = _Programs()
_listeners: list[Callable[..., None]] = []
_listening = threading.Lock()


def then(module: ir.Module, step: int, make: Callable[[], C]) -> C:
    """Register a change of a program at this step: `make()`, unless the step already has one.

    When all of the module is lowered, each change is called with it, in the order of the steps.
    """
    if module not in _programs.changes:
        with _listening:  # each time, because other code may clear JAX's listeners
            _listeners.append(partial(_when_lowered))
            jax.monitoring.register_event_duration_secs_listener(_listeners[-1])
            for old in _listeners[:-1]:  # only now, because other threads lower programs too
                with suppress(AssertionError, ValueError):  # other code has cleared it
                    jax.monitoring.unregister_event_duration_listener(old)
            del _listeners[:-1]
    steps = _programs.changes.setdefault(module, {})
    if step not in steps:
        steps[step] = make()
    return steps[step]  # type: ignore[return-value]  # a step has one kind of change


def inside(op: ir.Operation) -> Iterator[ir.Operation]:
    """The operations directly in an operation's regions."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation


def operands(op: ir.Operation) -> Iterator[ir.Value]:
    """The operands of an operation and of all operations inside it."""
    yield from op.operands
    for inner in inside(op):
        yield from operands(inner)


def _when_lowered(event: str, duration_secs: float, **_: str | int) -> None:
    if event != _LOWERED:
        return
    for module in list(_programs.changes):
        if module in _programs.changing or "main" not in ir.SymbolTable(module.operation):
            continue  # another program was lowered
        (block,) = ir.SymbolTable(module.operation)["main"].regions[0].blocks
        if not len(block.operations) or block.operations[-1].operation.name != "func.return":
            continue  # this program is not complete yet
        _programs.changing.add(module)
        steps = _programs.changes[module]
        try:
            with module.context, ir.Location.unknown():
                while steps:  # a change may register a later one
                    steps.pop(min(steps))(module)
        finally:
            _programs.changing.remove(module)
            del _programs.changes[module]
    while len(_programs.changes) > 8:  # these failed to lower, and will never be complete
        del _programs.changes[next(iter(_programs.changes))]
