"""Attention whose keys and values arrive round by round, and its gradients.

Forward, a gather brings keys and values; the visitor of a shard adds its scores to an online
softmax. Backward, they travel again, and their gradients travel after them: a tour (see
`ringcoll.schedules.tour`). So a rank holds its own shard, the shard that has just arrived, the one
that is on the wire, and its sums, whatever the number of ranks is.

Inside, heads of one group and the batch are rows: q: [rows, heads of a group, s, d],
keys and values end to end: [rows, s, d + dv]. The lanes of a schedule divide the rows.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.attention.tiles import Mask, Plan, plan, rows_together
from ringcoll.collectives.by_schedule import built, named
from ringcoll.collectives.table import LAX, Algorithm
from ringcoll.runtime import built_in, engine
from ringcoll.runtime.barriers import order_of_work
from ringcoll.runtime.contributions import Shard
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.slicing import Shares, concatenated
from ringcoll.runtime.value_types import varying
from ringcoll.schedules.schedule import Schedule
from ringcoll.schedules.tour import cut, tour

#: (q, k, v, causal=) -> (out, lse), for `[b, s, heads, d]` and log-sum-exps `[b, s, heads]`.
Kernel = Callable[..., tuple[Array, Array]]


@dataclass(frozen=True)
class Options:
    """How attention runs.

    Attributes:
        axes: those over which keys and values travel.
        algorithm: of the gather.
        mask: which keys a query sees.
        layout, sizes, exchanged: which positions a rank has: see `plan`.
        scale: of the scores.
        kernel: computes a whole part of the scores, or None.
    """

    axes: tuple[Hashable, ...]
    algorithm: Algorithm
    mask: Mask
    layout: str
    sizes: tuple[int, ...]
    exchanged: tuple[int, ...]
    scale: float
    kernel: Kernel | None


class Softmax(NamedTuple):
    """A softmax so far, by row, head and query: greatest score, sum, weighted sum of values."""

    greatest: Array
    total: Array
    values: Array


@dataclass(frozen=True)
class Work:
    """What the visits of one call share.

    Attributes:
        options: see there.
        plan: the tiles of every rank.
        schedule, ranks: of the gather, cut if no rank needs some shards.
        ids: `[ranks, batch, s]` of all ranks, or None.
        sizes: of the parts of keys and values: d, dv.
        groups: the rows of a sequence.
        heads: of a row.
    """

    options: Options
    plan: Plan
    schedule: Schedule
    ranks: Ranks
    ids: Array | None
    sizes: tuple[int, int]
    groups: int
    heads: int

    def shares(self, rows: int) -> list[tuple[int, int]]:
        """(start, count) of the rows of each lane."""
        shares = Shares(rows, self.schedule.lanes)
        return [shares.of(lane) for lane in range(self.schedule.lanes)]

    def by_rows(
        self, function: Callable[[Any, Any, Callable[[Array], Array]], Any], state: Any
    ) -> Any:
        """`function(first row, state, rows of)` for blocks of rows, which share tiles.

        The last argument takes the block's rows of an array. A block's state is small enough for
        the fast memory of a TPU, where the tiles add to it.
        """
        count = jax.tree.leaves(state)[0].shape[0]
        is_whole = self.options.kernel or not count
        together = count if is_whole else rows_together(count, self.heads, self.plan.tile)
        if together == count:
            return function(0, state, lambda x: x)

        def block(whole: Any, first: Array) -> tuple[Any, None]:
            def rows_of(x: Array) -> Array:
                return lax.dynamic_slice_in_dim(x, first, together)

            made = function(first, jax.tree.map(rows_of, whole), rows_of)
            put = partial(lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
            return jax.tree.map(put, whole, made), None

        return lax.scan(block, state, jnp.arange(0, count, together, dtype=jnp.int32))[0]

    def tiled(self, shard: Shard, rows: Any, body: Callable[..., Any], state: Any) -> Any:
        """`state = body(state, i, j, visible)` for each tile of a shard that this rank computes.

        i and j are where the tile starts among queries and keys; `visible` is None for all. `rows`
        are the numbers of the rows.
        """
        me = self.ranks.number()
        for masked, (table, counts, which) in self.plan.tiles(shard.offsets).items():
            number = jnp.asarray(which)[me, shard.origin] if len(table) > 1 else 0
            some = len(set(counts.tolist())) > 1
            mine = jnp.asarray(counts)[number] if some else None

            def step(state: Any, job: Any, masked: bool = masked, mine: Any = mine) -> Any:
                turn, (i, j) = job

                def compute(state: Any) -> Any:
                    at = i * self.plan.tile, j * self.plan.tile
                    return body(state, *at, self.visible(shard.origin, at, rows, masked))

                if mine is None:
                    return compute(state), None
                return lax.cond(turn < mine, compute, lambda state: state, state), None

            jobs = jnp.arange(table.shape[1], dtype=jnp.int32), jnp.asarray(table)[number]
            state, _ = lax.scan(step, state, jobs)
        return state

    def visible(
        self, origin: Array, at: tuple[Array, Array], rows: Any, masked: bool
    ) -> Array | None:
        """Which keys of a tile are seen: `[rows or 1, 1, queries, keys]`; None for all."""
        tile, seen = self.plan.tile, None
        me, (i, j) = self.ranks.number(), at
        if masked:
            held = jnp.asarray(self.plan.positions)
            query = lax.dynamic_slice(held, (me, i), (1, tile))[0]
            key = lax.dynamic_slice(held, (origin, j), (1, tile))[0]
            seen = self.options.mask.visible(query[:, None], key[None, :])[None, None]
        if self.ids is not None:
            size, zero = (1, self.ids.shape[1], tile), np.int32(0)
            query = lax.dynamic_slice(self.ids, (me, zero, i), size)[0][rows // self.groups]
            key = lax.dynamic_slice(self.ids, (origin, zero, j), size)[0][rows // self.groups]
            same = query[:, None, :, None] == key[:, None, None, :]
            seen = same if seen is None else seen & same
        return seen

    def scores(self, q: Array, k: Array) -> Array:
        """Of a tile, scaled, in the dtype of sums."""
        exact = wide(q.dtype)
        return self.options.scale * jnp.einsum("bgqd,bkd->bgqk", q, k, preferred_element_type=exact)

    def part(self, kv: Array, j: Array) -> tuple[Array, Array]:
        """The keys and values of a tile."""
        both = lax.dynamic_slice_in_dim(kv, j, self.plan.tile, 1)
        return both[..., : self.sizes[0]], both[..., self.sizes[0] :]

    def unpacked(self, shard: Shard) -> Shard:
        """A shard that has arrived, as rows."""
        length = self.plan.positions.shape[1]
        return shard._replace(value=shard.value.reshape(-1, length, sum(self.sizes)))

    def attended(self, q: Array, state: Softmax, shard: Shard, start: int) -> Softmax:
        """The softmax with a shard added to it; `start` is the first row of the lane."""
        tile = self.plan.tile

        def of_rows(first: Any, state: Softmax, rows_of: Callable[[Array], Array]) -> Softmax:
            queries, kv = rows_of(q), rows_of(shard.value)

            def body(state: Softmax, i: Array, j: Array, seen: Array | None) -> Softmax:
                some = lax.dynamic_slice_in_dim(queries, i, tile, 2)
                before = Softmax(*(lax.dynamic_slice_in_dim(x, i, tile, 2) for x in state))
                k, v = self.part(kv, j)
                if self.options.kernel is None:
                    after = added(before, self.scores(some, k), v, seen)
                else:
                    after = merged(before, self.by_kernel(some, k, v, seen is not None))
                pairs = zip(state, after, strict=True)
                return Softmax(*(lax.dynamic_update_slice_in_dim(x, y, i, 2) for x, y in pairs))

            rows = start + first + jnp.arange(queries.shape[0], dtype=jnp.int32)
            return self.tiled(shard, rows, body, state)

        return self.by_rows(of_rows, state)

    def by_kernel(self, q: Array, k: Array, v: Array, causal: bool) -> Softmax:
        """The softmax of one part, by the caller's kernel."""
        rows, heads, length, _ = q.shape
        assert self.options.kernel is not None
        queries = q.transpose(0, 2, 1, 3)
        out, lse = self.options.kernel(queries, k[:, :, None], v[:, :, None], causal=causal)
        exact = wide(q.dtype)
        lse = lse.astype(exact).transpose(0, 2, 1)
        values = out.astype(exact).transpose(0, 2, 1, 3)
        assert values.shape == (rows, heads, length, v.shape[-1])
        return Softmax(lse, jnp.ones_like(lse), values)

    def differentiated(
        self, given: tuple[Array, ...], dq: Array, shard: Shard, start: int
    ) -> tuple[Array, Array]:
        """The gradient of the queries with a shard added to it, and that of its keys and values.

        `given`: the queries, the cotangent of the result, its log-sum-exps, and by query the sum
        of the products of result and cotangent. `start` is the first row of the lane.
        """
        tile, exact = self.plan.tile, dq.dtype

        def of_rows(first: Any, state: Any, rows_of: Callable[[Array], Array]) -> Any:
            block, kv = [rows_of(x) for x in given], rows_of(shard.value)

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

        zeros = like(jnp.zeros(shard.value.shape, exact), dq)
        return self.by_rows(of_rows, (dq, zeros))


