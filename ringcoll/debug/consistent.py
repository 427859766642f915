"""Whether all processes are about to run the same program; if not, where they part."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll.debug.calls import described, environment

_DIGEST = 16  # bytes of each line
_END = "no more calls"
_CURE = (
    "let every process make the same calls in the same order, of the same shapes and dtypes, "
    "with the same code, versions, flags and RINGCOLL_TABLE"
)


def check_consistent(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Compare what every process is about to run, before it runs.

    Every process calls it with the function and the arguments that it is about to call it with.
    The function is traced, not run; then the processes compare the versions of JAX and ringcoll,
    the arguments, and every collective in order, of ringcoll and of `jax.lax`: kind, axes and
    their sizes, algorithm and schedule (what "auto" stands for here), dtype, shape, and where it
    stands. What the compiler adds for shardings of `jit` is not seen.

    Args:
        fn: the function, with or without `jit`.
        args, kwargs: arrays, or `jax.ShapeDtypeStruct`s of such.

    Returns:
        The collectives in order, one line each.

    Raises:
        ValueError: the programs differ; on every process in the same words: the first call and
            the first process that differ, and both lines. If `fn` cannot be traced on one
            process, that is what it is about, there with the error as its cause.
    """
    failure: Exception | None = None
    try:
        arguments, calls = described(fn, *args, **kwargs)
    except Exception as error:  # the others must hear of it, or they would wait
        failure, arguments, calls = error, [], [f"no program, but {_said(error)}"]
    if jax.process_count() > 1 and (words := _difference(environment(), calls, arguments)):
        raise ValueError(f"ringcoll.debug.check_consistent(fn, ...): {words}") from failure
    if failure is not None:
        raise failure
    return calls


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _difference(around: Sequence[str], calls: Sequence[str], arguments: Sequence[str]) -> str:
    """Where the processes differ first, in words that are the same on all."""
    lines = [*around, *calls, _END, *arguments]
    counts = _gathered(np.array([len(lines), len(calls)], np.int32))
    digests = np.zeros((counts[:, 0].max(), _DIGEST), np.uint8)
    for i, line in enumerate(lines):
        digests[i] = np.frombuffer(hashlib.sha256(line.encode()).digest()[:_DIGEST], np.uint8)
    # Most programs are the same: then nothing but a digest of all digests is sent.
    whole = np.frombuffer(hashlib.sha256(digests.tobytes()).digest(), np.uint8)
    if len(np.unique(_gathered(whole), axis=0)) == 1:
        return ""
    everyones = [[bytes(digest) for digest in own] for own in _gathered(digests)]
    at = next(i for i, each in enumerate(zip(*everyones, strict=True)) if len(set(each)) > 1)
    votes = Counter(own[at] for own in everyones)
    usual = max(votes, key=votes.__getitem__)  # of as many, the first process's
    first = next(process for process, own in enumerate(everyones) if own[at] == usual)
    other = next(process for process, own in enumerate(everyones) if own[at] != usual)
    texts = _texts(lines[at] if at < len(lines) else "no more arguments")
    number = at - len(around) + 1
    in_calls = 0 < number <= max(counts[first, 1], counts[other, 1])
    what = f"call {number}" if in_calls else "what it runs on" if number < 1 else "its arguments"
    more = f" (and {votes[usual] - 1} more)" if votes[usual] > 1 else ""
    return (
        f"process {other} differs from process {first}{more} in {what}\n"
        f"  process {first} (calls: {counts[first, 1]}): {texts[first]}\n"
        f"  process {other} (calls: {counts[other, 1]}): {texts[other]}\n{_CURE}"
    )


def _texts(text: str) -> list[str]:
    """Every process's text."""
    own = np.frombuffer(text.encode(), np.uint8)
    sizes = _gathered(np.int32(own.size))
    padded = _gathered(np.pad(own, (0, sizes.max() - own.size)))
    return [bytes(row[:size]).decode() for row, size in zip(padded, sizes, strict=True)]


def _gathered(own: np.ndarray | np.generic) -> np.ndarray:
    """Every process's, stacked; by one device of each, of which they may have several numbers."""
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh([firsts[process] for process in sorted(firsts)], "process")
    apart, copied = NamedSharding(mesh, P("process")), NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        rows = jax.make_array_from_process_local_data(apart, np.asarray(own)[None])
        return np.asarray(jax.jit(lambda x: x, out_shardings=copied)(rows).addressable_data(0))
