"""Count the bytes on the network of this process's host, and measure TCP there."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import jax
import numpy as np

from benchmarks.measuring import processes

#: The most interfaces of a host.
_MOST = 8
#: How many calls `sent_by` counts.
_CALLS = 3
#: How often TCP is measured, and the seconds of each time. The best rate counts, because other work
#: can only lower it.
_TRIES, _SECONDS = 3, 0.5


def counters() -> dict[str, int]:
    """Bytes that this host has sent through each interface, without loopback."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    fields = {name.strip(): of.split() for name, of in (line.split(":", 1) for line in lines)}
    return {name: int(of[8]) for name, of in fields.items() if name != "lo"}


def sent_by(program: Callable[[], Any]) -> np.ndarray:
    """Bytes that a call sends through each interface: a row for each host.

    Everything that the hosts send at that time counts, also headers and acknowledgements.
    """
    processes.meet()
    before = counters()
    for _ in range(_CALLS):
        program()
    processes.meet()
    sent = [count - before[name] for name, count in sorted(counters().items())][:_MOST]
    mine = np.array(sent + [0] * (_MOST - len(sent)), np.float32)
    return processes.all_values(mine) / _CALLS


def tcp_rate() -> tuple[float, bool]:
    """The best TCP rate of the slowest host, while each sends to the next one.

    It also returns whether the processes are on hosts with different addresses.
    """
    with socket.create_server((socket.gethostbyname(socket.gethostname()), 0)) as server:
        address, port = server.getsockname()
        everywhere = processes.all_values(np.array([*map(int, address.split(".")), port], np.int32))
        *to, at = everywhere[(jax.process_index() + 1) % jax.process_count()].tolist()
        following = ".".join(map(str, to)), at
        rates = [_rate(server, following) for _ in range(_TRIES)]
    slowest = processes.all_values(np.array(rates, np.float32)).min(axis=0)
    return float(slowest.max()), len(np.unique(everywhere[:, :-1], axis=0)) == len(everywhere)


def _rate(server: socket.socket, to: tuple[str, int]) -> float:
    """Bytes per second from this host to the next one, until all bytes have arrived."""
    receiver = Thread(target=_receive, args=(server,), daemon=True)
    receiver.start()
    processes.meet()
    block, count, start = bytes(2**16), 0, time.perf_counter()
    with socket.create_connection(to) as connection:
        while time.perf_counter() < start + _SECONDS:
            connection.sendall(block)
            count += len(block)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # returns when the receiver closes
    rate = count / (time.perf_counter() - start)
    receiver.join()
    return rate


def _receive(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        while connection.recv(2**16):
            pass
