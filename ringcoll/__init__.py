"""Collective algorithms for JAX, written by hand: executed, proved, priced, measured.

Run these lines before the examples in docstrings. Set `JAX_NUM_CPU_DEVICES=4` if you have fewer
than four devices.

>>> from functools import partial
>>> import jax
>>> import jax.numpy as jnp
>>> from jax.sharding import AxisType, PartitionSpec as P
>>> import ringcoll
>>> from ringcoll import algorithms, costs, draw, formats, layers, learn, overlap
>>> from ringcoll.layers import fsdp, tensor_parallel as tp
>>> mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])
>>> def ranks(f, in_specs=P("x"), out_specs=P("x")):
...     return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

`ranks` runs a function on the four shards of its operands.
"""

from typing import TYPE_CHECKING

from ringcoll import algorithms, costs, lax, transform
from ringcoll import xla_cpu as xla_cpu
from ringcoll.choose.table import Table
from ringcoll.collectives.all_gather import all_gather, psum_scatter
from ringcoll.collectives.all_reduce import pmax, pmean, pmin, psum
from ringcoll.collectives.all_to_all import all_to_all, pswapaxes
from ringcoll.collectives.broadcast import pbroadcast
from ringcoll.collectives.choice import algorithm
from ringcoll.collectives.gathering import (
    all_gather_map,
    gather,
    map_reduce_scatter,
    reduce,
    tour,
)
from ringcoll.collectives.permute import ppermute, pshuffle
from ringcoll.collectives.ragged_all_to_all import ragged_all_to_all
from ringcoll.collectives.sums import Tree
from ringcoll.collectives.visits import Rows, per_shard
from ringcoll.costs.wire import Wire
from ringcoll.ipython import load_ipython_extension as load_ipython_extension
from ringcoll.ipython import register as _register
from ringcoll.matmuls.all_reduce import matmul_all_reduce
from ringcoll.matmuls.functions import (
    all_gather_einsum,
    all_gather_matmul,
    einsum_reduce_scatter,
    matmul_reduce_scatter,
)
from ringcoll.matmuls.options import GatherOptions, MatmulOptions
from ringcoll.matmuls.sharded import sharded_matmul
from ringcoll.placement.meshes import describe, mesh
from ringcoll.schedules.schedule import AllToAllSchedule, Move, Schedule, ScheduleError, SizeError
from ringcoll.transform import overlapped, replaced

__version__ = "0.1.0"  # `pyproject.toml` reads it here
__all__ = [
    "AllToAllSchedule",
    "GatherOptions",
    "MatmulOptions",
    "Move",
    "Rows",
    "Schedule",
    "ScheduleError",
    "SizeError",
    "Table",
    "Tree",
    "Wire",
    "algorithm",
    "algorithms",
    "all_gather",
    "all_gather_einsum",
    "all_gather_map",
    "all_gather_matmul",
    "all_to_all",
    "costs",
    "debug",
    "describe",
    "draw",
    "einsum_reduce_scatter",
    "explain",
    "formats",
    "gather",
    "lax",
    "layers",
    "learn",
    "map_reduce_scatter",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "mesh",
    "overlap",
    "overlapped",
    "pbroadcast",
    "per_shard",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "ragged_all_to_all",
    "reduce",
    "replaced",
    "sharded_matmul",
    "tour",
    "transform",
]

_register()

if TYPE_CHECKING:
    from ringcoll import debug, draw, formats, layers, learn, overlap
    from ringcoll.debug.explaining import explain
else:

    def __getattr__(name: str) -> object:
        from importlib import import_module  # here, so that editors do not complete it

        if name == "explain":
            return import_module("ringcoll.debug.explaining").explain
        if name in __all__:  # a room that is imported when it is asked for
            return import_module(f"ringcoll.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
