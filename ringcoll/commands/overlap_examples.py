"""Example programs: an all-gather or a reduce-scatter with a matmul, in several forms."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll import matmuls
from ringcoll.collectives.axes import AxisName
from ringcoll.collectives.permute import ppermute
from ringcoll.runtime.value_types import device_kind

#: A function on a mesh, and its operands as shapes.
Example = tuple[Callable, tuple[Any, ...]]
#: m, k and f of one layer; the layer after it has k and f swapped.
SIZES = (8192, 8192, 28672)


def all_gather_then_matmul(x: Array, w: Array, axes: AxisName = "x") -> Array:
    """x: [m/n, k], w: [k, f/n] -> [m, f/n]: all of the gather, then one matmul."""
    return lax.all_gather(x, axes, tiled=True) @ w


def ring_matmul(x: Array, w: Array, axes: AxisName = "x") -> Array:
    """x: [m/n, k], w: [k, f/n] -> [m, f/n]: each shard is multiplied while the next one arrives."""
    n, rank = lax.axis_size(axes), lax.axis_index(axes)
    rows = x.shape[0]
    out = lax.pcast(jnp.zeros((n * rows, w.shape[1]), x.dtype), axes, to="varying")
    for step in range(n):
        shard = x
        if step < n - 1:  # send before the matmul
            x = ppermute(x, axes, [(r, (r + 1) % n) for r in range(n)])
        out = lax.dynamic_update_slice(out, shard @ w, ((rank - step) % n * rows, 0))
    return out


def all_gather_matmul(x: Array, w: Array, axes: AxisName = "x") -> Array:
    """The same by `ringcoll.all_gather_matmul`."""
    return matmuls.all_gather_matmul(x, w, axes, algorithm=_overlapping())


def matmul_then_psum_scatter(x: Array, w: Array, axes: AxisName = "x") -> Array:
    """x: [m, f/n], w: [f/n, k] -> [m/n, k]: one matmul, then all of the reduce-scatter."""
    return lax.psum_scatter(x @ w, axes, tiled=True)


def matmul_reduce_scatter(x: Array, w: Array, axes: AxisName = "x") -> Array:
    """The same by `ringcoll.matmul_reduce_scatter`."""
    return matmuls.matmul_reduce_scatter(x, w, axes, algorithm=_overlapping())


def _overlapping() -> str:
    """The algorithm that overlaps: "auto"; on GPUs "ring", as "auto" takes the built-in there."""
    return "ring" if (device_kind() or "").startswith("NVIDIA") else "auto"


_GATHERS = all_gather_then_matmul, ring_matmul, all_gather_matmul
_SCATTERS = matmul_then_psum_scatter, matmul_reduce_scatter
_FORMS = {form.__name__: form for form in (*_GATHERS, *_SCATTERS)}
NAMES = tuple(_FORMS)
#: The form without overlap of each example that overlaps.
PLAIN = {
    "ring_matmul": "all_gather_then_matmul",
    "all_gather_matmul": "all_gather_then_matmul",
    "matmul_reduce_scatter": "matmul_then_psum_scatter",
}


def example(name: str, mesh: Mesh, sizes: tuple[int, int, int]) -> Example:
    """An example on a mesh, over all of its axes.

    Args:
        name: one of `NAMES`.
        mesh: where it runs.
        sizes: m, k and f, each a multiple of the number of ranks.

    Returns:
        A function and its operands in bf16, as `compile_for` takes them.
    """
    axes = mesh.axis_names if len(mesh.axis_names) > 1 else mesh.axis_names[0]
    (m, k, f), function = sizes, _FORMS[name]
    rows, columns = P(axes, None), P(None, axes)
    if function in _GATHERS:
        shapes, specs, out = ((m, k), (k, f)), (rows, columns), columns
    else:
        shapes, specs, out = ((m, f), (f, k)), (columns, rows), rows
    operands = tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )
    named = wraps(function)(partial(function, axes=axes))
    return jax.shard_map(named, mesh=mesh, in_specs=specs, out_specs=out), operands
