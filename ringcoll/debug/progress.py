"""Note the progress of every rank in the collectives of ringcoll.

In a program that is traced under `around_messages(noted)`, every message passes a callback that
notes its scope, before it is sent and after it has arrived. The callback returns a condition that
selects between the message and zeros, so that nothing is sent before it is noted.

Processes may run different programs. So their ranks first tell each other what they are about to
exchange, and stop if they differ: a network carries bytes, and would not notice a wrong dtype or
call.
"""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.runtime.scopes import Arrays

AxisSizes = tuple[tuple[str, int], ...]
_DIGEST, _TAG = 8, 128  # bytes that ranks send each other: those of the digest, and all bytes


class Mark(NamedTuple):
    """The last operation that a rank began: its name, how often, whether it is done, and when."""

    where: str
    times: int
    is_done: bool
    when: float


class Log:
    """The notes of the ranks of this process, by the axes of their mesh and their number."""

    def __init__(self) -> None:
        self.last: dict[tuple[AxisSizes, int], Mark] = {}
        self.times: Counter[tuple[AxisSizes, int, str]] = Counter()
        #: The functions that active watches call if ranks differ; the innermost is the last.
        self.enders: list[Callable[[list[str]], None]] = []
        self._ending = threading.Lock()

    def note(self, axes: AxisSizes, rank: int, where: str, is_done: bool) -> None:
        """Note that a rank begins an operation or is done with it."""
        self.times[axes, rank, where] += not is_done
        times = self.times[axes, rank, where]
        self.last[axes, rank] = Mark(where, times, is_done, time.monotonic())

    def clear(self) -> None:
        self.last.clear()
        self.times.clear()

    def differ(self, lines: list[str]) -> NoReturn:
        """End this process, because ranks are about to exchange different things (`lines`)."""
        with self._ending:  # only for the first rank of this process that notices
            for end in reversed(self.enders):
                end(lines)
            raise RuntimeError("\n".join(lines))

    def stuck(self) -> set[tuple[AxisSizes, int]]:
        """The ranks that have begun an operation and are not done with it."""
        return {rank for rank, mark in list(self.last.items()) if not mark.is_done}

    def stays_stuck(self, seconds: float) -> bool:
        """Wait until no rank notes anything for `seconds` (True) or no rank is stuck (False)."""
        while self.stuck():
            silent = time.monotonic() - max(mark.when for mark in list(self.last.values()))
            if silent >= seconds:
                return True
            time.sleep(min(0.05, seconds - silent))
        return False

    def last_marks(self) -> list[str]:
        """The last mark of every rank, one line for each."""
        return [f"rank {_place(*key)}: {_words(mark)}" for key, mark in sorted(self.last.items())]


#: There is one log for the process, because programs compiled under one watch run under the next.
LOG = Log()


def noted(
    send: Callable[[Arrays], Arrays],
    messages: Arrays,
    over: Sequence[Hashable],
    groups: Sequence[Sequence[int]] | None,
    to: object,
    where: str,
) -> Arrays:
    """`send(messages)`; every rank notes when it begins and when it is done.

    JAX has callbacks only if every axis of the mesh is manual.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(mesh.shape.items())
    if not axes or set(mesh.axis_names) != set(mesh.manual_axes):
        return send(messages)
    begun = _noted(messages, axes, where, is_done=False)
    if jax.process_count() > 1:
        types = ", ".join(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in _leaves(messages))
        begun &= _agreed(begun, f"{where}: {types}{to}", tuple(over), groups)
    received = send(_once(begun, messages))
    return _once(_noted(received, axes, where, is_done=True), received)


def _leaves(messages: Arrays) -> list[Array]:
    return [x for x in jax.tree.leaves(messages) if x.size]


def _once(there: Array, messages: Arrays) -> Arrays:
    """The messages, after a callback has returned that they may be used."""
    return jax.tree.map(lambda x: jnp.where(there, x, jnp.zeros_like(x)), messages)


def _noted(messages: Arrays, axes: AxisSizes, where: str, *, is_done: bool) -> Array:
    """True, after all messages are ready and the note is made."""
    firsts = [x[(0,) * x.ndim].real.astype(jnp.float32) for x in _leaves(messages)]
    return jax.pure_callback(
        partial(_note, axes, where, is_done),
        jax.ShapeDtypeStruct((), bool),
        lax.axis_index(tuple(name for name, _ in axes)),
        *map(lax.stop_gradient, firsts),
        vmap_method="expand_dims",
    )


def _note(axes: AxisSizes, where: str, is_done: bool, rank: Array, *firsts: Array) -> np.ndarray:
    """The callback. It must not compute with JAX arrays: that may need the thread it runs on."""
    LOG.note(axes, int(np.asarray(rank).flat[0]), where, is_done)
    return np.ones(np.broadcast_shapes(rank.shape, *(x.shape for x in firsts)), bool)


def _agreed(
    begun: Array, words: str, over: tuple[Hashable, ...], groups: Sequence[Sequence[int]] | None
) -> Array:
    """True, after all ranks that take part have confirmed that they begin the same operation."""
    own = hashlib.sha256(words.encode()).digest()[:_DIGEST] + words.encode()
    tag = np.frombuffer(own[:_TAG].ljust(_TAG, b"\0"), np.uint8)
    tags = lax.all_gather(
        jnp.where(begun, tag, np.zeros_like(tag)), over, axis_index_groups=groups
    )  # [n, _TAG]
    return jax.pure_callback(
        partial(_compare, over), jax.ShapeDtypeStruct((), bool), tags, vmap_method="expand_dims"
    )


def _compare(over: tuple[Hashable, ...], tags: Array) -> np.ndarray:
    """The callback: it ends the process if the tags differ."""
    of_ranks = np.asarray(tags).reshape(-1, *tags.shape[-2:])[0]  # a batch has equal tags
    other = next((r for r, tag in enumerate(of_ranks) if np.any(tag != of_ranks[0])), None)
    if other is not None:
        tag_texts = {r: bytes(of_ranks[r][_DIGEST:]).rstrip(b"\0") for r in (0, other)}
        LOG.differ(
            [
                f"rank {r} over {', '.join(map(str, over))} begins {text.decode(errors='replace')}"
                for r, text in tag_texts.items()
            ]
        )
    return np.ones(tags.shape[:-2], bool)


def _place(axes: AxisSizes, rank: int) -> str:
    digits = [
        f"{name}={rank // prod(n for _, n in axes[i + 1 :]) % size}"
        for i, (name, size) in enumerate(axes)
    ]
    return f"{rank} ({', '.join(digits)})"


def _words(mark: Mark) -> str:
    ago = f"{time.monotonic() - mark.when:.1f} s ago"
    where = mark.where if mark.times == 1 else f"{mark.where}, time {mark.times}"
    return f"after {where}, done {ago}" if mark.is_done else f"in {where}, begun {ago}"
