"""What happens when a process fails, or runs another program: today, checked, under a deadline.

Several processes of this machine, each with one device, speak through gloo on the loopback. All
run a healthy program once; then the last one does what the row says. The table has what became
of the others, and how many seconds after.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from benchmarks import processes
from ringcoll import debug

SECONDS = 10.0  # of the deadline


def kill_soon(seconds: float) -> None:
    """As the kernel would."""
    threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL]).start()


def raise_error() -> None:
    raise RuntimeError("what a user's program may raise")


def nothing() -> None:
    pass


def ring_sum(x: Any) -> Any:
    return ringcoll.psum(x, "x", algorithm="ring")


def other_ring_sum(x: Any) -> Any:
    return ringcoll.psum(x, "x", algorithm="bruck")


def long_sum(x: Any) -> Any:
    return lax.fori_loop(0, 100_000, lambda _, x: ring_sum(x) / 3, x)


def sum_then_greatest(x: Any) -> Any:
    a = ringcoll.psum(x, "x", algorithm="exchange")
    return a + ringcoll.pmax(2 * x + 0 * a, "x", algorithm="exchange")


def greatest_then_sum(x: Any) -> Any:
    a = ringcoll.pmax(2 * x, "x", algorithm="exchange")
    return a + ringcoll.psum(x + 0 * a, "x", algorithm="exchange")


#: What the last process does before, and runs; what the others run; and its rows and dtype.
Failure = tuple[Callable[[], None], Callable[[Any], Any], Callable[[Any], Any], int, str]
FAILURES: dict[str, Failure] = {
    "is killed before a collective": (partial(kill_soon, 0), ring_sum, ring_sum, 1, "float32"),
    "is killed in the middle": (partial(kill_soon, 1), long_sum, long_sum, 1, "float32"),
    "never arrives": (partial(time.sleep, 1e6), ring_sum, ring_sum, 1, "float32"),
    "leaves by an exception": (raise_error, ring_sum, ring_sum, 1, "float32"),
    "leaves, done": (partial(sys.exit, 0), ring_sum, ring_sum, 1, "float32"),
    "has another shape": (nothing, ring_sum, ring_sum, 2, "float32"),
    "has a wider dtype": (nothing, ring_sum, ring_sum, 1, "complex64"),
    "has another dtype of that width": (nothing, ring_sum, ring_sum, 1, "int32"),
    "has another algorithm": (nothing, other_ring_sum, ring_sum, 1, "float32"),
    "calls in another order": (nothing, greatest_then_sum, sum_then_greatest, 1, "float32"),
}
WAYS = ("today", "checked", "deadline")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    processes.add_arguments(parser)
    add = parser.add_argument
    add("--only", metavar="WORDS", default="", help="the rows that have these words")
    add("--ways", default=",".join(WAYS), help="columns, of %(default)s")
    add("--patience", type=float, default=200, help="what has not ended by then hangs (seconds)")


def run(args: argparse.Namespace) -> int:
    if args.process_id is not None:
        return _process(args)
    for failure in FAILURES:
        if args.only in failure:
            for way in args.ways.split(","):
                _report(failure, way, args)
    return 0


def _process(args: argparse.Namespace) -> int:
    """One of the processes."""
    processes.start(args)
    fails = args.process_id == args.num_processes - 1
    act, other, usual, rows, dtype = FAILURES[args.only]
    mesh = jax.make_mesh((args.num_processes,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def jitted(function: Callable[[Any], Any]) -> Any:
        return jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        )

    def operand(rows: int, dtype: str) -> jax.Array:
        own = np.full((rows, 12), args.process_id + 1, dtype)
        return jax.make_array_from_process_local_data(NamedSharding(mesh, P("x")), own)

    jax.block_until_ready(jitted(ring_sum)(operand(1, "float32")))
    program = jitted(other if fails else usual)
    x = operand(rows, dtype) if fails else operand(1, "float32")
    watch: AbstractContextManager[None] = nullcontext()
    if args.ways == "deadline":
        watch = debug.deadline(SECONDS, grace=2)
    print(f"starts {time.time()}", flush=True)
    with watch:
        if args.ways == "checked":
            debug.check_consistent(program, x)
        if fails:
            act()
        y = np.asarray(program(x).addressable_data(0))
    print("result", y.ravel()[:3], flush=True)
    return 0


def _report(failure: str, way: str, args: argparse.Namespace) -> None:
    """One entry of the table."""
    count = args.num_processes or 3
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks", "failures", "--only", failure, "--ways", way]
    command += f"--coordinator 127.0.0.1:{port} --num-processes {count} --process-id".split()
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    started = [
        subprocess.Popen(
            [*command, str(i)], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for i in range(count)
    ]
    try:
        ended: dict[int, float] = {}
        begun = time.time()
        while len(ended) < count - 0 and time.time() < begun + args.patience:
            for i, process in enumerate(started):
                if i not in ended and process.poll() is not None:
                    ended[i] = time.time()
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
    print("==", failure, way)
    for i, process in enumerate(started):
        text, _ = process.communicate()
        start = [float(line.split()[1]) for line in text.splitlines() if line.startswith("starts ")]
        after = f"{ended[i] - start[0]:.1f}" if i in ended and start else "hangs"
        print("-- process", i, process.returncode, after)
        print(text[-1500:])
