"""A cache of compiled programs: a program that is in the folder is not compiled again.

The key of a program is everything that it is compiled from: the program as JAX lowers it, the
compiler and its options, the topology and the order of its devices. So two different programs never
share an entry, and equal programs with different names are compiled once. The cache keeps no costs:
they are computed from the text each time.
"""

import gzip
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from ringcoll import overlap
from ringcoll.io.files import write
from ringcoll.overlap.program import program_of
from ringcoll.overlap.program import versions as installed
from ringcoll.placement.topology import network


def versions() -> dict[str, str]:
    """The versions of JAX and of the TPU compiler; "none" if the compiler is not installed."""
    found = installed(("tpu",))
    return {name: found.get(name, "none") for name in ("jax", "libtpu")}


def compiled(
    folder: str | None,
    topology: str,
    function: Callable,
    operands: tuple,
    options: Mapping[str, Any],
    profile: bool,
) -> tuple[overlap.Program, float]:
    """A program, and the seconds that it took to compile and, if asked, to profile.

    Args:
        folder: the folder in which programs are kept; None keeps none.
        topology, function, operands, options, profile: as for `overlap.compile_for`.
    """
    path = None
    if folder is not None:
        path = Path(folder) / f"{key(topology, function, operands, options, profile)}.json.gz"
        if path.exists():
            kept = json.loads(gzip.decompress(path.read_bytes()))
            program = overlap.Program(**kept["program"])
            return program_of(program, mesh=_mesh_of(operands)), kept["seconds"]
    start = time.perf_counter()
    program = overlap.compile_for(
        topology, function, *operands, compiler_options=options, profile=profile
    )
    seconds = time.perf_counter() - start
    # Without the profile that was asked for, do not keep it: the next try may get one.
    if path is not None and bool(program.profile) == profile:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The network is not kept, because the mesh gives it again.
        kept = {"program": asdict(replace(program, network=None)), "seconds": seconds}
        write(path, gzip.compress(json.dumps(kept).encode()))
    return program, seconds


def key(
    topology: str, function: Callable, operands: tuple, options: Mapping[str, Any], profile: bool
) -> str:
    """A digest of everything that a program is compiled from."""
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    mesh = _mesh_of(operands)
    flags = {name: os.environ.get(name, "") for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS")}
    compiler = {**installed(("tpu", "gpu")), **flags, **options}
    places = network(mesh.devices.flat)
    devices = [device.id for device in mesh.devices.flat], places and places.wrap
    of = [topology, devices, sorted(compiler.items()), profile, jitted.lower(*operands).as_text()]
    return hashlib.sha256(json.dumps(of, default=str).encode()).hexdigest()[:32]


def _mesh_of(operands: tuple) -> Any:
    """The mesh of operands."""
    return jax.tree.leaves(operands)[0].sharding.mesh
