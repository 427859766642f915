"""Check, before a program runs, that all processes have the same program."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_leaves_with_path

from ringcoll.debug.explaining import jitted, lowered
from ringcoll.runtime.value_types import type_in_words

_DIGEST = 16  # bytes of each line
_CURE = (
    "let every process make the same calls in the same order, of the same shapes and dtypes, "
    "with the same code, versions, flags and RINGCOLL_TABLE"
)
#: Options of JAX that change what is compiled, but not the lowered program.
_OPTIONS = "cpu_collectives_implementation", "optimization_level", "memory_fitting_level"
#: Environment variables that hold flags of the compiler.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
#: Flags that may differ between processes: they do not change the program.
_OWN_FLAGS = ("--xla_dump_", "--xla_force_host_platform_device_count")
#: The addresses of objects in this process, and numbers of characters: of a line that is shown
#: whole, and of a longer one before the first difference.
_ADDRESS, _SHOWN, _BEFORE = re.compile(r"\b0x[0-9a-fA-F]+"), 200, 50


class _Description(NamedTuple):
    """A function call as lines of text."""

    calls: list[str]
    arguments: list[str]
    program: list[str]


def check_consistent(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Compare what every process is about to run, before it runs.

    Every process passes the function and the arguments that it is about to call. The function is
    traced and lowered, not run. Then the processes compare, in this order:

    - the version of JAX, the options and flags of the compiler, the mesh that is set;
    - the collectives and matmuls of ringcoll, and how each runs, as `ringcoll.explain` prints them;
    - the arguments and the meshes of the program: types, and the order of devices;
    - the lowered program, line by line.

    It cannot see these: the values of arguments, how often a `while` loops, which branch of a
    `cond` is taken, what a callback does, the compiler options of the outermost `jit`, the order of
    devices in its `in_shardings`, and what the compiler adds for shardings.

    Args:
        fn: the function, with or without `jit`; if it has compiler options, the jitted function.
        args, kwargs: arrays, or `jax.ShapeDtypeStruct`s in their place; static arguments as they
            are.

    Returns:
        The calls of ringcoll, a line for each different one.

    Raises:
        ValueError: the programs differ. Every process raises the same message: the first line and
            the first process that differ, and both lines. If `fn` cannot be lowered on one
            process, the message says that; on that process the error is its cause.

    >>> total = ranks(lambda x: ringcoll.psum(x, "x", algorithm="ring"), out_specs=P())
    >>> ringcoll.debug.check_consistent(total, jnp.arange(4.0))
    ['psum over x=4, float32[1]: ring: named by the caller']
    """
    failure: Exception | None = None
    try:
        found = described(fn, *args, **kwargs)
    except Exception as error:  # compare anyway: the other processes would wait for this one
        line = _ADDRESS.sub("", f"{type(error).__name__}: {error}").partition("\n")[0]
        failure, found = error, _Description([f"no program, but {line}"], [], [])
    if jax.process_count() > 1 and (words := _difference(found)):
        raise ValueError(f"ringcoll.debug.check_consistent(fn, ...): {words}") from failure
    if failure is not None:
        raise failure
    return found.calls


def described(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> _Description:
    """Describe a call: its collectives, its arguments with its meshes, and its lowered program."""
    traced, program, plans = lowered(jitted("debug.check_consistent", fn), args, kwargs)
    given = tree_leaves_with_path((args, kwargs))
    arguments = [f"argument {keystr(path)}: {_argument(leaf)}" for path, leaf in given]
    meshes = dict.fromkeys(_devices(mesh) for mesh in _meshes(traced.jaxpr.jaxpr))
    return _Description(
        calls=[*dict.fromkeys(f"{call}: {plan}" for _, call, plan in plans)],
        arguments=arguments + [f"a mesh of {devices}" for devices in meshes],
        program=program.as_text().splitlines(),
    )


def environment() -> list[str]:
    """What a program is compiled with, in lines."""
    options = [f"{name}={getattr(jax.config, f'jax_{name}')}" for name in _OPTIONS]

    def flags(name: str) -> str:
        set_flags = os.environ.get(name, "").split()
        return " ".join(flag for flag in set_flags if not flag.startswith(_OWN_FLAGS))

    return [
        f"jax {jax.__version__}",
        f"{jax.process_count()} processes, {jax.device_count()} devices",
        f"options of JAX: {', '.join(options)}",
        *(f"{name}: {flags(name)}" for name in _FLAGS),
        f"the mesh that is set: {_devices(jax.sharding.get_mesh())}",
    ]


def _argument(leaf: Any) -> str:
    """The type of an argument and the devices that it is on; its class, if it is not an array."""
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        return type(leaf).__qualname__
    sharding = getattr(leaf, "sharding", None)
    return type_in_words(leaf) + (f" on {_devices(sharding)}" if sharding is not None else "")


def _devices(placed: Mesh | Sharding) -> str:
    """The ids of devices in order; if all are local, only their count, because local ids differ."""
    mesh = getattr(placed, "mesh", placed)
    if isinstance(mesh, AbstractMesh):
        devices = []
    elif isinstance(mesh, Mesh):
        devices = [] if mesh.empty else list(mesh.devices.flat)
    else:  # a sharding without an order
        devices = sorted(mesh.device_set, key=lambda device: device.id)
    if {device.process_index for device in devices} <= {jax.process_index()}:
        return f"{len(devices)} of its own devices"
    return f"devices {[device.id for device in devices]}"


def _meshes(jaxpr: Any) -> Iterator[Mesh]:
    """The meshes in a jaxpr: the lowered program does not have the order of their devices."""
    for eqn in jaxpr.eqns:
        meshes = (getattr(leaf, "mesh", leaf) for leaf in jax.tree.leaves(eqn.params))
        yield from (mesh for mesh in meshes if isinstance(mesh, Mesh))
        for each in jaxprs_in_params(eqn.params):
            yield from _meshes(getattr(each, "jaxpr", each))


def _difference(found: _Description) -> str:
    """Where the processes first differ, in the same words on each process; "" if they are equal."""
    # A last line ends each part. With it, all processes find the first difference in one part.
    parts = {
        "what it runs on": [*environment(), "no more of this"],
        "call {}": [*found.calls, "no more calls"],
        "its arguments and meshes": [*found.arguments, "no more arguments"],
        "line {} of its program": [*found.program, "no more lines"],
    }
    lines = [line for part in parts.values() for line in part]
    places = [place.format(i) for place, part in parts.items() for i, _ in enumerate(part, 1)]
    most = _gathered(np.int32(len(lines))).max()
    digests = np.zeros((most, _DIGEST), np.uint8)
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
    shown = _shortened([texts[first], texts[other]])
    more = f" (and {votes[usual] - 1} more)" if votes[usual] > 1 else ""
    return (
        f"process {other} differs from process {first}{more} in {places[at]}\n"
        f"  process {first}: {shown[0]}\n"
        f"  process {other}: {shown[1]}\n{_CURE}"
    )


def _shortened(lines: list[str]) -> list[str]:
    """Lines, of which long ones show only the surroundings of their first difference."""
    pairs = enumerate(zip(*lines, strict=False))
    same = min(map(len, lines))  # if one line is the beginning of the other
    start = max(next((i for i, (a, b) in pairs if a != b), same) - _BEFORE, 0)
    part = slice(start, start + _SHOWN)
    return [line if len(line) <= _SHOWN else f"...{line[part]}..." for line in lines]


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