def packed(kv: Array) -> Array:
    """Rows of keys and values as they travel: `[rows, s, d + dv] -> [rows s, d + dv]`.

    A TPU compiler then puts the row first in memory, once, before the first hop. Of three
    dimensions it keeps the order that the caller's arrays have, where a tile of a row is not in one
    place. (Backward, either order is slower on some TPU, so there it is left to the compiler.)
    """
    return kv.reshape(-1, kv.shape[-1])


def wide(dtype: Any) -> Any:
    """The dtype of sums: float32, or a wider one."""
    return jnp.promote_types(dtype, jnp.float32)


def like(x: Array, typed: Array) -> Array:
    """x, typed as varying where another is."""
    return varying(x, tuple(jax.typeof(typed).mat.varying))


def add_at(whole: Array, x: Array, at: Array, dim: int) -> Array:
    """`whole` with x added to its slice at this place."""
    old = lax.dynamic_slice_in_dim(whole, at, x.shape[dim], dim)
    return lax.dynamic_update_slice_in_dim(whole, old + x, at, dim)


def added(before: Softmax, scores: Array, v: Array, seen: Array | None) -> Softmax:
    """A softmax with the scores of a tile added to it."""
    if seen is not None:
        scores = jnp.where(seen, scores, _lowest(scores.dtype))
    greatest = jnp.maximum(before.greatest, scores.max(-1))
    p = jnp.exp(scores - greatest[..., None])
    if seen is not None:  # else a query that sees nothing yet would see all
        p = jnp.where(seen, p, 0)
    kept = jnp.exp(before.greatest - greatest)
    values = jnp.einsum("bgqk,bkd->bgqd", p.astype(v.dtype), v, preferred_element_type=scores.dtype)
    return Softmax(
        greatest, kept * before.total + p.sum(-1), kept[..., None] * before.values + values
    )


