"""Changes a program after all of it has been lowered and before it is compiled."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import jax
from jax.extend.mlir import ir

#: What JAX says when a program has been lowered, before it is compiled.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"

_Change = Callable[[ir.Module], None]


class _Programs(threading.local):
    """Those that a thread is lowering, and their changes."""

    def __init__(self) -> None:
        self.changes: dict[ir.Module, _Change] = {}


_programs = _Programs()
_listeners: list[Callable[..., None]] = []
_listening = threading.Lock()


def then(module: ir.Module, change: _Change) -> None:
    """Call `change(module)` when the program that this thread lowers is whole."""
    if module not in _programs.changes:
        _listen()
        _programs.changes[module] = change


def _listen() -> None:
    """Anew for every program: whoever clears JAX's listeners clears this one.

    The new one comes before the old one goes: other threads lower programs as well.
    """
    with _listening:
        _listeners.append(partial(_when_lowered))
        jax.monitoring.register_event_duration_secs_listener(_listeners[-1])
        for old in _listeners[:-1]:
            with suppress(AssertionError, ValueError):  # it was cleared
                jax.monitoring.unregister_event_duration_listener(old)
        del _listeners[:-1]


def _when_lowered(event: str, duration_secs: float, **_: str | int) -> None:
    if event != _LOWERED:
        return
    for module in list(_programs.changes):
        if _is_whole(module):  # else it is another program, lowered meanwhile
            change = _programs.changes.pop(module)
            with module.context, ir.Location.unknown():
                change(module)
    while len(_programs.changes) > 8:  # never to be whole: an error came in between
        del _programs.changes[next(iter(_programs.changes))]


def _is_whole(module: ir.Module) -> bool:
    functions = ir.SymbolTable(module.operation)
    if "main" not in functions:
        return False
    (block,) = functions["main"].regions[0].blocks
    return len(block.operations) > 0 and block.operations[-1].operation.name == "func.return"
