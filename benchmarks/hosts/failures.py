"""Show what happens if a process fails or its program differs: plain, checked, with a deadline.

Several processes on this machine, each with one device, communicate through gloo on the loopback.
All run a correct program once. Then the last process fails as the name of the row describes. The
table shows how each process ended, and after how many seconds. (Without ringcoll's tools, most
rows hang until --patience is over.)
"""

import argparse
import os
import re
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from benchmarks.measuring import launch, options, processes
from benchmarks.measuring.launch import End
from ringcoll import debug

WAYS = ("today", "checked", "deadline")
Program = Callable[[Array], Array]


def ring(x: Array) -> Array:
    return ringcoll.psum(x, "x", algorithm="ring")


def bruck(x: Array) -> Array:
    return ringcoll.psum(x, "x", algorithm="bruck")


def misspelt(x: Array) -> Array:
    return ringcoll.psum(x, "x", algorithm="rign")


def sum_twice(x: Array) -> Array:
    return ring(x) + ring(x - 1)


def rings(x: Array) -> Array:
    return lax.fori_loop(0, 100_000, lambda _, y: ring(y) / 3, x)


def sum_greatest(x: Array) -> Array:
    y = ringcoll.psum(x, "x", algorithm="recursive_doubling")
    return y + ringcoll.pmax(2 * x + 0 * y, "x", algorithm="recursive_doubling")


def greatest_sum(x: Array) -> Array:
    y = ringcoll.pmax(2 * x, "x", algorithm="recursive_doubling")
    return y + ringcoll.psum(x + 0 * y, "x", algorithm="recursive_doubling")


def small_large(x: Array) -> Array:
    return _scaled(x, {"small": 1, "large": 100})


def large_small(x: Array) -> Array:
    return _scaled(x, {"large": 100, "small": 1})


def _scaled(x: Array, scales: dict[str, int]) -> Array:
    """Sum x in a dictionary's order, as if each process iterated over a set in its own order."""
    sums, last = {}, x
    for name, scale in scales.items():
        sums[name] = last = ring(scale * x + 0 * last)
    return sums["large"] - sums["small"]


#: For programs that do not return the plain sum: a function from that sum and n to the result.
RIGHT: dict[Program, Callable[[int, int], int]] = {
    sum_greatest: lambda total, n: total + 2 * n,
    small_large: lambda total, n: 99 * total,
}


def kill(seconds: float) -> None:
    """Kill this process, as the kernel would."""
    threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL]).start()
    time.sleep(0 if seconds else 60)


def fail() -> None:
    raise RuntimeError("what a program may raise")


@dataclass(frozen=True)
class Failure:
    """What the last process does first, its program and operand, and the program of the others."""

    act: Callable[[], Any] | None = None
    own: Program = ring
    others: Program = ring
    rows: int = 1
    dtype: str = "float32"
    turned: bool = False  # its mesh has a different order of devices; operands do not name a mesh


