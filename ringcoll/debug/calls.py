"""Describe a program before it runs, in lines: its environment, arguments and collectives."""

import os
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import keystr, tree_leaves_with_path

from ringcoll.choose.table import LAX
from ringcoll.collectives.by_schedule import ScheduledCollective, built, name_of
from ringcoll.debug import program
from ringcoll.runtime.hosts import Where
from ringcoll.runtime.primitive import Collective
from ringcoll.runtime.value_types import type_in_words

#: Options of JAX that change the compiled program.
_OPTIONS = (
    *("default_prng_impl", "threefry_partitionable", "random_seed_offset", "enable_x64"),
    *("default_matmul_precision", "numpy_dtype_promotion", "use_shardy_partitioner"),
    *("cpu_collectives_implementation", "optimization_level", "memory_fitting_level"),
)
#: Environment variables that hold flags of the compiler.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
#: Flags that may differ between processes: they do not change the program.
_OWN_FLAGS = ("--xla_dump_", "--xla_force_host_platform_device_count")
#: Primitives that name axes of the mesh but send nothing.
_SILENT = ("axis_index", "pvary", "pcast")
#: Parameters that hold the axes of a collective.
_AXES = ("axes", "axis_name")
#: Parameters that the list at the end of a line leaves out; some have their own place in the line.
_LEFT_OUT = (*_AXES, "axis_size", "algorithm", "is_hop")


def environment() -> list[str]:
    """Lines that must be equal on all processes for their programs to be equal."""
    sources = sorted(_sources(files("ringcoll")))
    options = [f"{name}={getattr(jax.config, f'jax_{name}', None)}" for name in _OPTIONS]

    def flags(name: str) -> str:
        set_flags = os.environ.get(name, "").split()
        return " ".join(flag for flag in set_flags if not flag.startswith(_OWN_FLAGS))

    return [
        f"jax {jax.__version__}, ringcoll of sources {_digest(repr(sources))}",
        f"{jax.process_count()} processes, {jax.device_count()} devices",
        f"options of JAX: {', '.join(options)}",
        *(f"{name}: {flags(name)}" for name in _FLAGS),
        f"the mesh that is set: {program.text(jax.sharding.get_mesh())}",
    ]


def _sources(folder: Traversable, place: str = "") -> Iterator[tuple[str, str]]:
    """The name and the text of every module in a folder."""
    for each in folder.iterdir():
        if each.is_dir():
            yield from _sources(each, f"{place}{each.name}/")
        elif each.name.endswith(".py"):
            yield place + each.name, each.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Description:
    """A function call as lines of text."""

    calls: list[str]
    arguments: list[str]
    program: list[str]


def described(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Description:
    """Describe a call: its collectives, its arguments, and its equations."""
    traced = (fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)).trace(*args, **kwargs)
    leaves = tree_leaves_with_path((args, kwargs))
    results = tree_leaves_with_path(traced.out_info)
    return Description(
        calls=list(_calls(traced.jaxpr.jaxpr, (), {}, jax.default_backend())),
        arguments=[f"argument {keystr(path)}: {_given(leaf)}" for path, leaf in leaves],
        program=[
            f"donated: {program.text(traced.donate_argnums)}",
            *(
                f"result {keystr(at)}: {type_in_words(x)} as {program.text(x.sharding)}"
                for at, x in results
            ),
            *program.lines(traced.jaxpr),
        ],
    )


def _calls(
    jaxpr: Any,
    place: tuple[str, ...],
    sizes: Mapping[Hashable, int],
    platform: str,
    devices: Mesh | None = None,
) -> Iterator[str]:
    """The collectives of a jaxpr and of the jaxprs inside it, in lines.

    `place` names what is around the jaxpr: scopes, loops and branches.
    """
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
    """The mesh of the devices that a program runs on; for an abstract mesh, the mesh that is set.

    None if no mesh is set.
    """
    placed = mesh if isinstance(mesh, Mesh) else jax.sharding.get_mesh()
    return None if placed.empty else placed


def _around(eqn: Any, number: int) -> tuple[str, ...]:
    """How to name an equation's inner jaxpr of this number, such as "branch 1 of a cond"."""
    name = eqn.primitive.name
    if name == "scan":
        return (f"a scan of length {eqn.params['length']}",)
    if name == "while":
        return (f"the {('condition', 'body')[number]} of a while",)
    return (f"branch {number} of a cond",) if name == "cond" else ()


def _words(eqn: Any, sizes: Mapping[Hashable, int], platform: str, devices: Mesh | None) -> str:
    """A collective in words; "" for any other equation."""
    name, params = eqn.primitive.name, dict(eqn.params)
    collective = params.get("collective")
    by = ""
    if isinstance(collective, Collective):
        axes: Any = collective.axes
        where = Where(platform, devices)
        by = _algorithm(collective, [v.aval for v in eqn.invars], sizes, where)
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
    rest = [f"{key}={value}" for key, value in sorted(params.items()) if key not in _LEFT_OUT]
    what = ", ".join([*(type_in_words(v.aval) for v in eqn.invars), *rest])
    return f"{name.replace('ringcoll_', '')} over {over}{by}: {what}"


def _algorithm(
    collective: Collective, avals: list[Any], sizes: Mapping[Hashable, int], where: Where
) -> str:
    """The algorithm in words, with a digest of its schedule; "auto" is resolved."""
    if not isinstance(collective, ScheduledCollective):
        return ""
    words = []

    def choose() -> None:
        chosen = collective.plan(avals, where).algorithm
        is_named = isinstance(chosen, str)
        words.append(f" by {chosen if is_named else name_of(chosen, collective.collective)}")
        if chosen != LAX:
            schedule, _ = built(collective.collective, chosen, collective.axes, collective.groups)
            words.append(f" (schedule {_digest(repr(schedule))})")

    # Trace it, so that the axes have the same sizes as in the program.
    jax.make_jaxpr(choose, axis_env=[(axis, sizes[axis]) for axis in collective.axes])()
    return "".join(words)


def _given(leaf: Any) -> str:
    """The type of an argument; the class, if it is not an array."""
    is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return type_in_words(leaf) + _sharding(leaf) if is_array else type(leaf).__qualname__


def _sharding(leaf: Any) -> str:
    """The sharding of an array of several processes; "" for a local array."""
    sharding = getattr(leaf, "sharding", None)
    is_abstract = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    if sharding is None or (not is_abstract and sharding.is_fully_addressable):
        return ""
    return f" as {program.text(sharding)}"


def _digest(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
