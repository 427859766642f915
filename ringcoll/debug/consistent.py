"""Check, before a program runs, that all processes have the same program."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll.debug.calls import Description, described, environment
from ringcoll.debug.program import without_addresses

_DIGEST = 16  # bytes of each line
_CURE = (
    "let every process make the same calls in the same order, of the same shapes and dtypes, "
    "with the same code, versions, flags and RINGCOLL_TABLE"
)


def check_consistent(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Compare what every process is about to run, before it runs.

    Every process passes the function and the arguments that it is about to call. The function is
    traced, not run. Then the processes compare, in this order:

    - versions, the options and flags that change what is compiled, the mesh that is set;
    - every collective, of ringcoll and of `jax.lax`: kind, axes and their sizes, algorithm and
      schedule (those that "auto" chooses here), dtype, shape, and its place in the program;
    - the arguments: types, shardings and the order of devices;
    - the whole program, equation by equation: operands, constants, meshes with the order of their
      devices, shardings and constraints, donation, the policies of `jax.checkpoint`.

    It cannot see these: the values of arguments, how often a `while` loops, which branch of a
    `cond` is taken, what a callback does, the `in_shardings` and compiler options of the
    outermost `jit`, and what the compiler adds for shardings.

    Args:
        fn: the function, with or without `jit`; if it has compiler options, the jitted function.
        args, kwargs: arrays, or `jax.ShapeDtypeStruct`s in their place; static arguments as they
            are.

    Returns:
        The collectives in order, one line each.

    Raises:
        ValueError: the programs differ. Every process raises the same message: the first line and
            the first process that differ, and both lines. If `fn` cannot be traced on one
            process, the message says that; on that process the error is its cause.

    >>> total = ranks(lambda x: ringcoll.psum(x, "x", algorithm="ring"), out_specs=P())
    >>> ringcoll.debug.check_consistent(total, jnp.arange(4.0))
    ['psum over x=4 by ring (schedule ...): float32[1]']
    """
    failure: Exception | None = None
    try:
        found = described(fn, *args, **kwargs)
    except Exception as error:  # compare anyway: the other processes would wait for this one
        line = without_addresses(f"{type(error).__name__}: {error}").partition("\n")[0]
        failure, found = error, Description([f"no program, but {line}"], [], [])
    if jax.process_count() > 1 and (words := _difference(environment(), found)):
        raise ValueError(f"ringcoll.debug.check_consistent(fn, ...): {words}") from failure
    if failure is not None:
        raise failure
    return found.calls


def _difference(around: Sequence[str], found: Description) -> str:
    """Where the processes first differ, in the same words on each process; "" if they are equal."""
    # A last line ends each part. With it, all processes find the first difference in one part.
    parts = {
        "what it runs on": [*around, "no more of this"],
        "call {}": [*found.calls, "no more calls"],
        "its arguments": [*found.arguments, "no more arguments"],
        "line {} of its program": [*found.program, "no more lines"],
    }
    lines = [line for part in parts.values() for line in part]
    places = [place.format(i) for place, part in parts.items() for i, _ in enumerate(part, 1)]
    counts = _gathered(np.array([len(lines), len(found.calls)], np.int32))
    digests = np.zeros((counts[:, 0].max(), _DIGEST), np.uint8)
    for i, line in enumerate(lines):
        digests[i] = np.frombuffer(hashlib.sha256(line.encode()).digest()[:_DIGEST], np.uint8)
    # Most programs are equal. Then each process sends only one digest of all its digests.
    digest_of_all = np.frombuffer(hashlib.sha256(digests.tobytes()).digest(), np.uint8)
    if len(np.unique(_gathered(digest_of_all), axis=0)) == 1:
        return ""
    everyones = [[bytes(digest) for digest in own] for own in _gathered(digests)]
    at = next(i for i, each in enumerate(zip(*everyones, strict=True)) if len(set(each)) > 1)
    votes = Counter(own[at] for own in everyones)
    usual = max(votes, key=votes.__getitem__)  # of equally frequent lines, the first process's
    first = next(process for process, own in enumerate(everyones) if own[at] == usual)
    other = next(process for process, own in enumerate(everyones) if own[at] != usual)
    texts = _texts(lines[at])
    more = f" (and {votes[usual] - 1} more)" if votes[usual] > 1 else ""
    return (
        f"process {other} differs from process {first}{more} in {places[at]}\n"
        f"  process {first} (calls: {counts[first, 1]}): {texts[first]}\n"
        f"  process {other} (calls: {counts[other, 1]}): {texts[other]}\n{_CURE}"
    )


def _texts(text: str) -> list[str]:
    """Exchange a text: the texts of all processes."""
    own = np.frombuffer(text.encode(), np.uint8)
    sizes = _gathered(np.int32(own.size))
    padded = _gathered(np.pad(own, (0, sizes.max() - own.size)))
    return [bytes(row[:size]).decode() for row, size in zip(padded, sizes, strict=True)]


def _gathered(own: np.ndarray | np.generic) -> np.ndarray:
    """The arrays of all processes, stacked. Each process uses only one of its devices."""
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh([firsts[process] for process in sorted(firsts)], "process")
    apart, copied = NamedSharding(mesh, P("process")), NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        rows = jax.make_array_from_process_local_data(apart, np.asarray(own)[None])
        return np.asarray(jax.jit(lambda x: x, out_shardings=copied)(rows).addressable_data(0))
