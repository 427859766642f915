"""The network that this process's host is on: what went over it, how fast TCP goes."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import jax
import numpy as np

from benchmarks import processes

#: Interfaces of a host that are told apart, at most.
_MOST = 8


def counters() -> dict[str, int]:
    """Bytes that this host has sent by each of its interfaces, loopback left out."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    fields = {name.strip(): of.split() for name, of in (line.split(":", 1) for line in lines)}
    return {name: int(of[8]) for name, of in fields.items() if name != "lo"}


def sent_by(program: Callable[[], Any], calls: int = 3) -> np.ndarray:
    """Bytes that a call sends by each interface: a row for a host.

    All that the hosts send meanwhile is counted, headers and acknowledgements too.
    """
    processes.meet()
    before = counters()
    for _ in range(calls):
        program()
    processes.meet()
    sent = [count - before[name] for name, count in sorted(counters().items())][:_MOST]
    mine = np.array(sent + [0] * (_MOST - len(sent)), np.float32)
    return processes.everyones(mine) / calls


def tcp_rate(seconds: float = 1.0) -> tuple[float, bool]:
    """Bytes a second from each host to the next one, all at once: of the slowest.

    And whether they are hosts, with addresses of their own, or processes of one.
    """
    with socket.create_server((socket.gethostbyname(socket.gethostname()), 0)) as server:
        address, port = server.getsockname()
        everywhere = processes.everyones(np.array([*map(int, address.split(".")), port], np.int32))
        *to, at = everywhere[(jax.process_index() + 1) % jax.process_count()].tolist()
        sender = Thread(target=_send, args=((".".join(map(str, to)), at), seconds))
        sender.start()
        rate = _receive(server)
        sender.join()
    slowest = processes.everyones(np.array([rate], np.float32)).min()
    return float(slowest), len(np.unique(everywhere[:, :-1], axis=0)) == len(everywhere)


def _send(to: tuple[str, int], seconds: float) -> None:
    block, end = bytes(2**16), time.perf_counter() + seconds
    with socket.create_connection(to) as connection:
        while time.perf_counter() < end:
            connection.sendall(block)


def _receive(server: socket.socket) -> float:
    connection, _ = server.accept()
    with connection:
        connection.recv(1)  # it has begun
        count, start = 0, time.perf_counter()
        while block := connection.recv(2**16):
            count += len(block)
        return count / (time.perf_counter() - start)
