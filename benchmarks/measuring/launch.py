"""Run several processes on this machine as one program, and end them."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

#: The folder of the package `benchmarks`.
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class End:
    """The end of a process: its status (None: it was still running), the time, and its output."""

    status: int | None
    time: float
    text: str


@contextmanager
def loopback() -> Iterator[str]:
    """An address for a coordinator. In this block, no other program gets it.

    A socket keeps the port without listening on it. A coordinator can still use the port, because
    gRPC's servers share ports.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def python(coordinator: str, count: int, *arguments: object) -> list[list[str]]:
    """A Python command for each process, with the flags of `processes`."""
    same = [sys.executable, *map(str, arguments), f"--coordinator={coordinator}"]
    return [[*same, f"--num-processes={count}", f"--process-id={i}"] for i in range(count)]


def together(
    commands: Sequence[Sequence[str]],
    devices: Sequence[int],
    *,
    seconds: float = inf,
    grace: float = inf,
    shows_first: bool = False,
) -> list[End]:
    """Run commands at the same time on CPU devices; all have ended when this returns or raises.

    Args:
        commands: one for each process.
        devices: the number of devices of each process.
        seconds: the time after which processes are killed.
        grace: seconds that the other processes get to end after one has failed; they may wait for
            it.
        shows_first: whether to print the output of the first process instead of keeping it.
    """
    here = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with TemporaryDirectory() as folder, ExitStack() as ended:
        # Write to files, because a pipe that nobody reads blocks the process that writes.
        files = [Path(folder, str(number)) for number in range(len(commands))]
        started = []
        for number, (command, own, file) in enumerate(zip(commands, devices, files, strict=True)):
            with file.open("wb") as kept:
                output = None if shows_first and number == 0 else kept
                process = subprocess.Popen(
                    command,
                    env=os.environ | here | {"JAX_NUM_CPU_DEVICES": str(own)},
                    cwd=ROOT,
                    stdout=output,
                    stderr=subprocess.STDOUT if output else None,
                )
            ended.callback(process.wait)
            ended.callback(process.kill)
            started.append(process)
        found = _wait(started, seconds, grace)
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return [End(*one, text) for one, text in zip(found, texts, strict=True)]


def _wait(
    started: Sequence[subprocess.Popen], seconds: float, grace: float
) -> list[tuple[int | None, float]]:
    """Wait for all processes; the status and the end time of each."""
    last = time.time() + seconds
    ends = [last] * len(started)
    failed = False
    while True:
        now, statuses = time.time(), [process.poll() for process in started]
        ends = [last if s is None else min(end, now) for s, end in zip(statuses, ends, strict=True)]
        if any(statuses) and not failed:
            failed, last = True, min(last, now + grace)
        if None not in statuses or now >= last:
            return list(zip(statuses, ends, strict=True))
        time.sleep(0.05)
