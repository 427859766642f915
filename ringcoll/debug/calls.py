"""What a program is about to do, in lines: whose, of what, and every collective in order."""

import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import fields, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from math import prod
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from ringcoll import algorithms
from ringcoll.primitive import Collective
from ringcoll.scheduled import Scheduled, name_of, ranks_of
from ringcoll.table import BUILT_INS, reducing_half

#: They name axes of the mesh and send nothing.
_SILENT = ("axis_index", "pvary", "pcast")
_AXES = ("axes", "axis_name")
#: What is said otherwise, or of nobody's concern.
_SAID = (*_AXES, "axis_size", "algorithm", "is_hop", "mesh")


def environment() -> list[str]:
    """What has to be the same everywhere before programs can be."""
    sources = sorted(_sources(files("ringcoll")))
    return [
        f"jax {jax.__version__}, ringcoll of sources {_digest(repr(sources))}",
        f"{jax.process_count()} processes, {jax.device_count()} devices",
    ]


def _sources(folder: Traversable, place: str = "") -> Iterator[tuple[str, str]]:
    """The name and the text of every module within."""
    for each in folder.iterdir():
        if each.is_dir():
            yield from _sources(each, f"{place}{each.name}/")
        elif each.name.endswith(".py"):
            yield place + each.name, each.read_text(encoding="utf-8")


def described(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
    """The arguments of a function that is about to be called, and its collectives; as lines."""
    program = jax.make_jaxpr(fn)(*args, **kwargs)
    leaves = [leaf for given in (args, kwargs) for leaf in tree_flatten_with_path(given)[0]]
    arguments = [
        f"argument {keystr(path)}: {_type(aval)}{_sharding(leaf)}"
        for (path, leaf), aval in zip(leaves, program.in_avals, strict=True)
    ]
    return arguments, list(_calls(program.jaxpr, (), {}, jax.default_backend()))


def _calls(
    jaxpr: Any,
    place: tuple[str, ...],
    sizes: Mapping[Hashable, int],
    platform: str,
    devices: Mesh | None = None,
) -> Iterator[str]:
    """Those of a jaxpr at a place of the program, and of the jaxprs within."""
    for eqn in jaxpr.eqns:
        scope = str(eqn.source_info.name_stack)
        here = (*place, scope) if scope else place
        if words := _words(eqn, sizes, platform, devices):
            yield words + "".join(f", in {name}" for name in reversed(here))
        inner = list(jaxprs_in_params(eqn.params))
        mesh = eqn.params.get("mesh")
        within = {**sizes, **(mesh.shape if mesh else {})}
        known = _devices(mesh) if mesh else devices
        on = known.devices.flat[0].platform if known else platform
        for number, each in enumerate(inner):
            outer = _around(eqn, number)
            yield from _calls(getattr(each, "jaxpr", each), (*here, *outer), within, on, known)


def _devices(mesh: Mesh | AbstractMesh) -> Mesh | None:
    """Those that a program is lowered for: the mesh that is set fills in what has names alone."""
    placed = mesh if isinstance(mesh, Mesh) else jax.sharding.get_mesh()
    return None if placed.empty else placed


def _around(eqn: Any, number: int) -> tuple[str, ...]:
    """What is to be said of the jaxpr of this number within."""
    name = eqn.primitive.name
    if name == "scan":
        return (f"a scan of length {eqn.params['length']}",)
    if name == "while":
        return (f"the {('condition', 'body')[number]} of a while",)
    return (f"branch {number} of a cond",) if name == "cond" else ()


def _words(eqn: Any, sizes: Mapping[Hashable, int], platform: str, devices: Mesh | None) -> str:
    """A collective in words; of what is none, nothing."""
    name, params = eqn.primitive.name, dict(eqn.params)
    collective = params.get("collective")
    by = ""
    if isinstance(collective, Collective):
        collective = replace(collective, mesh=devices)
        axes: Any = collective.axes
        by = _algorithm(collective, [v.aval for v in eqn.invars], sizes, platform)
        params = {f.name: (getattr(collective, f.name), f.default) for f in fields(collective)}
        params = {key: value for key, (value, default) in params.items() if value != default}
    else:
        axes = next((params[key] for key in _AXES if key in params), ())
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        if name in _SILENT or not any(isinstance(axis, str) for axis in axes):
            return ""
        params = {key: value for key, value in params.items() if value not in (None, ())}
        name = f"lax.{name}"
    over = ", ".join(f"{axis}={sizes.get(axis, '?')}" for axis in axes)
    rest = [f"{key}={value}" for key, value in sorted(params.items()) if key not in _SAID]
    what = ", ".join([*(_type(v.aval) for v in eqn.invars), *rest])
    return f"{name.replace('ringcoll_', '')} over {over}{by}: {what}"


def _algorithm(
    collective: Collective, avals: list[Any], sizes: Mapping[Hashable, int], platform: str
) -> str:
    """By which algorithm, and a digest of the schedule that it makes; "auto" is resolved."""
    if not isinstance(collective, Scheduled):
        return ""
    said = []

    def choose() -> None:
        nbytes = sum(prod(x.shape) * x.dtype.itemsize for x in avals)
        chosen = collective.chosen(nbytes, avals[0].dtype, platform)
        said.append(f" by {name_of(chosen)}")
        half = reducing_half(chosen) if isinstance(chosen, str) else chosen
        if half not in BUILT_INS:
            ranks = ranks_of(half, collective.axes, collective.groups)
            made = algorithms.build(collective.collective, half, ranks.shape)
            said.append(f" (schedule {_digest(repr(made))})")

    # Where the axes have sizes, as they will have when it is lowered.
    jax.make_jaxpr(choose, axis_env=[(axis, sizes[axis]) for axis in collective.axes])()
    return "".join(said)


def _type(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _sharding(leaf: Any) -> str:
    """Over what an argument is sharded that belongs to several processes."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return ""
    mesh = ", ".join(f"{axis}={size}" for axis, size in sharding.mesh.shape.items())
    devices = [device.id for device in sharding.mesh.devices.flat]
    order = devices if len(devices) <= 16 else f"of digest {_digest(repr(devices))}"
    return f" as {sharding.spec} on {mesh}, devices {order}"


def _digest(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
