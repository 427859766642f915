"""Make hosts on this machine with links of a given rate, and run a command on all of them.

    python -m benchmarks cluster --hosts 4 --rate 1gbit
    python -m benchmarks cluster --hosts 4 --rate 500mbit --links ring wire --collective psum
    python -m benchmarks cluster --hosts 2 --devices 2 tune --collective psum

Each host is a network namespace, so this needs root. (With --loopback it does not: processes
share this machine's network, and links have no given rate.) Hosts and links are always removed
at the end.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.hosts import namespaces
from benchmarks.hosts.links import LINKS, bits
from benchmarks.measuring import launch

#: Seconds that the other processes get to end when one has failed. They may hang.
GRACE = 15
_COORDINATOR = 4321  # this port is free, because the hosts are new


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the hosts, and what they run."""
    add = parser.add_argument
    add("--hosts", type=int, default=4, metavar="N", help="the number of hosts (4)")
    add(
        "--devices", type=int, default=1, metavar="N", help="the number of devices of each host (1)"
    )
    what = "the rate of a link in each direction (1gbit)"
    add("--rate", default="1gbit", metavar="RATE", help=what)
    what = "star is a switch; ring is a cable to each neighbour (star)"
    add("--links", choices=LINKS, default="star", help=what)
    what = "make no hosts: run processes on this machine's network"
    add("--loopback", action="store_true", help=what)
    add(
        *("command",),
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="a command of python -m benchmarks, with its flags (wire)",
    )


def run(args: argparse.Namespace) -> int:
    """Make the hosts, run the command, remove the hosts; return 1 if a process failed."""
    if args.hosts < 1 or args.devices < 1:
        raise SystemExit(f"--hosts {args.hosts} --devices {args.devices}: give 1 or more of each")
    try:
        bits(args.rate)
    except argparse.ArgumentTypeError as error:
        raise SystemExit(f"--rate {error}") from None
    if not args.loopback and (why := namespaces.cannot()):
        raise SystemExit(f"{why}; --loopback runs the same without, on links that are not shaped")
    command = args.command or ["wire"]
    if command[0] == "wire" and not args.loopback:
        command = [*command, "--rate", args.rate, "--links", args.links]
    with _exits_by_signals(), _places(args) as (coordinator, places):
        commands = launch.python(coordinator, args.hosts, "-m", "benchmarks", *command)
        ends = launch.together(
            [[*place, *one] for place, one in zip(places, commands, strict=True)],
            [args.devices] * args.hosts,
            grace=GRACE,
            shows_first=True,
        )
    bad = [i for i, end in enumerate(ends) if end.status]
    for i in bad:
        print(f"process {i} ended with {ends[i].status}\n{ends[i].text}")
    return 1 if bad else 0


@contextmanager
def _exits_by_signals() -> Iterator[None]:
    """In this block, signals end Python with cleanup, even if the shell ignores signals."""
    stops = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(stop, lambda number, _: sys.exit(128 + number)) for stop in stops]
    try:
        yield
    finally:
        for stop, handler in zip(stops, before, strict=True):
            signal.signal(stop, handler)


@contextmanager
def _places(args: argparse.Namespace) -> Iterator[tuple[str, list[list[str]]]]:
    """The coordinator's address, and the words with which a command on each host begins."""
    if args.loopback:
        with launch.loopback() as address:
            yield address, [["env", f"--chdir={os.getcwd()}"]] * args.hosts
        return
    with namespaces.make_hosts(args.hosts, args.links, args.rate) as all_hosts:
        yield f"{all_hosts[0].address}:{_COORDINATOR}", [host.command() for host in all_hosts]
