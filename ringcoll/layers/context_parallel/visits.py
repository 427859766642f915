"""What a rank does with a shard of keys and values: which tiles it computes, in blocks of rows."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.choose.table import Algorithm
from ringcoll.collectives.visits import Rounds, Rows
from ringcoll.layers.context_parallel import softmax
from ringcoll.layers.context_parallel.tiles import Mask, TilePlan, rows_together
from ringcoll.runtime.value_types import varying_like


@dataclass(frozen=True)
class AttentionOptions:
    """How attention runs.

    Attributes:
        axes: the axes over which keys and values travel.
        algorithm: the algorithm of the gather.
        mask: which keys a query sees.
        layout, sizes, exchanged: which positions a rank has: see `plan`.
        scale: the scale of the scores.
        kernel: computes a whole part of the scores; None for tiles.
    """

    axes: tuple[Hashable, ...]
    algorithm: Algorithm
    mask: Mask
    layout: str
    sizes: tuple[int, ...]
    exchanged: tuple[int, ...]
    scale: float
    kernel: softmax.AttentionKernel | None


@dataclass(frozen=True)
class Visits:
    """What all visits of one call share. A visit computes the tiles of one shard.

    Attributes:
        options: see `AttentionOptions`.
        plan: the tiles of every rank.
        ids: `[ranks, batch, s]`, the segments of all ranks; None if there are none.
        sizes: the widths of keys and of values: d, dv.
        groups: the number of rows of a sequence.
        heads: the number of heads of a row.
    """

    options: AttentionOptions
    plan: TilePlan
    ids: Array | None
    sizes: tuple[int, int]
    groups: int
    heads: int

    def rounds(self, name: str) -> Rounds:
        """The rounds that bring keys and values; with a window only those that some rank needs."""
        return Rounds(
            name=name,
            axes=self.options.axes,
            algorithm=self.options.algorithm,
            dim=0,
            needed=None if self.options.mask.window is None else self.plan.needed,
        )

    def me(self) -> Array:
        """The number of this rank."""
        return self.rounds("attention").ranks().number()

    def is_needed(self, part: Rows) -> bool:
        """Whether some rank computes a tile of a shard."""
        return not self.plan.needed.isdisjoint(part.offsets[0]) or 0 in part.offsets[0]

    def over_tiles(
        self, shard: Rows, by_query: Sequence[Array], state: Any, body: Callable[..., Any]
    ) -> Any:
        """`state = body(state, (i, j), queries, (k, v), visible)` for each tile of a shard.

        The tile starts at query i and key j; `queries` has its part of each array of `by_query`.
        Blocks of the shard's rows share tiles: the state of a block is small enough for the fast
        memory of a TPU, where the tiles add to it.
        """
        (start, count), side = shard.rows[0], self.plan.tile
        own = [lax.slice_in_dim(x, start, start + count) for x in by_query]

        def block(state: Any, first: Any, rows_of: Callable[[Array], Array]) -> Any:
            arrays, kv = [rows_of(x) for x in own], rows_of(shard.value)

            def tile(state: Any, at: tuple[Array, Array], seen: Any) -> Any:
                queries = [lax.dynamic_slice_in_dim(x, at[0], side, 2) for x in arrays]
                both = lax.dynamic_slice_in_dim(kv, at[1], side, 1)
                part = both[..., : self.sizes[0]], both[..., self.sizes[0] :]
                return body(state, at, queries, part, seen)

            rows = start + first + jnp.arange(len(kv), dtype=jnp.int32)
            return self.tiled(shard, rows, tile, state)

        is_whole = self.options.kernel or not count
        together = count if is_whole else rows_together(count, self.heads, side)
        if together == count:
            return block(state, 0, lambda x: x)

        def next_block(state: Any, first: Array) -> tuple[Any, None]:
            def rows_of(x: Array) -> Array:
                return lax.dynamic_slice_in_dim(x, first, together)

            updated = block(jax.tree.map(rows_of, state), first, rows_of)
            put = partial(lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
            return jax.tree.map(put, state, updated), None

        return lax.scan(next_block, state, jnp.arange(0, count, together, dtype=jnp.int32))[0]

    def tiled(self, shard: Rows, rows: Any, body: Callable[..., Any], state: Any) -> Any:
        """`state = body(state, (i, j), visible)` for each tile of a shard that this rank computes.

        `visible` is None if all keys are seen; for a kernel it is a `BlockMask`. `rows` are the
        numbers of the rows.
        """
        me = self.me()
        for masked, (table, counts, which) in self.plan.tiles(shard.offsets[0]).items():
            number = jnp.asarray(which)[me, shard.origins[0]] if len(table) > 1 else 0
            some = len(set(counts.tolist())) > 1
            mine = jnp.asarray(counts)[number] if some else None

            def step(state: Any, job: Any, masked: bool = masked, mine: Any = mine) -> Any:
                turn, (i, j) = job

                def compute(state: Any) -> Any:
                    at = i * self.plan.tile, j * self.plan.tile
                    return body(state, at, self.visible(shard.origins[0], at, rows, masked))

                if mine is None:
                    return compute(state), None
                return lax.cond(turn < mine, compute, lambda state: state, state), None

            jobs = jnp.arange(table.shape[1], dtype=jnp.int32), jnp.asarray(table)[number]
            state, _ = lax.scan(step, state, jobs)
        return state

    def visible(
        self, origin: Array, at: tuple[Array, Array], rows: Any, masked: bool
    ) -> Array | softmax.BlockMask | None:
        """Which keys of a tile each query sees: `[rows or 1, 1, queries, keys]`; None for all."""
        tile, limits = self.plan.tile, self.options.mask
        causal, window = limits.causal, limits.window
        me, (i, j) = self.me(), at
        positions = segments = None
        if masked:
            held = jnp.asarray(self.plan.positions)
            query = lax.dynamic_slice(held, (me, i), (1, tile))[0]
            key = lax.dynamic_slice(held, (origin, j), (1, tile))[0]
            positions = query, key
        if self.ids is not None:
            size, zero = (1, self.ids.shape[1], tile), np.int32(0)
            query = lax.dynamic_slice(self.ids, (me, zero, i), size)[0][rows // self.groups]
            key = lax.dynamic_slice(self.ids, (origin, zero, j), size)[0][rows // self.groups]
            segments = query, key
        if positions is None and segments is None:
            return None
        mask = softmax.BlockMask(causal and masked, window if masked else None, positions, segments)
        return mask if self.options.kernel else mask.visible()[:, None]

    def attend(self, q: Array, state: softmax.Softmax, shard: Rows) -> softmax.Softmax:
        """The softmax with keys and values added to it, for the queries of the same rows."""
        (start, count), window = shard.rows[0], self.options.mask.window
        is_striped = self.options.layout == "striped"
        takes_mask = is_striped or self.ids is not None or window is not None

        def body(state: Any, at: Any, queries: Any, part: Any, seen: Any) -> softmax.Softmax:
            (q,), (k, v) = queries, part
            before = (lax.dynamic_slice_in_dim(x, at[0], self.plan.tile, 2) for x in state)
            if (kernel := self.options.kernel) is None:
                scores = softmax.scores_of(q, k, self.options.scale)
                after = softmax.add_scores(softmax.Softmax(*before), scores, v, seen)
            else:
                masking = {"mask": seen} if takes_mask else {"causal": seen is not None}
                alone = softmax.by_kernel(kernel, q, k, v, masking)
                after = softmax.merge(softmax.Softmax(*before), alone)
            put = partial(lax.dynamic_update_slice_in_dim, start_index=at[0], axis=2)
            return jax.tree.map(put, state, after)

        of_shard = jax.tree.map(lambda x: lax.slice_in_dim(x, start, start + count), state)
        after = self.over_tiles(shard, [q], of_shard, body)
        return jax.tree.map(partial(_with_rows, start=start), state, after)

    def differentiate(
        self, by_query: Sequence[Array], dq: Array, shard: Rows
    ) -> tuple[Array, Array]:
        """Add a shard to the gradient of the queries; also the gradient of its keys and values.

        `by_query` is as for `softmax.gradients`.
        """
        start, count = shard.rows[0]

        def body(state: Any, at: Any, queries: Any, part: Any, seen: Any) -> tuple[Array, Array]:
            of_q, of_kv = softmax.gradients(queries, part, seen, self.options.scale)
            return _add_at(state[0], of_q, at[0], 2), _add_at(state[1], of_kv, at[1], 1)

        zeros = varying_like(jnp.zeros(shard.value.shape, dq.dtype), dq)
        so_far = lax.slice_in_dim(dq, start, start + count)
        added, dkv = self.over_tiles(shard, by_query, (so_far, zeros), body)
        return _with_rows(dq, added, start), dkv


def _add_at(whole: Array, x: Array, at: Array, dim: int) -> Array:
    """`whole` with x added to its slice at this place."""
    old = lax.dynamic_slice_in_dim(whole, at, x.shape[dim], dim)
    return lax.dynamic_update_slice_in_dim(whole, old + x, at, dim)


def _with_rows(x: Array, rows: Array, start: int) -> Array:
    """x with some of its rows replaced."""
    return rows if len(rows) == len(x) else lax.dynamic_update_slice_in_dim(x, rows, start, 0)