FAILURES = {
    "is killed before a collective": Failure(partial(kill, 0)),
    "is killed in the middle": Failure(partial(kill, 1), rings, rings),
    "never arrives": Failure(partial(time.sleep, 1e6)),
    "leaves by an exception": Failure(fail),
    "leaves, done": Failure(partial(sys.exit, 0)),
    "has a different shape": Failure(rows=2),
    "has a wider dtype": Failure(dtype="complex64"),
    "has a dtype as wide": Failure(dtype="int32"),
    "has a different algorithm": Failure(own=bruck),
    "has a different order of calls": Failure(own=greatest_sum, others=sum_greatest),
    "has equal calls in a different order": Failure(own=large_small, others=small_large),
    "has devices in a different order": Failure(turned=True),
    "has a call less": Failure(own=ring, others=sum_twice),
    "has a call that is refused": Failure(own=misspelt),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    processes.add_arguments(parser)
    add = parser.add_argument
    add("--only", metavar="WORDS", default="", help="only the rows whose names have these words")
    ways = options.listed(*WAYS)
    add(
        "--ways",
        type=ways,
        default="all",
        metavar="LIST",
        help=f"the columns: all, or some of {', '.join(WAYS)}",
    )
    add("--seconds", type=float, default=10, help="seconds of the deadline (%(default)g)")
    add(
        "--patience",
        type=float,
        default=150,
        help="seconds after which a process counts as hanging (%(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    if args.process_id is not None:
        return _process(args)
    print("|", " | ".join(["the last process", *args.ways]), "|")
    print("|---" * (len(args.ways) + 1) + "|")
    for name, failure in FAILURES.items():
        if args.only in name:
            ends = [
                "as today"
                if way == "checked" and failure.act
                else words(ended(name, way, args.num_processes or 3, args.seconds, args.patience))
                for way in args.ways
            ]
            print("|", " | ".join([name, *ends]), "|", flush=True)
    return 0


def _process(args: argparse.Namespace) -> int:
    """Run the rows as one of the processes."""
    processes.start(args)
    is_last = args.process_id == args.num_processes - 1
    mesh = jax.make_mesh((args.num_processes,), ("x",), axis_types=(AxisType.Auto,))
    turned = Mesh(np.roll(mesh.devices, 1), ("x",))

    def jitted(program: Program, mesh: Mesh = mesh) -> Callable[..., Array]:
        def step(x: Array) -> Array:  # so that all programs have one name
            return program(x)

        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        )

    def operand(rows: int, dtype: str) -> Array:
        own = np.full((rows, 12), args.process_id + 1, dtype)
        return jax.make_array_from_process_local_data(NamedSharding(mesh, P("x")), own)

    healthy = operand(1, "float32")
    jax.block_until_ready(jitted(ring)(healthy))
    for name, failure in FAILURES.items():
        if args.only not in name:
            continue
        own = failure.own if is_last else failure.others
        program = jitted(own, turned if is_last and failure.turned else mesh)
        x: Array | np.ndarray = operand(failure.rows, failure.dtype) if is_last else healthy
        if failure.turned:
            x = np.repeat(np.arange(1, args.num_processes + 1, dtype="float32"), 12).reshape(-1, 12)
        print(f"starts {time.time()}", flush=True)
        if args.ways == ("checked",):
            try:
                debug.check_consistent(program, x)
            except ValueError as error:
                print(f"refused: {error}", flush=True)
            continue
        with debug.deadline(args.seconds, grace=2) if args.ways == ("deadline",) else nullcontext():
            if is_last and failure.act:
                failure.act()
            y = np.asarray(program(x).addressable_data(0))
        total = sum(range(1, args.num_processes + 1))
        right = RIGHT.get(failure.others, lambda total, n: total)(total, args.num_processes)
        print("right values" if np.all(y == right) else "wrong values", flush=True)
    return 0


def ended(only: str, way: str, count: int, seconds: float = 10, patience: float = 150) -> list[End]:
    """Run rows of one column of the table in `count` processes, and wait for them."""
    what = ["-m", "benchmarks", "failures", "--only", only, "--ways", way, "--seconds", seconds]
    with launch.loopback() as at:
        return launch.together(launch.python(at, count, *what), [1] * count, seconds=patience)


#: Patterns in the output of a process, the most telling first.
_TELLING = (
    r"refused: .*: (process \d.*)",
    r"ranks that are to exchange messages differ",
    r"rank \d+ \(.*\): ((?:in|after) .*?)(?:, time|, begun|, done)",
    r"no rank has come to a collective",
    r"Received data size doesn't match expected size",
    r"Gloo [a-z ]+ failed: .*(Connection \w+ by peer)",
    r"(?:wrong|right) values",
    r"RuntimeError: what a program may raise",
    r"no algorithm 'rign'",
)


def words(ends: Sequence[End]) -> str:
    """The ends of processes in words; equal ends are grouped."""
    alike: dict[str, list[int]] = defaultdict(list)
    for i, end in enumerate(ends):
        found = (m for pattern in _TELLING if (m := re.search(pattern, end.text)))
        cause = next((m[m.lastindex or 0] for m in found), "")
        ending = "hangs" if end.status is None else f"ends with {end.status}{_after(end)}"
        ending = "refused" if "refused: " in end.text else ending
        alike[f"{cause}, {ending}".removeprefix(", ")].append(i)
    return "; ".join(f"{', '.join(map(str, who))}: {what}" for what, who in alike.items())


def _after(end: End) -> str:
    """The time from the start of a row to the end of a process, in words."""
    begun = re.search(r"starts (\S+)", end.text)
    return f" after {end.time - float(begun[1]):.0f} s" if begun else ""
