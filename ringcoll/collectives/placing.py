"""How collectives place shards that arrive, and slice shards to send, while a schedule runs."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
from jax import Array

from ringcoll.runtime import run
from ringcoll.runtime.hop import Ranks, as_bits
from ringcoll.runtime.parts import Layout, Part, shares
from ringcoll.runtime.scopes import scope
from ringcoll.runtime.slicing import (
    concatenated,
    dynamic_slice,
    dynamic_update_slice,
)
from ringcoll.runtime.value_types import empty, sharded_dims
from ringcoll.runtime.wire import Wire
from ringcoll.schedules.registry import Stages
from ringcoll.schedules.schedule import Schedule


@functools.lru_cache(maxsize=1024)
def _layout(aval: jax.core.ShapedArray, dim: int, size: int, lanes: int) -> Layout:
    """The layout of shards along `dim` of `aval`, which has one shard, or those of all ranks."""
    shape = [size if d == dim else length for d, length in enumerate(aval.shape)]
    # Cutting a dimension that is sharded over a different axis moves data. Avoid it if possible.
    free = [d for d in range(len(shape)) if d not in sharded_dims(aval)] or range(len(shape))
    cut = max(free, key=lambda d: shape[d])
    return Layout(dim, size, cut, shares(shape[cut], lanes))


#: Floats of these widths are written as integers: XLA:CPU would convert the whole buffer for every
#: shard. (Other floats are written as floats, which saves the copy of a bitcast.)
WRITTEN_AS_BITS = (8,) if jax.__version_info__ >= (0, 12) else (8, 16)


def gather_along(
    x: Array, dim: int, schedule: Schedule, ranks: Ranks, wire: Wire | None = None
) -> Array:
    """All-gather: a gather that puts every part that arrives in its place."""
    bits, back = as_bits(x, WRITTEN_AS_BITS, is_placed=True)
    layout = _layout(jax.typeof(x), dim, x.shape[dim], schedule.lanes)
    shape = [s * schedule.size if d == dim else s for d, s in enumerate(x.shape)]
    out = empty(shape, bits, ranks.axes, bits)
    sent = x if wire else bits
    visit = partial(placed, layout)
    return back(run.gather(schedule, ranks, layout, sent, visit, out, wire=wire))


def placed(layout: Layout, out: Array, parts: list[Part]) -> Array:
    """A visit that puts every part in its place in an array of all shards."""
    for part in parts:
        value = as_bits(part.value, WRITTEN_AS_BITS)[0]
        start = layout.start(part, out)
        out = dynamic_update_slice(out, value, start, allow_negative_indices=False)
    return out


def reduce_along(
    x: Array,
    dim: int,
    schedule: Schedule,
    ranks: Ranks,
    combine: run.Combine,
    wire: Wire | None = None,
) -> Array:
    """Reduce-scatter: a reduce whose contributions are slices of the operand."""
    layout = _layout(jax.typeof(x), dim, x.shape[dim] // schedule.size, schedule.lanes)

    def slices(parts: Sequence[Part]) -> list[Array]:
        found, shape = [], list(x.shape)
        shape[dim] = layout.size
        for part in parts:
            shape[layout.cut] = part.rows[1]
            start = layout.start(part, x)
            found.append(dynamic_slice(x, start, shape, allow_negative_indices=False))
        return found

    mine = run.reduce(schedule, replace(ranks, wire=wire), layout, slices, combine)
    return concatenated(mine, layout.cut)


def by_stages(
    x: Array,
    stages: Stages,
    ranks: Ranks,
    combined: Callable[[Sequence[Array]], Array],
    wire: Wire | None = None,
) -> Array:
    """All-reduce of whole vectors: each stage gathers along a part of the ranks, and combines.

    Every rank has their vectors `combined` in the order of the ranks, so all get the same bits.
    """
    for number, stage in enumerate(stages, 1):
        inner = math.prod(later.size for later in stages[number:])
        part = replace(ranks, shape=stage.shape, inner=inner)
        with scope(f"stage {number}"):
            gathered = gather_along(x[None], 0, stage, part, wire)
        x = combined([gathered[i] for i in range(stage.size)])
    return x
