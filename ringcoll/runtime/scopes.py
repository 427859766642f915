"""Names for the operations of a collective, and a hook around its messages."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import jax

#: An array, or a list of them.
Arrays = TypeVar("Arrays")

#: The function that sends in place of `watched`, with its arguments and the path of scopes; None if
#: no tool watches (`ringcoll.debug.deadline` does). It is a part of the key of `jit`'s programs.
around_messages = jax.make_user_context(default_value=None)
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
