"""A traced program as lines of text, one for each equation. Equal programs give equal lines.

The text leaves out what differs between processes that run the same program: addresses, the
order of sets, and what a callback holds.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, slice)
_WRITTEN_OUT = 16  # more numbers than this are replaced by a digest


def lines(closed: Any) -> Iterator[str]:
    """The equations of a jaxpr, and indented those of jaxprs inside it. Variables are numbered."""
    jaxpr = getattr(closed, "jaxpr", closed)
    numbers: dict[Any, int] = {}

    def name(variable: Any) -> str:
        if isinstance(variable, Literal):
            return text(variable.val)
        return f"v{numbers.setdefault(variable, len(numbers))}"

    def typed(variables: Iterable[Any]) -> str:
        return ", ".join(f"{name(v)}: {v.aval}" for v in variables)

    yield f"given {typed(jaxpr.invars)}"
    for variable, value in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=False):
        yield f"{typed([variable])} = {text(value)}"
    for eqn in jaxpr.eqns:
        params = ", ".join(
            f"{key}={_held(value) if key == 'policy' else text(value)}"
            for key, value in sorted(eqn.params.items())
            if value is not None and not any(jaxprs_in_params({key: value}))
        )
        operands = ", ".join(map(name, eqn.invars))
        yield f"{typed(eqn.outvars)} = {eqn.primitive.name}[{params}] {operands}"
        for each in jaxprs_in_params(eqn.params):
            yield from (f"  {line}" for line in lines(each))
    yield f"returns {', '.join(map(name, jaxpr.outvars))}"


def text(value: Any) -> str:
    """A parameter of an equation, or a part of one, as text."""
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, _PLAIN):
        return repr(value)
    if hasattr(value, "eqns"):
        return f"{{{'; '.join(lines(value))}}}"
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, Mesh | AbstractMesh):
        return _mesh(value)
    if isinstance(value, Sharding):
        return _sharding(value)
    if isinstance(value, PartitionSpec):
        return f"P{text(tuple(value))}{_reduced(value)}"
    if isinstance(value, jax.Device):
        return _devices([value])
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{text(k)}: {text(v)}' for k, v in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(text, value)))}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(text, value))})"
    if hasattr(value, "tobytes") or isinstance(value, jax.Array):
        return _array(value)
    if is_dataclass(value):
        pairs = [(f.name, getattr(value, f.name), f.default) for f in fields(value)]
        changed = [f"{key}={text(own)}" for key, own, default in pairs if own is not default]
        return f"{type(value).__qualname__}({', '.join(changed)})"
    if isinstance(value, partial):
        return f"partial({text(value.func)}, {text(value.args)}, {text(value.keywords)})"
    if callable(value):
        return _function(value)
    return without_addresses(repr(value))


def without_addresses(words: str) -> str:
    """A text without the addresses of objects in this process."""
    return _ADDRESS.sub("", words)


def _array(value: Any) -> str:
    """An array: its numbers or their digest; only its type if other processes hold parts of it."""
    kind = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    sharding = getattr(value, "sharding", None)
    if sharding is not None and not sharding.is_fully_addressable:
        return f"{kind} {text(sharding)}"
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"{kind} {text(jax.random.key_data(value))}"
    own = np.asarray(value)
    if own.size <= _WRITTEN_OUT and own.dtype.kind in "biufc":
        return f"{kind} {own.tolist()}"
    return f"{kind} of digest {hashlib.sha256(own.tobytes()).hexdigest()[:16]}"


def _mesh(mesh: Mesh | AbstractMesh) -> str:
    axes = [
        f"{name}={size} {kind}"
        for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)
    ]
    if not axes:
        return "no mesh"
    on = f" on {_devices(list(mesh.devices.flat))}" if isinstance(mesh, Mesh) else ""
    return f"mesh({', '.join(axes)}){on}"


def _devices(devices: list[jax.Device]) -> str:
    """The ids of devices; if all are local, only their count, because local ids differ."""
    if {device.process_index for device in devices} == {jax.process_index()}:
        return f"{len(devices)} of its own devices"
    numbers = [device.id for device in devices]
    if len(numbers) <= _WRITTEN_OUT:
        return f"devices {numbers}"
    return f"devices of digest {hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]}"


def _sharding(sharding: Sharding) -> str:
    kind = "" if sharding.memory_kind is None else f" in {sharding.memory_kind}"
    if isinstance(sharding, NamedSharding):
        return f"{text(sharding.spec)} on {text(sharding.mesh)}{kind}"
    devices = _devices(sorted(sharding.device_set, key=lambda device: device.id))
    return f"{type(sharding).__name__} on {devices}{kind}"


def _reduced(spec: PartitionSpec) -> str:
    """The axes over which values, or their cotangents, are not yet summed, in words."""
    kinds = {name: getattr(spec, name, ()) for name in ("unreduced", "reduced")}
    return "".join(f" {name} {text(axes)}" for name, axes in kinds.items() if axes)


def _function(function: Callable[..., Any]) -> str:
    """The name of a function, without the values it holds, which may differ by process."""
    kind = type(function)
    return f"{getattr(function, '__module__', kind.__module__)}." + (
        getattr(function, "__qualname__", None) or kind.__qualname__
    )


def _held(policy: Any, around: tuple[Any, ...] = ()) -> str:
    """A policy of `jax.checkpoint`: its name and the values it holds, because many share a name."""
    if not callable(policy) or policy in around:
        return text(policy)
    if isinstance(policy, FunctionType):
        held = [cell.cell_contents for cell in policy.__closure__ or ()]
    else:
        held = list(getattr(policy, "__dict__", {}).values())
    return f"{_function(policy)}({', '.join(_held(each, (*around, policy)) for each in held)})"
