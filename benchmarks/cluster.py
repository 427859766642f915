"""Hosts on this machine with links of a given rate, and a command in a process on each.

    python -m benchmarks cluster --hosts 4 --rate 1gbit
    python -m benchmarks cluster --hosts 4 --rate 500mbit --links ring wire --collective psum
    python -m benchmarks cluster --hosts 2 --devices 2 tune --collective psum

Each host is a network namespace, so this takes root (or --loopback: processes that share this
machine's own network, whose links are not shaped). Nothing is left behind, however it ends.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryFile

from benchmarks import hosts
from benchmarks.links import LINKS, bits

#: When a process has failed the others may hang: they get so many seconds.
GRACE = 15
_COORDINATOR = 4321  # nothing else listens on hosts that were just made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The hosts, and what they run."""
    add = parser.add_argument
    add("--hosts", type=int, default=4, metavar="N", help="how many (4)")
    add("--devices", type=int, default=1, metavar="N", help="on each (1)")
    add("--rate", default="1gbit", metavar="RATE", help="of a link, each way (1gbit)")
    add("--links", choices=LINKS, default="star", help="a switch, or a cable to either neighbour")
    add("--loopback", action="store_true", help="no hosts: processes on this machine's network")
    add(
        *("command",),
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="of python -m benchmarks, with its flags (wire)",
    )


def run(args: argparse.Namespace) -> int:
    """Make the hosts, run, take them away; 1 if a process failed."""
    if args.hosts < 1 or args.devices < 1:
        raise SystemExit(f"--hosts {args.hosts} --devices {args.devices}: give 1 or more of each")
    try:
        bits(args.rate)
    except argparse.ArgumentTypeError as error:
        raise SystemExit(f"--rate {error}") from None
    if not args.loopback and (why := hosts.cannot()):
        raise SystemExit(f"{why}; --loopback runs the same without, on links that are not shaped")
    command = args.command or ["wire"]
    if command[0] == "wire" and not args.loopback:
        command = [*command, "--rate", args.rate, "--links", args.links]
    command = [sys.executable, "-m", "benchmarks", *command]
    with _places(args) as (coordinator, places):
        flags = f"--coordinator {coordinator} --num-processes {args.hosts}".split()
        return together(
            [[*place, *command, *flags, "--process-id", str(i)] for i, place in enumerate(places)],
            {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(args.devices)},
        )


@contextmanager
def _places(args: argparse.Namespace) -> Iterator[tuple[str, list[list[str]]]]:
    """The coordinator's address, and what a command begins with to run on each host."""
    if not args.loopback:
        with hosts.made(args.hosts, args.links, args.rate) as all_hosts:
            yield f"{all_hosts[0].address}:{_COORDINATOR}", [h.command() for h in all_hosts]
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    yield f"127.0.0.1:{port}", [[]] * args.hosts


def together(commands: Sequence[Sequence[str]], environment: dict[str, str]) -> int:
    """Run all at once, the first one's words shown; 1 if any fails, with what it said."""
    processes: list[subprocess.Popen] = []
    with ExitStack() as files:
        said = [files.enter_context(TemporaryFile("w+")) for _ in commands]
        try:
            for i, command in enumerate(commands):
                output = said[i] if i else None
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output)
                )
            failed = _wait(processes)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
        for i in failed:
            said[i].seek(0)
            print(f"process {i} ended with {processes[i].returncode}: {said[i].read()}")
    return 1 if failed else 0


def _wait(processes: Sequence[subprocess.Popen]) -> list[int]:
    """Until all have ended, or `GRACE` after the first has failed; those that had failed."""
    end = float("inf")
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        if end == float("inf") and any(process.returncode for process in processes):
            end = time.monotonic() + GRACE
        time.sleep(0.1)
    return [i for i, process in enumerate(processes) if process.poll()]
