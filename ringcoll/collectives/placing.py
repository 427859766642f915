"""How collectives place shards that arrive, and slice shards to send, while the engine runs."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array

from ringcoll.runtime import engine
from ringcoll.runtime.contributions import Shard, Slot
from ringcoll.runtime.hop import Ranks, as_bits
from ringcoll.runtime.scopes import scope
from ringcoll.runtime.slicing import (
    concatenated,
    dynamic_slice,
    dynamic_slice_in_dim,
    dynamic_update_slice,
    share,
    start_of,
)
from ringcoll.runtime.value_types import empty, sharded_dims
from ringcoll.runtime.wire import Wire, encoded_once
from ringcoll.schedules.registry import Stages
from ringcoll.schedules.schedule import Schedule


class _Cut(NamedTuple):
    """How lanes divide a shard along `dim`: the shapes and the starts of the shares."""

    dim: int
    starts: list[int]
    shapes: list[tuple[int, ...]]

    def start(self, whole: Array, dim: int, size: int, share: Slot | Shard) -> list[Any]:
        """Where a share starts in `whole`, an array of all shards, each of `size` along `dim`."""
        lo = self.starts[share.lane]
        first = lo if dim == self.dim else 0
        # All starts are of one dtype, so it depends on lo too.
        at = start_of(share.origin, size, first, max(whole.shape[dim], lo))
        start: list[Any] = [at.dtype.type(0)] * whole.ndim
        start[self.dim] = at.dtype.type(lo)
        start[dim] = at
        return start


@functools.lru_cache(maxsize=1024)
def _cut(aval: jax.core.ShapedArray, shape: tuple[int, ...], lanes: int) -> _Cut:
    """How lanes divide a shard of `shape`, of an operand of type `aval`."""
    # Cutting a dimension that is sharded over a different axis moves data. Avoid it if possible.
    free = [d for d in range(len(shape)) if d not in sharded_dims(aval)] or range(len(shape))
    dim = max(free, key=lambda d: shape[d])
    shares = [share(shape[dim], lanes, lane) for lane in range(lanes)]
    starts, sizes = zip(*shares, strict=True)
    return _Cut(dim, [*starts], [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes])


#: Floats of these widths are written as integers: XLA:CPU would convert the whole buffer for every
#: shard. (Other floats are written as floats, which saves the copy of a bitcast.)
WRITTEN_AS_BITS = (8,) if jax.__version_info__ >= (0, 12) else (8, 16)


def gather_along(
    x: Array, dim: int, schedule: Schedule, ranks: Ranks, wire: Wire | None = None
) -> Array:
    """All-gather: every shard that arrives is put in its place."""
    bits, back = as_bits(x, WRITTEN_AS_BITS, is_placed=True)
    cut = _cut(jax.typeof(x), x.shape, schedule.lanes)

    def visit(out: Array, shards: list[Shard]) -> Array:
        for shard in shards:
            start = cut.start(out, dim, x.shape[dim], shard)
            value = as_bits(shard.value, WRITTEN_AS_BITS)[0]
            out = dynamic_update_slice(out, value, start, allow_negative_indices=False)
        return out

    sent = x if wire else bits
    own = [
        dynamic_slice_in_dim(sent, lo, shape[cut.dim], cut.dim)
        for lo, shape in zip(cut.starts, cut.shapes, strict=True)
    ]
    shape = [s * schedule.size if d == dim else s for d, s in enumerate(x.shape)]
    out = empty(shape, bits, ranks.axes)
    of_rounds: tuple[Any, Any] = encoded_once(wire, own, visit) if wire else (own, visit)
    return back(engine.gather(schedule, ranks, *of_rounds, out))


def reduce_along(
    x: Array,
    dim: int,
    schedule: Schedule,
    ranks: Ranks,
    combine: engine.Combine,
    wire: Wire | None = None,
) -> Array:
    """Reduce-scatter: every contribution is a slice of the operand."""
    shape = tuple(s // schedule.size if d == dim else s for d, s in enumerate(x.shape))
    cut = _cut(jax.typeof(x), shape, schedule.lanes)

    def slices(slots: Sequence[Slot]) -> list[Array]:
        sliced = partial(dynamic_slice, x, allow_negative_indices=False)
        return [
            sliced(cut.start(x, dim, shape[dim], slot), cut.shapes[slot.lane]) for slot in slots
        ]

    mine = engine.reduce(schedule, replace(ranks, wire=wire), slices, combine)
    return concatenated(mine, cut.dim)


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
