"""End a program that hangs, and say in which collective and round it hangs."""

import atexit
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import jax

from ringcoll.debug import progress
from ringcoll.runtime.scopes import around_messages

#: The exit status of a process that a deadline has ended, like that of `timeout`.
STATUS = 124
_JAX = os.path.dirname(jax.__file__)


@contextmanager
def deadline(seconds: float, *, grace: float = 5.0) -> Iterator[None]:
    """End this process, and say where it was, if the block does not end in time.

    Use `with deadline(60): ...` around everything that may hang, or use it as a decorator. At its
    end, the block waits for all results, so steps that were only dispatched count too.

    When the time is up, every process writes to stderr which round of which collective each of
    its ranks is in, and which line its Python is in. Then it ends with status `STATUS`, because a
    program that waits for a message cannot be interrupted.

    An exception may leave the block, for example because another process has ended. If a rank is
    then still in a collective, and no rank makes progress for `grace`, the process writes the same
    text. When Python exits, JAX may wait for the other processes, but only until the deadline, or
    for `grace` if that is later. Other exit hooks run to their end.

    Before ranks of several processes exchange a message, they tell each other the round, the
    collective, the dtype and the shape. If these differ, nothing is exchanged: every process
    writes the messages of two ranks that differ, and ends with status `STATUS`.

    Functions are traced again inside the block, and are slower: each round makes two callbacks to
    this process; over several processes, one more and a small gather. Results are the same, bit
    by bit. Only collectives of ringcoll are marked, and only where every axis of the mesh is
    manual. If any other collective hangs, the text names the last mark before it; messages of other
    collectives are not compared.
    Callbacks need JAX's CPU backend too (`JAX_PLATFORMS=cuda,cpu`).

    Args:
        seconds: how long the block may take, with compilation.
        grace: how long a process continues after it has written its text. Processes do not write
            at the same moment, and one may be ended before it writes because another has ended.

    Raises:
        ValueError: `seconds` or `grace` is not a number or is out of range.

    >>> total = ranks(lambda x: ringcoll.psum(x, "x", algorithm="one_shot"), out_specs=P())
    >>> with ringcoll.debug.deadline(60):
    ...     print(total(jnp.arange(4.0)))
    [6.]
    """
    for name, value, least in (("seconds", seconds, 1e-3), ("grace", grace, 0)):
        if not isinstance(value, int | float) or not least <= value <= threading.TIMEOUT_MAX:
            raise ValueError(
                f"ringcoll.debug.deadline: {name}={value!r}; pass a number of seconds, "
                f"from {least:g} to {threading.TIMEOUT_MAX:g}"
            )
    watch = _Watch(seconds, grace)
    watch.start()
    try:
        with around_messages(progress.noted):
            yield
            jax.block_until_ready(jax.live_arrays())
            jax.effects_barrier()
    except BaseException as error:
        if watch.log.stays_stuck(watch.grace):
            watch.say(f"is left by {type(error).__name__}")
            watch.limit_leaving()
            watch.log.clear()  # its content has been written
        raise
    finally:
        watch.stop()


class _Watch:
    """A thread that ends the process, unless it is stopped in time."""

    def __init__(self, seconds: float, grace: float) -> None:
        self.seconds, self.grace = seconds, grace
        self.log = progress.LOG  # when Python exits, it clears modules before it closes generators
        self.end = time.monotonic() + seconds
        self.owner = threading.get_ident()
        self.timer = threading.Timer(seconds, self._is_over)
        self.timer.daemon = True

    def start(self) -> None:
        self.timer.start()
        self.log.enders.append(self._differ)

    def stop(self) -> None:
        self.timer.cancel()
        self.log.enders.remove(self._differ)

    def say(self, what: str, *more: str) -> None:
        """Write to stderr where each rank was last, and then the lines `more`."""
        me = f"{socket.gethostname()}, process {os.getpid()}"
        heading = f"ringcoll.debug.deadline({self.seconds:g}) {what} on {me}:"
        where = self.log.last_marks() or ["no rank has come to a collective of ringcoll"]
        print("\n".join([heading, *where, *more]), file=sys.stderr, flush=True)

    def limit_leaving(self) -> None:
        """Limit how long JAX waits for other processes when Python exits.

        The process ends at the deadline, or `grace` after the exit begins if that is later.
        """
        stuck = self.log.stuck()
        leaving = threading.Event()
        atexit.register(leaving.set)  # start the thread now: none can start during the exit

        def limit() -> None:
            leaving.wait()
            time.sleep(max(self.grace, self.end - time.monotonic()))
            while not _is_in_jax(threading.main_thread().ident):  # another exit hook still runs
                time.sleep(0.1)
            if stuck - self.log.last.keys():  # ranks that have noted something were only slow
                os._exit(STATUS)

        threading.Thread(target=limit, daemon=True).start()

    def _differ(self, lines: list[str]) -> None:
        self.timer.cancel()
        self.say("ends: ranks that are to exchange messages differ", *lines)
        self._exit()

    def _exit(self) -> NoReturn:
        time.sleep(self.grace)
        os._exit(STATUS)

    def _is_over(self) -> None:
        frames = traceback.extract_stack(sys._current_frames().get(self.owner))
        self.say(
            "is over",
            "Python is at",
            *(
                f"  {frame.filename}:{frame.lineno} in {frame.name}"
                for frame in frames
                if not frame.filename.startswith((_JAX, "<frozen"))
            ),
        )
        self._exit()


def _is_in_jax(thread: int | None) -> bool:
    """Whether a thread is in a function of JAX."""
    frame = sys._current_frames().get(thread) if thread else None
    while frame and not frame.f_code.co_filename.startswith(_JAX):
        frame = frame.f_back
    return frame is not None
