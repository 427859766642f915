"""Where every rank is, noted as it goes: names for profiles and, if asked, marks for a watch.

A `scope` names what is traced within. While a program is traced under `watching(True)` (by
`ringcoll.debug.deadline`), what is sent passes a callback that notes the scope, and so does what
has come. A callback gives back what selects between the message and zeros, so that nothing can
be sent before it is noted; elsewhere not one instruction is added.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from math import prod
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Axes = tuple[tuple[str, int], ...]
#: An array, or a list of them.
Arrays = TypeVar("Arrays")

#: Whether what is traced is marked. A part of the key by which `jit` knows its programs.
watching = jax.make_user_context(default_value=False)
_path: ContextVar[tuple[str, ...]] = ContextVar("path", default=())


class Mark(NamedTuple):
    """What a rank began last, how often in all, and whether and when it was through with it."""

    where: str
    times: int
    is_done: bool
    when: float


class Log:
    """What the ranks of this process have noted, by the axes of their mesh and their number."""

    def __init__(self) -> None:
        self.last: dict[tuple[Axes, int], Mark] = {}
        self.times: Counter[tuple[Axes, int, str]] = Counter()

    def note(self, axes: Axes, rank: int, where: str, is_done: bool) -> None:
        """A rank begins, or is through."""
        self.times[axes, rank, where] += not is_done
        times = self.times[axes, rank, where]
        self.last[axes, rank] = Mark(where, times, is_done, time.monotonic())

    def clear(self) -> None:
        self.last.clear()
        self.times.clear()

    def is_stuck(self) -> bool:
        """Whether a rank has begun what it is not through with."""
        return any(not mark.is_done for mark in list(self.last.values()))

    def said(self) -> list[str]:
        """Where every rank was last, one line each."""
        return [f"rank {_place(*key)}: {_words(mark)}" for key, mark in sorted(self.last.items())]


#: It is of the process, as callbacks are: what was compiled under one watch runs under the next.
LOG = Log()


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Under which name profiles and marks have what is traced within."""
    token = _path.set((*_path.get(), name))
    try:
        with jax.named_scope(name):
            yield
    finally:
        _path.reset(token)


def marked(send: Callable[[Arrays], Arrays], messages: Arrays) -> Arrays:
    """`send(messages)`; under a watch every rank notes that it begins, and that it is through.

    JAX has callbacks only where every axis of the mesh is manual.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(mesh.shape.items())
    if not watching.value or not axes or set(mesh.axis_names) != set(mesh.manual_axes):
        return send(messages)
    where = "/".join(_path.get())
    received = send(_noted(messages, axes, where, is_done=False))
    return _noted(received, axes, where, is_done=True)


def _noted(messages: Arrays, axes: Axes, where: str, *, is_done: bool) -> Arrays:
    """The messages, once all of them are there and it has been noted."""
    leaves = [x for x in jax.tree.leaves(messages) if x.size]
    firsts = [x[(0,) * x.ndim].real.astype(jnp.float32) for x in leaves]
    there = jax.pure_callback(
        partial(_note, axes, where, is_done),
        jax.ShapeDtypeStruct((), bool),
        lax.axis_index(tuple(name for name, _ in axes)),
        *map(lax.stop_gradient, firsts),
        vmap_method="expand_dims",
    )
    return jax.tree.map(lambda x: jnp.where(there, x, jnp.zeros_like(x)), messages)


def _note(axes: Axes, where: str, is_done: bool, rank: Array, *firsts: Array) -> np.ndarray:
    """What the callback does: no computing with arrays, which may need the thread it is on."""
    LOG.note(axes, int(np.asarray(rank).flat[0]), where, is_done)
    return np.ones(np.broadcast_shapes(rank.shape, *(x.shape for x in firsts)), bool)


def _place(axes: Axes, rank: int) -> str:
    digits = [
        f"{name}={rank // prod(n for _, n in axes[i + 1 :]) % size}"
        for i, (name, size) in enumerate(axes)
    ]
    return f"{rank} ({', '.join(digits)})"


def _words(mark: Mark) -> str:
    ago = f"{time.monotonic() - mark.when:.1f} s ago"
    where = mark.where if mark.times == 1 else f"{mark.where}, time {mark.times}"
    return f"after {where}, done {ago}" if mark.is_done else f"in {where}, begun {ago}"