def merged(a: Softmax, b: Softmax) -> Softmax:
    """The softmax of the keys of both."""
    greatest = jnp.maximum(a.greatest, b.greatest)
    of_a, of_b = jnp.exp(a.greatest - greatest), jnp.exp(b.greatest - greatest)
    values = of_a[..., None] * a.values + of_b[..., None] * b.values
    return Softmax(greatest, of_a * a.total + of_b * b.total, values)


def _lowest(dtype: Any) -> float:
    """Less than every score; not -inf, because the difference of two of them is no number."""
    return float(jnp.finfo(dtype).min) / 2


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(options: Options, q: Array, kv: Array, ids: Array | None) -> Array:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        options: see `Options`.
        q: `[batch, groups, heads of a group, s, d]`.
        kv: keys and values, `[batch, groups, s, d + dv]`.
        ids: `[ranks, batch, s]`, the segments of the positions of all ranks, or None.

    Returns:
        `[batch, groups, heads of a group, s, dv]`.
    """
    return _attend(options, q, kv, ids)[0]


def _attend(options: Options, q: Array, kv: Array, ids: Array | None) -> tuple[Array, Array]:
    work, by_rows, back = _prepared(options, q, kv, ids)
    q, kv = by_rows(q), by_rows(kv, 1)
    rows = work.shares(q.shape[0])
    queries = [q[start : start + count] for start, count in rows]
    state = []
    for x in queries:
        exact, shape = wide(x.dtype), x.shape[:-1]
        zeros = jnp.zeros(shape, exact), jnp.zeros((*shape, work.sizes[1]), exact)
        lowest = jnp.full(shape, _lowest(exact), exact)
        state.append(Softmax(*(like(y, x) for y in (lowest, *zeros))))

    def visit(state: list[Softmax], shards: Sequence[Shard]) -> list[Softmax]:
        state = list(state)
        for shard in shards:
            lane = shard.lane
            state[lane] = work.attended(queries[lane], state[lane], shard, rows[lane][0])
        return state

    def unpacked(state: list[Softmax], shards: Sequence[Shard]) -> list[Softmax]:
        return visit(state, [work.unpacked(shard) for shard in shards])

    with named("attention", options.algorithm, "all_gather"):
        if options.algorithm == LAX:
            for shard in _gathered(work, kv):
                state = visit(state, [shard])
        else:
            own, order = [packed(kv[a : a + count]) for a, count in rows], order_of_work()
            state = engine.gather(work.schedule, work.ranks, own, unpacked, state, order=order)
    total = [jnp.where(s.total > 0, s.total, 1) for s in state]
    outs = [s.values / t[..., None] for s, t in zip(state, total, strict=True)]
    lses = [s.greatest + jnp.log(t) for s, t in zip(state, total, strict=True)]
    return back(concatenated(outs, 0).astype(q.dtype)), back(concatenated(lses, 0))


def _gathered(work: Work, kv: Array) -> Iterator[Shard]:
    """The shards of all ranks, own first, after the built-in gather."""
    whole = built_in.all_gather(kv, work.options.axes, axis=0, tiled=False)
    for offset in (0, *sorted(work.plan.needed())):
        origin = work.ranks.origin(offset)
        yield Shard(lax.dynamic_index_in_dim(whole, origin, 0, False), origin, 0, (offset,))


def _prepared(options: Options, q: Array, kv: Array, ids: Array | None) -> Any:
    """The work, and two functions: operands by rows, filled up to whole tiles, and results back."""
    batch, groups, heads, length, d = q.shape
    name = "ring" if options.algorithm == LAX else options.algorithm
    schedule, ranks = built("all_gather", name, options.axes, None)
    if options.algorithm == LAX:
        schedule = replace(schedule, rounds=(), lanes=1)
    in_a_tile = 0 if options.kernel else heads
    together = prod(options.sizes[axis] for axis in options.exchanged)
    where = options.layout, length // together, options.sizes, options.exchanged
    made = plan(options.mask, *where, in_a_tile, ranks.shape)
    if options.mask.window is not None and options.algorithm != LAX:
        schedule = cut(schedule, made.needed())
    fill = made.positions.shape[1] - length

    def filled(x: Array, dim: int) -> Array:
        return jnp.pad(x, [(0, fill * (d == dim)) for d in range(x.ndim)]) if fill else x

    def by_rows(x: Array, dim: int = 2) -> Array:
        """An array that starts with batch and groups; `dim` is then that of its positions."""
        return filled(x.reshape(batch * groups, *x.shape[2:]), dim)

    def back(x: Array) -> Array:
        return x[:, :, :length].reshape(batch, groups, heads, length, *x.shape[3:])

    ids = None if ids is None else filled(ids, 2)
    work = Work(options, made, schedule, ranks, ids, (d, kv.shape[-1] - d), groups, heads)
    return work, by_rows, back


def _attend_forward(options, q, kv, ids):
    out, lse = _attend(options, q, kv, ids)
    return out, (q, kv, ids, out, lse)


def _attend_backward(options, residuals, ct):
    options = replace(options, kernel=None)  # of blocks too large for all of their gradients
    q, kv, ids, out, lse = residuals
    # Without it a compiler finds the messages of the forward pass again, and keeps all shards.
    kv, ct = lax.optimization_barrier((kv, ct))
    exact, length = wide(q.dtype), q.shape[3]
    inner = (out.astype(exact) * ct.astype(exact)).sum(-1)
    work, by_rows, back = _prepared(options, q, kv, ids)
    given = [by_rows(x) for x in (q, ct.astype(q.dtype), lse, inner)]
    kv_rows = by_rows(kv, 1)
    rows = work.shares(kv_rows.shape[0])
    of_lanes = [tuple(x[start : start + count] for x in given) for start, count in rows]
    dq = [like(jnp.zeros(x[0].shape, exact), x[0]) for x in of_lanes]

    def visit(dq: list[Array], shards: Sequence[Shard]) -> tuple[list[Array], list[Array]]:
        dq, made = list(dq), []
        for shard in shards:
            lane = shard.lane
            dq[lane], dkv = work.differentiated(of_lanes[lane], dq[lane], shard, rows[lane][0])
            made.append(dkv)
        return dq, made

    with named("attention_gradient", options.algorithm, "all_gather"):
        if options.algorithm == LAX:
            sums = like(jnp.zeros((work.ranks.size, *kv_rows.shape), exact), dq[0])
            for shard in _gathered(work, kv_rows):
                dq, (dkv,) = visit(dq, [shard])
                sums = lax.dynamic_update_index_in_dim(sums, dkv, shard.origin, 0)
            dkvs = [built_in.psum_scatter(sums, options.axes, scatter_dimension=0, tiled=False)]
        else:
            needed = None if options.mask.window is None else work.plan.needed()
            own = [kv_rows[start : start + count] for start, count in rows]
            path = tour(built("all_gather", options.algorithm, options.axes, None)[0], needed)
            dq, dkvs = engine.tour(path, work.ranks, own, visit, dq, order=order_of_work())
    dq_whole = back(concatenated(dq, 0)).astype(q.dtype)
    dkv_whole = concatenated(dkvs, 0)[:, :length].reshape(kv.shape).astype(kv.dtype)
    return dq_whole, dkv_whole, None


attend.defvjp(_attend_forward, _attend_backward)
