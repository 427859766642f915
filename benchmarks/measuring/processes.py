"""Several processes as one machine: how they find each other and agree on values.

All run the same program on the same data. If the clock decides, the clock of the first process
decides for all.
"""

import argparse

import jax
import numpy as np
from jax.experimental import multihost_utils


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --coordinator, --num-processes and --process-id."""
    add = parser.add_argument_group(
        "several processes",
        "Start the same command in each. Without these flags, the processes are those of Slurm, "
        "Kubernetes, Open MPI or a TPU pod, if the command runs in one.",
    ).add_argument
    add("--coordinator", metavar="HOST:PORT", help="the address of the first process")
    add("--num-processes", type=int, metavar="N", help="the number of processes")
    add("--process-id", type=int, metavar="I", help="the number of this process, from 0")


def start(args: argparse.Namespace) -> None:
    """Join the other processes, if there are any. Call it before anything asks for a device.

    Args:
        args: the arguments, with those of `add_arguments`.
    """
    flags = {
        "--coordinator": args.coordinator,
        "--num-processes": args.num_processes,
        "--process-id": args.process_id,
    }
    missing = [flag for flag, value in flags.items() if value is None]
    if 0 < len(missing) < len(flags):
        raise SystemExit(f"{', '.join(missing)}: give all of {', '.join(flags)}, or none")
    if not missing and not 0 <= args.process_id < args.num_processes:
        raise SystemExit(
            f"--process-id {args.process_id}: the processes are 0 to {args.num_processes - 1}"
        )
    try:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    except (ValueError, RuntimeError):  # there are no other processes, or JAX has already started
        if not missing:
            raise


def is_first() -> bool:
    """Whether this process prints and writes files."""
    return jax.process_index() == 0


def first_value(value: float) -> float:
    """The value of the first process; all processes get it."""
    return float(first_values(np.array([value]))[0])


def first_values(values: np.ndarray) -> np.ndarray:
    """The values of the first process; all processes pass equally many."""
    if jax.process_count() == 1:
        return values
    bits = np.asarray(values, np.float64).view(np.uint8)  # bytes arrive unchanged
    return np.asarray(multihost_utils.broadcast_one_to_all(bits)).view(np.float64)


def all_values(own: np.ndarray) -> np.ndarray:
    """The values of all processes, a row for each; all pass equally many."""
    gathered = own if jax.process_count() == 1 else multihost_utils.process_allgather(own)
    return np.asarray(gathered).reshape(jax.process_count(), -1)


def meet() -> None:
    """Wait for all processes, so that no time includes a late start."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("meet")


def total(count: int) -> int:
    """The sum of all processes' counts."""
    return int(all_values(np.array([count], np.int32)).sum())
