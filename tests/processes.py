"""Run several processes on this machine; all must succeed."""

from collections.abc import Sequence

from support import flags_of_cpu

from benchmarks.measuring import launch


def together(devices: Sequence[int], *arguments: object, seconds: float = 300) -> list[str]:
    """Run the same Python command in several processes; return what each has printed.

    The processes get the flags of `benchmarks.measuring.processes`. As soon as one fails, all are
    ended, because the others would wait for it.

    Args:
        devices: the number of devices of each process.
        arguments: the arguments of Python.
        seconds: the time in which all must end.

    Raises:
        RuntimeError: one failed, or the time is up. It has what all processes printed.
    """
    with launch.loopback() as at, flags_of_cpu():
        commands = launch.python(at, len(devices), *arguments)
        ends = launch.together(commands, devices, seconds=seconds, grace=0)
    if any(end.status != 0 for end in ends):
        words = f"{arguments} over {devices} devices, in {seconds} seconds (None: still running):"
        outputs = [f"-- process {i}, {end.status}:\n{end.text}" for i, end in enumerate(ends)]
        raise RuntimeError("\n".join([words, *outputs]))
    return [end.text for end in ends]
