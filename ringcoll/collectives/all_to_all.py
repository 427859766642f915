"""All-to-all: the exchange of blocks between ranks, and of the mapped axis with a dimension."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ringcoll.choose.table import Algorithm
from ringcoll.collectives.axes import AxisName, Groups, as_tuples, axes_of
from ringcoll.collectives.by_schedule import ScheduledCollective
from ringcoll.collectives.front_door import Pytree, bind_leaves
from ringcoll.collectives.placing import WRITTEN_AS_BITS, placed
from ringcoll.collectives.public import public
from ringcoll.collectives.sums import Exchanged, WireLike, sums_of
from ringcoll.runtime import run
from ringcoll.runtime.hop import Ranks, as_bits, moved
from ringcoll.runtime.parts import Layout, shares
from ringcoll.runtime.slicing import dynamic_slice_in_dim, start_of
from ringcoll.runtime.value_types import empty, sharded_dims
from ringcoll.schedules.schedule import AllToAllSchedule


@dataclass(frozen=True, kw_only=True)
class AllToAll(ScheduledCollective, name="all_to_all"):
    """`dims` are the dimension that is split, and the dimension along which blocks are joined."""

    collective = "all_to_all"

    def by_lax(self, x: Array) -> Array:
        split, concat = self.dims
        return lax.all_to_all(
            x, self.axes, split, concat, axis_index_groups=self.groups, tiled=self.tiled
        )

    def builtin(self, x: Array, platform: str) -> Array:
        return moved(self, x, platform)

    def __call__(self, *xs: Array) -> list[Array]:
        if self.tiled:
            return super().__call__(*xs)
        split, concat = self.dims
        if split == concat:  # blocks have size 1 there already
            n = len(self.groups[0]) if self.groups else lax.axis_size(self.axes)
            if any(x.shape[split] != n for x in xs):
                raise ValueError(f"dimension {split} is not {n}, the number of ranks")
            return replace(self, tiled=True)(*xs)
        concat += split < concat  # lax counts `concat` without the split dimension
        split += concat <= split
        exchange = replace(self, dims=(split, concat), tiled=True)
        return [y.squeeze(split) for y in exchange(*(jnp.expand_dims(x, concat) for x in xs))]

    def run(self, x: Array, schedule: AllToAllSchedule, ranks: Ranks) -> Array:
        split, concat = self.dims
        if not {split, concat}.isdisjoint(sharded_dims(x)):  # blocks may not be divisible
            return self.by_lax(x)
        bits, back = as_bits(x, WRITTEN_AS_BITS, is_placed=True)
        sent = x if self.sums.wire else bits
        size, blocks = x.shape[split] // schedule.size, []
        for d in range(schedule.size):
            start = start_of(ranks.origin(d, forward=True), size, 0, x.shape[split])
            block = dynamic_slice_in_dim(sent, start, size, split, allow_negative_indices=False)
            blocks.append(block)
        shape = [size if d == split else s for d, s in enumerate(x.shape)]
        layout = Layout(concat, shape[concat], concat, shares(shape[concat], 1))
        shape[concat] *= schedule.size
        out, visit = empty(shape, bits, ranks.axes, bits), partial(placed, layout)
        wire = self.sums.wire
        return back(run.exchange(schedule, ranks, layout, blocks, visit, out, wire=wire))

    def by_owners(self, x: Array, ranks: Ranks, sums: Exchanged) -> Array:
        split, concat = self.dims
        return sums.exchange(x, split, concat, ranks)

    def transpose(self, cts: Sequence[Array]) -> list[Array]:
        return replace(self, dims=self.dims[::-1])(*cts)


@public()
def all_to_all(
    x: Pytree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    algorithm: Algorithm = "auto",
    wire: WireLike | None = None,
) -> Pytree:
    """Block j of rank r's x along `split_axis` becomes block r of rank j's result.

    `x: [n, a, b] -> [n, a, b]` for split and concat 0; tiled `[n a, b] -> [a, n b]` for
    split 0 and concat 1.

    "pairwise" sends n-1 rounds of s/n bytes, which is the minimum. "bruck" sends ceil(log2
    n) rounds of about s/2 bytes.

    With a `wire` each block is encoded once, by the rank that has it, also the block that it keeps.

    Gradient: the all-to-all with the two axes swapped, by the same wire.

    Raises:
        ValueError: a dimension is out of bounds; it is not n or, tiled, not a multiple of n.

    Source: Bruck et al., IEEE Trans. Parallel Distrib. Syst. 8 (1997).

    n, s, `algorithm` and what all of them raise: see `ringcoll.lax`.

    >>> swap = ranks(lambda x: ringcoll.all_to_all(x, "x", 0, 0, tiled=True, algorithm="bruck"))
    >>> print(swap(jnp.arange(16)))
    [ 0  4  8 12  1  5  9 13  2  6 10 14  3  7 11 15]
    """
    axes, groups = axes_of(axis_name), as_tuples(axis_index_groups)
    options: Any = {"tiled": tiled, "algorithm": algorithm, "sums": sums_of(wire=wire)}
    dims = [("split_axis", split_axis), ("concat_axis", concat_axis)]
    return bind_leaves(x, axis_name, AllToAll(axes=axes, groups=groups, **options), dims)


@public()
def pswapaxes(
    x: Pytree,
    axis_name: AxisName,
    axis: int,
    *,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
) -> Pytree:
    """Exchange the mapped axis with the dimension `axis`, which has size n.

    `x: [n, a] -> [n, a]` for axis 0: an `all_to_all` that splits and stacks there.

    Steps and bytes, gradient, raises, source: as `all_to_all`.

    n, s, `algorithm` and what all of them raise: see `ringcoll.lax`.

    >>> swap = ranks(lambda x: ringcoll.pswapaxes(x, "x", 0, algorithm="pairwise"))
    >>> print(swap(jnp.arange(16)))
    [ 0  4  8 12  1  5  9 13  2  6 10 14  3  7 11 15]
    """
    axes, groups = axes_of(axis_name), as_tuples(axis_index_groups)
    options: Any = {"tiled": False, "algorithm": algorithm, "called": "pswapaxes"}
    exchange = AllToAll(axes=axes, groups=groups, **options)
    return bind_leaves(x, axis_name, exchange, [("axis", axis)] * 2)
