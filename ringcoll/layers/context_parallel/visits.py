"""What a rank does with a shard of keys and values: its tiles, forward and backward."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.choose.table import Algorithm
from ringcoll.collectives.visits import Rounds, Rows
from ringcoll.layers.context_parallel.tiles import Mask, TilePlan, rows_together
from ringcoll.runtime.value_types import varying_like

#: (q, k, v, causal=) or (q, k, v, mask=) -> (out, lse), for `[b, s, heads, d]` and log-sum-exps
#: `[b, s, heads]`.
AttentionKernel = Callable[..., tuple[Array, Array]]


class BlockMask(NamedTuple):
    """Which keys of a block a kernel's queries see.

    Attributes:
        causal, window: as for `attention`; they compare positions.
        positions: the positions of the queries and of the keys, `[s]` each; None if only segments
            decide.
        segments: the segments of the queries and of the keys, `[b, s]` each; None if none.
    """

    causal: bool
    window: int | None
    positions: tuple[Array, Array] | None
    segments: tuple[Array, Array] | None

    def visible(self) -> Array:
        """Whether each query sees each key: `[b or 1, queries, keys]`."""
        query, key = self.positions or (jnp.zeros(1, jnp.int32),) * 2
        seen = Mask(self.causal, self.window).visible(query[:, None], key[None, :])[None]
        if self.segments is None:
            return seen
        query, key = self.segments
        return seen & (query[:, :, None] == key[:, None, :])


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
    kernel: AttentionKernel | None


class Softmax(NamedTuple):
    """An unfinished softmax, by row, head and query: largest score, sum, weighted sum of values."""

    greatest: Array
    total: Array
    values: Array


def wide(dtype: Any) -> Any:
    """The dtype of sums: float32, or a wider one."""
    return jnp.promote_types(dtype, jnp.float32)


def add_at(whole: Array, x: Array, at: Array, dim: int) -> Array:
    """`whole` with x added to its slice at this place."""
    old = lax.dynamic_slice_in_dim(whole, at, x.shape[dim], dim)
    return lax.dynamic_update_slice_in_dim(whole, old + x, at, dim)


def add_scores(before: Softmax, scores: Array, v: Array, seen: Array | None) -> Softmax:
    """A softmax with the scores of a tile added to it."""
    if seen is not None:
        scores = jnp.where(seen, scores, lowest(scores.dtype))
    greatest = jnp.maximum(before.greatest, scores.max(-1))
    p = jnp.exp(scores - greatest[..., None])
    if seen is not None:  # otherwise a query that has seen nothing yet would see everything
        p = jnp.where(seen, p, 0)
    rescale = jnp.exp(before.greatest - greatest)
    values = jnp.einsum("bgqk,bkd->bgqd", p.astype(v.dtype), v, preferred_element_type=scores.dtype)
    return Softmax(
        greatest, rescale * before.total + p.sum(-1), rescale[..., None] * before.values + values
    )


def merge(a: Softmax, b: Softmax) -> Softmax:
    """The softmax of the keys of both."""
    greatest = jnp.maximum(a.greatest, b.greatest)
    of_a, of_b = jnp.exp(a.greatest - greatest), jnp.exp(b.greatest - greatest)
    values = of_a[..., None] * a.values + of_b[..., None] * b.values
    return Softmax(greatest, of_a * a.total + of_b * b.total, values)


def lowest(dtype: Any) -> float:
    """A number below every score. It is not -inf, because -inf minus -inf is not a number."""
    return float(jnp.finfo(dtype).min) / 2


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

    def by_rows(
        self, function: Callable[[Any, Any, Callable[[Array], Array]], Any], state: Any
    ) -> Any:
        """`function(first row, state, rows of)` for blocks of rows, which share tiles.

        `rows of` is a function that takes the block's rows of an array. The state of a block is
        small enough for the fast memory of a TPU, where the tiles add to it.
        """
        count = jax.tree.leaves(state)[0].shape[0]
        is_whole = self.options.kernel or not count
        together = count if is_whole else rows_together(count, self.heads, self.plan.tile)
        if together == count:
            return function(0, state, lambda x: x)

        def block(state: Any, first: Array) -> tuple[Any, None]:
            def rows_of(x: Array) -> Array:
                return lax.dynamic_slice_in_dim(x, first, together)

            updated = function(first, jax.tree.map(rows_of, state), rows_of)
            put = partial(lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
            return jax.tree.map(put, state, updated), None

        return lax.scan(block, state, jnp.arange(0, count, together, dtype=jnp.int32))[0]

    def tiled(self, shard: Rows, rows: Any, body: Callable[..., Any], state: Any) -> Any:
        """`state = body(state, i, j, visible)` for each tile of a shard that this rank computes.

        The tile starts at query i and key j. `visible` is None if all keys are seen; for a kernel
        it is a `BlockMask`. `rows` are the numbers of the rows.
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
                    return body(state, *at, self.visible(shard.origins[0], at, rows, masked))

                if mine is None:
                    return compute(state), None
                return lax.cond(turn < mine, compute, lambda state: state, state), None

            jobs = jnp.arange(table.shape[1], dtype=jnp.int32), jnp.asarray(table)[number]
            state, _ = lax.scan(step, state, jobs)
        return state

    def visible(
        self, origin: Array, at: tuple[Array, Array], rows: Any, masked: bool
    ) -> Array | BlockMask | None:
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
        mask = BlockMask(causal and masked, window if masked else None, positions, segments)
        return mask if self.options.kernel else mask.visible()[:, None]

    def scores(self, q: Array, k: Array) -> Array:
        """The scaled scores of a tile, in the dtype of sums."""
        exact = wide(q.dtype)
        return self.options.scale * jnp.einsum("bgqd,bkd->bgqk", q, k, preferred_element_type=exact)

    def part(self, kv: Array, j: Array) -> tuple[Array, Array]:
        """The keys and values of a tile."""
        both = lax.dynamic_slice_in_dim(kv, j, self.plan.tile, 1)
        return both[..., : self.sizes[0]], both[..., self.sizes[0] :]

    def attend(self, q: Array, state: Softmax, shard: Rows) -> Softmax:
        """The softmax with keys and values added to it, for the queries of the same rows."""
        tile, (start, count) = self.plan.tile, shard.rows[0]
        own = lax.slice_in_dim(q, start, start + count)

        def of_rows(first: Any, state: Softmax, rows_of: Callable[[Array], Array]) -> Softmax:
            queries, kv = rows_of(own), rows_of(shard.value)

            def body(state: Softmax, i: Array, j: Array, seen: Any) -> Softmax:
                some = lax.dynamic_slice_in_dim(queries, i, tile, 2)
                before = Softmax(*(lax.dynamic_slice_in_dim(x, i, tile, 2) for x in state))
                k, v = self.part(kv, j)
                if self.options.kernel is None:
                    after = add_scores(before, self.scores(some, k), v, seen)
                else:
                    after = merge(before, self.by_kernel(some, k, v, seen))
                pairs = zip(state, after, strict=True)
                return Softmax(*(lax.dynamic_update_slice_in_dim(x, y, i, 2) for x, y in pairs))

            rows = start + first + jnp.arange(queries.shape[0], dtype=jnp.int32)
            return self.tiled(shard, rows, body, state)

        of_shard = jax.tree.map(lambda x: lax.slice_in_dim(x, start, start + count), state)
        after = self.by_rows(of_rows, of_shard)
        return jax.tree.map(partial(_with_rows, start=start), state, after)

    def by_kernel(self, q: Array, k: Array, v: Array, mask: BlockMask | None) -> Softmax:
        """The softmax of one part, computed by the caller's kernel."""
        assert self.options.kernel is not None
        queries = q.transpose(0, 2, 1, 3)
        window, layout = self.options.mask.window, self.options.layout
        takes_mask = self.ids is not None or window is not None or layout == "striped"
        masking = {"mask": mask} if takes_mask else {"causal": mask is not None}
        out, lse = self.options.kernel(queries, k[:, :, None], v[:, :, None], **masking)
        exact = wide(q.dtype)
        lse = lse.astype(exact).transpose(0, 2, 1)
        values = out.astype(exact).transpose(0, 2, 1, 3)
        if not takes_mask:
            return Softmax(lse, jnp.ones_like(lse), values)
        # In a masked block, a query may see no key. Written so that a NaN stays a NaN.
        sees = ~(lse <= lowest(exact))
        values = jnp.where(sees[..., None], values, 0)
        return Softmax(jnp.where(sees, lse, lowest(exact)), sees.astype(exact), values)

    def differentiate(
        self, by_query: Sequence[Array], dq: Array, shard: Rows
    ) -> tuple[Array, Array]:
        """Add a shard to the gradient of the queries; also the gradient of its keys and values.

        `by_query` has the queries, the cotangent of the result, its log-sum-exps, and the sum over
        each row of result times cotangent.
        """
        tile, exact, (start, count) = self.plan.tile, dq.dtype, shard.rows[0]
        *of_shard, so_far = (lax.slice_in_dim(x, start, start + count) for x in (*by_query, dq))

        def of_rows(first: Any, state: Any, rows_of: Callable[[Array], Array]) -> Any:
            block, kv = [rows_of(x) for x in of_shard], rows_of(shard.value)

            def body(state: Any, i: Array, j: Array, seen: Array | None) -> Any:
                dq, dkv = state
                q, ct, lse, inner = (lax.dynamic_slice_in_dim(x, i, tile, 2) for x in block)
                k, v = self.part(kv, j)
                p = jnp.exp(self.scores(q, k) - lse[..., None])
                p = p if seen is None else jnp.where(seen, p, 0)
                dp = jnp.einsum("bgqd,bkd->bgqk", ct, v, preferred_element_type=exact)
                ds = (self.options.scale * p * (dp - inner[..., None])).astype(q.dtype)
                p = p.astype(q.dtype)
                of_q = jnp.einsum("bgqk,bkd->bgqd", ds, k, preferred_element_type=exact)
                of_k = jnp.einsum("bgqk,bgqd->bkd", ds, q, preferred_element_type=exact)
                of_v = jnp.einsum("bgqk,bgqd->bkd", p, ct, preferred_element_type=exact)
                both = jnp.concatenate([of_k, of_v], -1)
                return add_at(dq, of_q, i, 2), add_at(dkv, both, j, 1)

            rows = start + first + jnp.arange(kv.shape[0], dtype=jnp.int32)
            return self.tiled(shard, rows, body, state)

        zeros = varying_like(jnp.zeros(shard.value.shape, exact), dq)
        added, dkv = self.by_rows(of_rows, (so_far, zeros))
        return _with_rows(dq, added, start), dkv


def _with_rows(x: Array, rows: Array, start: int) -> Array:
    """x with some of its rows replaced."""
    return rows if len(rows) == len(x) else lax.dynamic_update_slice_in_dim(x, rows, start, 0)
