"""Attention whose keys and values arrive round by round, and its gradients.

Forward, a gather brings keys and values; each shard's scores are added to an online softmax.
Backward, keys and values travel again, and their gradients follow them: a tour (see
`ringcoll.schedules.tour`). So a rank holds its own shard, the shard that has just arrived, the one
that is on the wire, and its sums, for any number of ranks.

Inside, the batch and the groups of heads are rows: q: [rows, heads of a group, s, d], keys and
values end to end: [rows, s, d + dv]. The lanes of a schedule divide the rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringcoll.choose.table import LAX
from ringcoll.collectives.by_schedule import built, named
from ringcoll.layers.context_parallel.softmax import Softmax, like, lowest, wide
from ringcoll.layers.context_parallel.tiles import plan
from ringcoll.layers.context_parallel.visits import AttentionOptions, Visits, packed
from ringcoll.runtime import built_in, engine
from ringcoll.runtime.barriers import order_of_work
from ringcoll.runtime.contributions import Shard
from ringcoll.runtime.slicing import concatenated
from ringcoll.schedules.tour import cut, tour


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(options: AttentionOptions, q: Array, kv: Array, ids: Array | None) -> Array:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        options: see `AttentionOptions`.
        q: `[batch, groups, heads of a group, s, d]`.
        kv: keys and values, `[batch, groups, s, d + dv]`.
        ids: `[ranks, batch, s]`, the segments of the positions of all ranks, or None.

    Returns:
        `[batch, groups, heads of a group, s, dv]`.
    """
    return _attend(options, q, kv, ids)[0]


def _attend(
    options: AttentionOptions, q: Array, kv: Array, ids: Array | None
) -> tuple[Array, Array]:
    work, by_rows, back = _prepared(options, q, kv, ids)
    q, kv = by_rows(q), by_rows(kv, 1)
    rows = work.shares(q.shape[0])
    queries = [q[start : start + count] for start, count in rows]
    state = []
    for x in queries:
        exact, shape = wide(x.dtype), x.shape[:-1]
        zeros = jnp.zeros(shape, exact), jnp.zeros((*shape, work.sizes[1]), exact)
        least = jnp.full(shape, lowest(exact), exact)
        state.append(Softmax(*(like(y, x) for y in (least, *zeros))))

    def visit(state: list[Softmax], shards: Sequence[Shard]) -> list[Softmax]:
        state = list(state)
        for shard in shards:
            lane = shard.lane
            state[lane] = work.attend(queries[lane], state[lane], shard, rows[lane][0])
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


def _gathered(work: Visits, kv: Array) -> Iterator[Shard]:
    """The shards of all ranks after the built-in gather; this rank's own shard is the first."""
    kv_of_all = built_in.all_gather(kv, work.options.axes, axis=0, tiled=False)
    for offset in (0, *sorted(work.plan.needed())):
        origin = work.ranks.origin(offset)
        yield Shard(lax.dynamic_index_in_dim(kv_of_all, origin, 0, False), origin, 0, (offset,))


def _prepared(options: AttentionOptions, q: Array, kv: Array, ids: Array | None) -> Any:
    """The work, and two functions.

    One brings operands into rows of whole tiles; the other brings results back from these.
    """
    batch, groups, heads, length, d = q.shape
    name = "ring" if options.algorithm == LAX else options.algorithm
    schedule, ranks = built("all_gather", name, options.axes, None)
    if options.algorithm == LAX:
        schedule = replace(schedule, rounds=(), lanes=1)
    in_a_tile = 0 if options.kernel else heads
    together = prod(options.sizes[axis] for axis in options.exchanged)
    where = options.layout, length // together, options.sizes, options.exchanged
    tiles = plan(options.mask, *where, in_a_tile, ranks.shape)
    if options.mask.window is not None and options.algorithm != LAX:
        schedule = cut(schedule, tiles.needed())
    fill = tiles.positions.shape[1] - length

    def filled(x: Array, dim: int) -> Array:
        return jnp.pad(x, [(0, fill * (d == dim)) for d in range(x.ndim)]) if fill else x

    def by_rows(x: Array, dim: int = 2) -> Array:
        """Bring an array that starts with batch and groups into rows; `dim` has the positions."""
        return filled(x.reshape(batch * groups, *x.shape[2:]), dim)

    def back(x: Array) -> Array:
        return x[:, :, :length].reshape(batch, groups, heads, length, *x.shape[3:])

    ids = None if ids is None else filled(ids, 2)
    work = Visits(options, tiles, schedule, ranks, ids, (d, kv.shape[-1] - d), groups, heads)
    return work, by_rows, back


def _attend_forward(options, q, kv, ids):
    out, lse = _attend(options, q, kv, ids)
    return out, (q, kv, ids, out, lse)


def _attend_backward(options, residuals, ct):
    options = replace(options, kernel=None)  # a kernel's blocks are too large for gradients
    q, kv, ids, out, lse = residuals
    # Without the barrier, a compiler reuses the messages of the forward pass, and keeps all shards.
    kv, ct = lax.optimization_barrier((kv, ct))
    exact, length = wide(q.dtype), q.shape[3]
    inner = (out.astype(exact) * ct.astype(exact)).sum(-1)
    work, by_rows, back = _prepared(options, q, kv, ids)
    by_row = [by_rows(x) for x in (q, ct.astype(q.dtype), lse, inner)]
    kv_rows = by_rows(kv, 1)
    rows = work.shares(kv_rows.shape[0])
    of_lanes = [tuple(x[start : start + count] for x in by_row) for start, count in rows]
    dq = [like(jnp.zeros(x[0].shape, exact), x[0]) for x in of_lanes]

    def visit(dq: list[Array], shards: Sequence[Shard]) -> tuple[list[Array], list[Array]]:
        dq, gradients = list(dq), []
        for shard in shards:
            lane, first, count = shard.lane, shard.first, len(shard.value)
            by_row, so_far = jax.tree.map(
                lambda x, first=first, count=count: lax.slice_in_dim(x, first, first + count),
                (of_lanes[lane], dq[lane]),
            )
            added, dkv = work.differentiate(by_row, so_far, shard, rows[lane][0] + first)
            dq[lane] = lax.dynamic_update_slice_in_dim(dq[lane], added, first, 0)
            gradients.append(dkv)
        return dq, gradients

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
            # With more ranks, the last hop is a small part, and halves only enlarge the program.
            order, halves = order_of_work(), work.ranks.size == 2
            dq, dkvs = engine.tour(path, work.ranks, own, visit, dq, order=order, halves=halves)
    dq_whole = back(concatenated(dq, 0)).astype(q.dtype)
    dkv_whole = concatenated(dkvs, 0)[:, :length].reshape(kv.shape).astype(kv.dtype)
    return dq_whole, dkv_whole, None


attend.defvjp(_attend_forward, _attend_backward)
