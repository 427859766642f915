"""Names for the operations of a collective, and two hooks: around messages and for plans."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ringcoll.runtime.hosts import on_hosts
from ringcoll.runtime.value_types import type_in_words

#: An array, or a list of them.
Arrays = TypeVar("Arrays")

#: The function that sends in place of `watched`, with its arguments and the path of scopes; None if
#: no tool watches (`ringcoll.debug.deadline` does). It is a part of the key of `jit`'s programs.
around_messages = jax.make_user_context(default_value=None)
#: The function that takes each call of a program that is lowered, in words, and its plan; None if
#: nobody asks (`ringcoll.explain` does). It is a part of the key of `jit`'s programs.
takes_plans = jax.make_user_context(default_value=None)
_path: ContextVar[tuple[str, ...]] = ContextVar("path", default=())


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Name the operations that are traced inside, for profiles and for `watched`."""
    token = _path.set((*_path.get(), name))
    try:
        with jax.named_scope(name):
            yield
    finally:
        _path.reset(token)


def watched(
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


def noted(
    call: str,
    over: Sequence[Hashable],
    operands: Sequence[Any],
    plan: object,
    groups: Sequence[Sequence[int]] | None = None,
) -> None:
    """Tell `takes_plans` the plan of a call that is being lowered.

    Args:
        call: the name of the function.
        over, groups: as for `watched`.
        operands: arrays or their types.
        plan: how the call runs.
    """
    if takes_plans.value is not None:
        takes_plans.value(_in_words(call, over, operands, groups), plan)


def noted_when_lowered(
    call: str, over: Sequence[Hashable], operands: Arrays, plan_on: Callable[[str, int], object]
) -> Arrays:
    """The operands of a call that is being traced. Its plan is told when they are lowered.

    So a call that is traced twice, or is not used, is not told. `plan_on` gives the plan on a
    platform ("cpu", "cuda", "rocm" or "tpu") whose ranks `over` the axes are on so many hosts.
    Other arguments: as for `noted`; the operands may be a pytree.
    """
    if takes_plans.value is None:
        return operands
    leaves, structure = jax.tree.flatten(operands)
    words = _in_words(call, over, leaves)
    passed = _noted.bind(*leaves, words=words, over=tuple(over), plan_on=plan_on)
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
_noted = Primitive("ringcoll_noted")
_noted.multiple_results = True
_noted.def_abstract_eval(lambda *types, **told: types)
ad.primitive_jvps[_noted] = lambda xs, tangents, **told: (_noted.bind(*xs, **told), tangents)
batching.primitive_batchers[_noted] = lambda xs, dims, **told: (_noted.bind(*xs, **told), dims)


def _told(
    context: mlir.LoweringRuleContext,
    *xs: Any,
    words: str,
    over: tuple[Hashable, ...],
    plan_on: Callable[[str, int], object],
) -> Sequence[Any]:
    module = context.module_context
    hosts = on_hosts(module.axis_context, over).hosts
    if takes_plans.value is not None:
        takes_plans.value(words, plan_on(module.platforms[0], hosts))
    return xs


mlir.register_lowering(_noted, _told)
