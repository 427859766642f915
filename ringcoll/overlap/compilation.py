"""Compile for a machine that need not be here; for a TPU also get a profile of the code.

The compiler writes a profile if an option is set before it starts. A profile takes as long as ten
compilations, and for some programs the compiler aborts. So a separate process makes the profile.
It gets the program by `jax.export`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax import export, tree
from jax.sharding import Mesh

from ringcoll.overlap.options import in_words, refused
from ringcoll.overlap.program import Program, meshes_of, program_of, read_profile, shardings
from ringcoll.placement.topology import devices

#: Seconds after which `compile_for` stops waiting for a profile.
PATIENCE = 900


def compile_for(
    topology: str,
    function: Callable,
    *operands: Any,
    profile: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Program:
    """Compile a function for a topology.

    Args:
        topology: the topology of the program's mesh, such as "v5e:4x2" or "h200:8".
        function: a function, jitted or not.
        operands: `jax.ShapeDtypeStruct`s with a `NamedSharding` on `ringcoll.mesh(topology)`; or
            without, if a `shard_map` of the function names that mesh and no axis is explicit.
        profile: whether to get the static profile too, in a separate process (slow; needs the
            package flatbuffers of the extra tpu). If that fails, as it does for GPUs, the report
            says so below its first line, and uses the compiler's estimates.
        compiler_options: as `jax.jit` takes them, such as `overlap.OPTIONS["sparse cores"]`. The
            report names them below its first line, a published set by its name.

    Returns:
        A program for `report` and `assert_overlapped`.

    Raises:
        ModuleNotFoundError: the compiler is not installed; see `topology.devices`.
        ValueError: the compiler refuses an option; the program names no mesh; the mesh has a
            device that the topology does not have; or the function returns no array.
        Exception: whatever JAX or the compiler raises.

    >>> chips = ringcoll.mesh("v5e:2x2")
    >>> x = jax.ShapeDtypeStruct((4, 128), "float32", sharding=jax.NamedSharding(chips, P("x")))
    >>> program = overlap.compile_for("v5e:2x2", lambda x: x.sum(0), x)
    >>> [row.kind for row in overlap.report(program).rows]
    ['all-reduce']
    >>> options = overlap.OPTIONS["collective matmuls"]
    >>> program = overlap.compile_for("v5e:2x2", lambda x: x.sum(0), x, compiler_options=options)
    >>> overlap.report(program).notes
    ('compiled with collective matmuls',)
    """
    call = f"compile_for({topology!r}, {getattr(function, '__name__', function)})"
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    options = dict(compiler_options or {})
    lowered = jitted.lower(*operands)
    if not tree.leaves(lowered.out_info):
        raise ValueError(
            f"{call}: it returns no array, so nothing is compiled; return what it computes"
        )
    available = devices(topology)
    try:
        compiled = lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if words := refused(options, str(error), available[0].platform):
            raise ValueError(f"{call}: {words}") from error
        raise
    mesh = next(iter(meshes_of(shardings(compiled))), None)  # a `shard_map` may be what names it
    if mesh is None:
        raise ValueError(
            f"{call}: no operand is sharded over a mesh, and no shard_map names one; give "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(ringcoll.mesh(topology), "
            "spec))"
        )
    known = {*map(_identity, available)}
    for device in mesh.devices.flat:
        if _identity(device) not in known:
            raise ValueError(
                f"{call}: it is for {device} ({device.device_kind}), which is not one of "
                f"the {len(available)} devices of {topology} ({available[0].device_kind}); "
                f"shard operands over ringcoll.mesh({topology!r})"
            )
    program = program_of(compiled, lowered=lowered.as_text())
    if options:
        named = ", ".join(in_words(options, available[0].device_kind))
        program = replace(program, notes=(f"compiled with {named}",))
    if not profile:
        return program
    try:
        if len({*mesh.axis_types}) > 1:  # else the export cannot be written: results are undecided
            jitted = jax.jit(jitted, out_shardings=compiled.output_shardings)
        return _with_profile(program, topology, mesh, jitted, operands, options)
    except Exception as error:
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        return replace(program, notes=(*program.notes, f"no static profile: {first}"))


def _identity(device: Any) -> tuple[Any, ...]:
    """What tells a device from others: equal devices of two calls of `devices` are not equal."""
    return device.device_kind, device.id, *getattr(device, "coords", ())


def _with_profile(
    program: Program,
    topology: str,
    mesh: Mesh,
    jitted: Any,
    operands: tuple[Any, ...],
    options: dict[str, Any],
) -> Program:
    """The program with the profile that a separate process makes."""
    exported = export.export(jitted, platforms=["tpu"])(*operands)
    number = {device.id: i for i, device in enumerate(devices(topology))}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "profile").mkdir()
        (folder / "exported").write_bytes(exported.serialize())
        request = {
            "topology": topology,
            "order": [number[device.id] for device in mesh.devices.flat],
            "shape": mesh.devices.shape,
            "axes": mesh.axis_names,
            "types": [kind.name for kind in mesh.axis_types],
            "options": options,
        }
        (folder / "request").write_text(json.dumps(request), encoding="utf-8")
        flag = f"--xla_jf_dump_static_llo_profile_to={folder / 'profile'}"
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flag}".strip(),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        done = subprocess.run(
            [sys.executable, "-m", "ringcoll.overlap.child", str(folder)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        if done.returncode != 0:
            last = (done.stderr.strip() or "no message").splitlines()[-1][:200]
            raise RuntimeError(f"the compiler ended with status {done.returncode}: {last}")
        outcome = json.loads((folder / "program").read_text(encoding="utf-8"))
        cycles = read_profile(folder / "profile")
    if not cycles:
        raise RuntimeError("the compiler wrote no profile")
    return replace(program, **outcome, profile=cycles)
