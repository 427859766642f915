"""A compiled program as a report needs it: its text, its sizes, the places of its ranks."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import metadata
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from jax import tree
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

from ringcoll.overlap.dumps import read_dump
from ringcoll.overlap.hlo import meshes_in
from ringcoll.placement.network import Network
from ringcoll.placement.topology import network


@dataclass(frozen=True)
class Program:
    """A compiled program.

    kind is the `device.device_kind`; temporaries and program_bytes are bytes, None if unknown;
    profile is cycles by name of instruction; notes stand in the first lines of the report; versions
    are those of the packages that compiled it; meshes are those that it is known to use, each as
    the sizes of its axes by name: "" is no name, and "axis_0" the partitioner's. JAX orders the
    devices of all of them alike.
    """

    text: str
    kind: str | None = None
    network: Network | None = None
    temporaries: int | None = None
    program_bytes: int | None = None
    profile: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    meshes: tuple[Mapping[str, int], ...] = ()

    def axes_along(self, members: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """The axes along which ranks of one group differ, of the mesh that fits the groups best."""
        named = (mesh for mesh in self.meshes if not {"", "axis_0"} & mesh.keys())
        along = (axes_along(mesh, members) for mesh in named)
        fewest = min(along, key=lambda axes: prod(axes.values()), default=dict[str, int]())
        return tuple(fewest)


def axes_along(mesh: Mapping[str, int], members: Sequence[Sequence[int]]) -> dict[str, int]:
    """The axes of a mesh along which ranks of one group differ, and their sizes."""
    digits = zip(*product(*map(range, mesh.values())), strict=True)
    return {
        name: size
        for (name, size), digit in zip(mesh.items(), digits, strict=True)
        if any(digit[rank] != digit[group[0]] for group in members for rank in group)
    }


def program_of(compiled: object, mesh: object = None, lowered: str = "") -> Program:
    """Make a `Program` from the arguments of `report`; `lowered` is the text before compilation.

    Raises:
        HloError, OSError: as `read_dump`.
        TypeError: `compiled` is not a program, or `mesh` is not a mesh.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"overlap: mesh must be a jax.sharding.Mesh, got {mesh!r}")
    meshes = [mesh] if mesh is not None else []
    if isinstance(compiled, Lowered):
        lowered, compiled = compiled.as_text(), compiled.compile()
    elif isinstance(compiled, str) and os.path.exists(compiled):
        compiled = Path(compiled)
    if isinstance(compiled, os.PathLike):
        text, notes = read_dump(Path(compiled))
        program = Program(text, notes=notes)
    elif isinstance(compiled, Program):
        program = compiled
    elif isinstance(compiled, str):
        program = Program(compiled)
    elif isinstance(compiled, Compiled):
        program = _from_compiled(compiled)
        meshes += meshes_of(shardings(compiled))
    else:
        raise TypeError(
            "overlap: compiled must be what jax.jit(f).lower(...).compile() returns, its text, or "
            f"a path of it, got {type(compiled).__module__}.{type(compiled).__name__}"
        )
    known = [*(one.shape for one in meshes), *program.meshes, *meshes_in(lowered)]
    program = replace(program, meshes=tuple(known))
    if not meshes:
        return program
    devices = meshes[0].devices.flat
    return replace(program, network=network(devices), kind=devices[0].device_kind)


def _from_compiled(compiled: Compiled) -> Program:
    """The text and the sizes of a compiled program."""
    memory = compiled.memory_analysis()
    platforms = {
        device.platform for sharding in shardings(compiled) for device in sharding.device_set
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


def shardings(compiled: Compiled) -> list[Any]:
    """The shardings of a program's results and operands; a `shard_map` has shaped the results."""
    try:
        return tree.leaves((compiled.output_shardings, compiled.input_shardings))
    except ValueError:  # JAX does not know those of results beside a `jax.Ref`
        return tree.leaves(compiled.input_shardings)


def meshes_of(shardings: Iterable[Any]) -> list[Mesh]:
    """The meshes that some shardings name."""
    named = (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))
    return [*dict.fromkeys(mesh for mesh in named if isinstance(mesh, Mesh))]


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
