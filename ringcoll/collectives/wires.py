"""Check the `wire=` of a public call: its value, and the operands that it can encode."""

from collections.abc import Sequence
from typing import Any

import jax

from ringcoll.costs.wire import FLOATS
from ringcoll.costs.wire import Wire as Wire
from ringcoll.runtime.value_types import sharded_dims

#: A wire as a caller gives it: a `Wire`, or the dtype of its codes.
WireLike = str | Wire


def as_wire(wire: Any) -> Wire:
    """The `Wire` that a caller means.

    Raises:
        TypeError: it is not a wire.
        ValueError: there are no such codes.
    """
    if isinstance(wire, str):
        wire = Wire(wire)
    if not isinstance(wire, Wire):
        raise TypeError(f"wire={wire!r} is not a wire; pass 'int8', or a ringcoll.Wire")
    return wire


def check_operands(leaves: Sequence[Any], lax_only: Sequence[bool]) -> None:
    """Refuse operands that a wire cannot encode, or that only lax can handle.

    Raises:
        TypeError: an operand does not have floats of 2 or 4 bytes.
        ValueError: an operand is sharded over an axis of the caller, or only lax can do the call.
    """
    for leaf, is_lax_only in zip(leaves, lax_only, strict=True):
        aval = jax.typeof(leaf)
        if aval.dtype.name not in FLOATS:
            raise TypeError(
                f"wire: an operand of {aval.dtype.name} is not encoded, only {', '.join(FLOATS)} "
                "are; leave wire out for it, or cast it"
            )
        if is_lax_only and isinstance(leaf, jax.core.Tracer):
            raise ValueError(
                "wire: jax.lax alone can do this call, and it has no wire; leave wire out, or see "
                "`ringcoll.lax` for the calls that are lax's"
            )
        if sharded_dims(aval) or not isinstance(aval.size, int):
            raise ValueError(
                f"wire: an operand of type {aval} has dimensions that are sharded over an explicit "
                "axis, or symbolic; leave wire out, or make the axis manual in jax.shard_map"
            )
