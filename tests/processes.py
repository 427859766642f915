"""Several processes of this machine, all of which must do well."""

from collections.abc import Sequence

from benchmarks.measuring import launch


def together(devices: Sequence[int], *arguments: object, seconds: float = 300) -> list[str]:
    """The same command of Python in several processes: what each has said.

    They get the flags of `benchmarks.measuring.processes`. As soon as one fails all are ended, for
    the others would wait for it.

    Args:
        devices: how many each has.
        arguments: of Python.
        seconds: in which all must have ended.

    Raises:
        RuntimeError: one failed, or the time is up; with what all have said.
    """
    with launch.loopback() as at:
        commands = launch.python(at, len(devices), *arguments)
        ends = launch.together(commands, devices, seconds=seconds, grace=0)
    if any(end.status != 0 for end in ends):
        words = f"{arguments} over {devices} devices, in {seconds} seconds (None: still running):"
        said = [f"-- process {i}, {end.status}:\n{end.text}" for i, end in enumerate(ends)]
        raise RuntimeError("\n".join([words, *said]))
    return [end.text for end in ends]
