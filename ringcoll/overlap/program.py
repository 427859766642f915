"""A compiled program as a report needs it: its text, its sizes, the places of its ranks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

from jax import tree
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled

from ringcoll.placement.network import Network
from ringcoll.placement.topology import network


@dataclass(frozen=True)
class Program:
    """A compiled program.

    kind is the `device.device_kind`; temporaries and program_bytes are bytes, None if unknown;
    profile is cycles by name of instruction; notes are for readers of the report; versions are
    those of the packages that compiled it; axes are the names and sizes of the mesh, if known.
    """

    text: str
    kind: str | None = None
    network: Network | None = None
    temporaries: int | None = None
    program_bytes: int | None = None
    profile: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)

    def axes_along(self, members: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """The axes of the mesh along which ranks of one group differ."""
        digits = zip(*product(*map(range, self.axes.values())), strict=True)
        return tuple(
            name
            for name, digit in zip(self.axes, digits, strict=True)
            if any(digit[rank] != digit[group[0]] for group in members for rank in group)
        )


def program_of(compiled: object, mesh: object = None) -> Program:
    """Make a `Program` from the arguments of `report`.

    Raises:
        TypeError: `compiled` is not a program, or `mesh` is not a mesh.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"overlap: mesh must be a jax.sharding.Mesh, got {mesh!r}")
    if isinstance(compiled, Program):
        program = compiled
    elif isinstance(compiled, str):
        program = Program(compiled)
    elif isinstance(compiled, Compiled):
        program = _from_compiled(compiled)
        mesh = mesh or mesh_of(_shardings(compiled))
    else:
        raise TypeError(
            f"overlap: compiled must be what jax.jit(f).lower(...).compile() returns, or its text, "
            f"got {type(compiled).__module__}.{type(compiled).__name__}"
        )
    if mesh is None:
        return program
    kind = mesh.devices.flat[0].device_kind
    return replace(program, network=network(mesh.devices.flat), kind=kind, axes=mesh.shape)


def _from_compiled(compiled: Compiled) -> Program:
    """The text and the sizes of a compiled program."""
    memory = compiled.memory_analysis()
    platforms = {
        device.platform for sharding in _shardings(compiled) for device in sharding.device_set
    }
    return Program(
        compiled.as_text() or "",
        temporaries=getattr(memory, "temp_size_in_bytes", None),
        program_bytes=getattr(memory, "generated_code_size_in_bytes", None) or None,
        versions=versions(platforms),
    )


def versions(platforms: Iterable[str]) -> dict[str, str]:
    """The versions of the installed packages that compile for platforms ("cpu", "tpu", "gpu").

    jaxlib has the compiler for CPUs, libtpu the one for TPUs, a plugin the one for GPUs.
    """
    needed = ["jax", "jaxlib"]
    for platform in platforms:
        needed += _COMPILERS.get(platform, ())
    installed = {}
    for package in metadata.distributions():
        plain = (package.name or "").lower().replace("_", "-")
        if any(fnmatchcase(plain, pattern) for pattern in needed):
            installed[package.name] = package.version
    return dict(sorted(installed.items()))


#: Names of packages that contain a compiler; `*` stands for a version of CUDA or ROCm.
_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda*", "jax-rocm*")}


def _shardings(compiled: Compiled) -> list[Any]:
    """The shardings of a program's operands and results."""
    try:
        return tree.leaves((compiled.input_shardings, compiled.output_shardings))
    except ValueError:  # JAX does not know those of results beside a `jax.Ref`
        return tree.leaves(compiled.input_shardings)


def mesh_of(shardings: Iterable[Any]) -> Mesh | None:
    """The mesh of some shardings; None if they do not name one."""
    for sharding in shardings:
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def read_profile(directory: Path) -> dict[str, int]:
    """The cycles of a static profile, by name of instruction."""
    cycles = {}
    for path in sorted(directory.iterdir()):
        text = path.read_text(encoding="utf-8", errors="replace")
        name = re.search(r'hlo_op_name: "(.*)"', text)
        count = re.search(r"estimated_cycles: (\d+)", text)
        if name and count:
            cycles[name[1]] = int(count[1])
    return cycles
