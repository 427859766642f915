"""Several processes of this machine at once, as one program: started, watched, ended."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support import HERE


def together(devices: Sequence[int], *arguments: object, seconds: float = 300) -> list[str]:
    """The same command of Python in several processes: what each has said.

    They get the flags of `benchmarks.processes`. As soon as one fails all are ended, for the
    others would wait for it.

    Args:
        devices: how many each has.
        arguments: of Python.
        seconds: in which all must have ended.

    Raises:
        RuntimeError: one failed, or the time is up; with what all have said.
    """
    with ExitStack() as ended, tempfile.TemporaryDirectory() as folder, _address() as at:
        # Into files: of pipes, one that nobody reads stops who writes.
        files = [Path(folder, str(number)) for number in range(len(devices))]
        started, here = [], {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE)}
        for number, (own, file) in enumerate(zip(devices, files, strict=True)):
            which = f"--num-processes={len(devices)} --process-id={number}".split()
            with file.open("wb") as said:
                process = subprocess.Popen(
                    [sys.executable, *map(str, arguments), f"--coordinator={at}", *which],
                    env=os.environ | here | {"JAX_NUM_CPU_DEVICES": str(own)},
                    cwd=HERE,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
            ended.callback(process.wait)
            ended.callback(process.kill)
            started.append(process)
        statuses = _wait(started, time.monotonic() + seconds)
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    if any(statuses):
        said = [f"-- process {i}, {statuses[i]}:\n{text}" for i, text in enumerate(texts)]
        words = f"{arguments} over {devices} devices, in {seconds} seconds:"
        raise RuntimeError("\n".join([words, *said]))
    return texts


def _wait(started: Sequence[subprocess.Popen], end: float) -> list[int | str]:
    """How each has ended, or that it runs, when all have, or one failed, or it is time."""
    while True:
        statuses = [process.poll() for process in started]
        if None not in statuses or any(statuses) or time.monotonic() > end:
            return ["still running" if status is None else status for status in statuses]
        time.sleep(0.05)


@contextmanager
def _address() -> Iterator[str]:
    """One that nothing else is given meanwhile, and a coordinator can have nevertheless.

    gRPC's servers share their ports with who shares his; and to a socket that does not listen
    nothing is connected.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
