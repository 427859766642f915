"""Names for the operations of a collective, and two hooks: around messages and for plans."""

import os
import sysconfig
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ringcoll.runtime.value_types import type_in_words

#: An array, or a list of them.
Arrays = TypeVar("Arrays")

#: The function that sends in place of `send_through_hook`, with its arguments and the path of
#: scopes; None if no tool watches (`ringcoll.debug.deadline` does). It is a part of the key of
#: `jit`'s programs.
around_messages = jax.make_user_context(default_value=None)
#: The function that takes each call of a program that is lowered: its line, its words and its plan;
#: None if nobody asks (`ringcoll.explain` does). It is a part of the key of `jit`'s programs.
takes_plans = jax.make_user_context(default_value=None)
#: How files begin that have no code of a user: ringcoll's, JAX's and Python's own.
_FOLDERS = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(jax.__file__)
_NOT_USERS = "<frozen", sysconfig.get_path("stdlib"), *(f"{one}{os.sep}" for one in _FOLDERS)
_path: ContextVar[tuple[str, ...]] = ContextVar("path", default=())


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Name the operations that are traced inside, for profiles and for `send_through_hook`."""
    token = _path.set((*_path.get(), name))
    try:
        with jax.named_scope(name):
            yield
    finally:
        _path.reset(token)


def send_through_hook(
    send: Callable[[Arrays], Arrays],
    messages: Arrays,
    over: Sequence[Hashable],
    groups: Sequence[Sequence[int]] | None = None,
    to: object = "",
) -> Arrays:
    """`send(messages)`, or what `around_messages` makes of it.

    Args:
        send: the function that sends.
        messages: an array, or a list of arrays.
        over: the axes whose ranks, all or in `groups`, take part.
        groups: as for a collective.
        to: which rank sends to which, if the name of the scope does not say so.
    """
    if around_messages.value is None:
        return send(messages)
    return around_messages.value(send, messages, over, groups, to, "/".join(_path.get()))


def record_plan(
    call: str,
    over: Sequence[Hashable],
    operands: Sequence[Any],
    plan: object,
    line: str,
    groups: Sequence[Sequence[int]] | None = None,
) -> None:
    """Tell `takes_plans` the plan of a call that is being lowered.

    Args:
        call: the name of the function.
        over, groups: as for `send_through_hook`.
        operands: arrays or their types.
        plan: how the call runs.
        line: what `line_of_call` returned when the call was traced.
    """
    takes_plans.value(line, _in_words(call, over, operands, groups), plan)


def line_of_call() -> str:
    """The user's line of the call that is being traced: "train.py:41"."""
    # In a backward pass, JAX's stack is that of the call. But in a custom_vjp it begins there.
    of_jax = source_info_util.current().traceback
    stack = traceback.extract_tb(of_jax.as_python_traceback() if of_jax else None)
    file, line = users_line([*traceback.extract_stack(), *stack])
    return f"{os.path.basename(file)}:{line}"


def users_line(stack: Sequence[traceback.FrameSummary]) -> tuple[str, int]:
    """The file and the line of the last frame that is a user's; installed code if no other is."""
    theirs = [frame for frame in stack if not frame.filename.startswith(_NOT_USERS)]
    theirs.sort(key=lambda frame: "site-packages" not in frame.filename)
    return (theirs[-1].filename, theirs[-1].lineno or 0) if theirs else ("", 0)


def record_plan_at_lowering(
    call: str, over: Sequence[Hashable], operands: Arrays, plan: object
) -> Arrays:
    """The operands of a call that is being traced. Its plan is recorded when they are lowered.

    So a call that is traced twice, or is not used, is not recorded. Arguments: as for
    `record_plan`; the operands may be a pytree.
    """
    if takes_plans.value is None:
        return operands
    leaves, structure = jax.tree.flatten(operands)
    words = line_of_call(), _in_words(call, over, leaves)
    passed = _recorded.bind(*leaves, words=words, plan=plan)
    return jax.tree.unflatten(structure, passed)


def _in_words(
    call: str,
    over: Sequence[Hashable],
    operands: Sequence[Any],
    groups: Sequence[Sequence[int]] | None = None,
) -> str:
    """A call in words: "psum over x=4, float32[1024]"."""
    sizes = ", ".join(f"{axis}={lax.axis_size(axis)}" for axis in over)
    grouped = f" in groups of {len(groups[0])}" if groups else ""
    return ", ".join([f"{call} over {sizes}{grouped}", *map(type_in_words, operands)])


#: The identity; its lowering tells `takes_plans` a plan.
_recorded = Primitive("ringcoll_recorded")
_recorded.multiple_results = True
_recorded.def_abstract_eval(lambda *types, **told: types)
ad.primitive_jvps[_recorded] = lambda xs, tangents, **told: (_recorded.bind(*xs, **told), tangents)
batching.primitive_batchers[_recorded] = lambda xs, dims, **told: (
    _recorded.bind(*xs, **told),
    dims,
)


def _record_rule(
    context: mlir.LoweringRuleContext,
    *xs: Any,
    words: tuple[str, str],
    plan: object,
) -> Sequence[Any]:
    if takes_plans.value is not None:
        takes_plans.value(*words, plan)
    return xs


mlir.register_lowering(_recorded, _record_rule)
