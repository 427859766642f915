"""Attention whose keys and values arrive round by round, and its gradients.

Forward, a gather brings keys and values; each shard's scores are added to an online softmax.
Backward, keys and values travel again, and their gradients follow them: a tour (see
`ringcoll.schedules.tour`). So a rank holds its own shard, the shard that has just arrived, the one
that is on the wire, and its sums, for any number of ranks.

Inside, the batch and the groups of heads are rows: q: [rows, heads of a group, s, d], keys and
values end to end: [rows, s, d + dv]. The lanes of a schedule divide the rows.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ringcoll.collectives.visits import Rounds, Rows
from ringcoll.layers.context_parallel.softmax import Softmax, lowest, wide
from ringcoll.layers.context_parallel.tiles import plan
from ringcoll.layers.context_parallel.visits import AttentionOptions, Visits
from ringcoll.runtime.value_types import is_checked, varying_like


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


def _on_own_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a device's own batch and groups, whose rows can be cut.

    Explicit axes become manual. JAX cannot differentiate such a `shard_map` inside another one.
    """

    @wraps(function)
    def on_own_rows(options: AttentionOptions, *operands: Any) -> Any:
        call, mesh = partial(function, options), jax.sharding.get_abstract_mesh()
        if not mesh.explicit_axes:
            return call(*operands)
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, operands)
        rows = PartitionSpec(*jax.tree.leaves(specs)[0][:2])
        how: Any = {"axis_names": {*mesh.auto_axes, *mesh.explicit_axes}, "check_vma": is_checked()}
        return jax.shard_map(call, in_specs=specs, out_specs=rows, **how)(*operands)

    return on_own_rows


@_on_own_rows
def _attend(
    options: AttentionOptions, q: Array, kv: Array, ids: Array | None
) -> tuple[Array, Array]:
    work, by_rows, back = _prepared(options, q, kv, ids)
    q, kv = by_rows(q), by_rows(kv, 1)
    exact, shape = wide(q.dtype), q.shape[:-1]
    zeros = jnp.zeros(shape, exact), jnp.zeros((*shape, work.sizes[1]), exact)
    least = jnp.full(shape, lowest(exact), exact)
    state = Softmax(*(varying_like(x, q) for x in (least, *zeros)))

    def visit(state: Softmax, arrived: Rows) -> tuple[Softmax, None]:
        for part in filter(work.is_needed, arrived.parts()):
            state = work.attend(q, state, part)
        return state, None

    state, _ = work.rounds("attention").gather(kv, visit, state)
    total = jnp.where(state.total > 0, state.total, 1)
    out = state.values / total[..., None]
    return back(out.astype(q.dtype)), back(state.greatest + jnp.log(total))


def _prepared(options: AttentionOptions, q: Array, kv: Array, ids: Array | None) -> Any:
    """The work, and two functions.

    One brings operands into rows of whole tiles; the other brings results back from these.
    """
    batch, groups, heads, length, d = q.shape
    ranks = Rounds(name="attention", axes=options.axes, algorithm=options.algorithm, dim=0).ranks()
    in_a_tile = 0 if options.kernel else heads
    together = prod(options.sizes[axis] for axis in options.exchanged)
    where = options.layout, length // together, options.sizes, options.exchanged
    tiles = plan(options.mask, *where, in_a_tile, ranks.shape)
    fill = tiles.positions.shape[1] - length

    def filled(x: Array, dim: int) -> Array:
        return jnp.pad(x, [(0, fill * (d == dim)) for d in range(x.ndim)]) if fill else x

    def by_rows(x: Array, dim: int = 2) -> Array:
        """Bring an array that starts with batch and groups into rows; `dim` has the positions."""
        return filled(x.reshape(batch * groups, *x.shape[2:]), dim)

    def back(x: Array) -> Array:
        return x[:, :, :length].reshape(batch, groups, heads, length, *x.shape[3:])

    ids = None if ids is None else filled(ids, 2)
    work = Visits(options, tiles, ids, (d, kv.shape[-1] - d), groups, heads)
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
    dq = varying_like(jnp.zeros(by_row[0].shape, exact), by_row[0])

    def visit(dq: Array, arrived: Rows) -> tuple[Array, Array]:
        gradients = []
        for part in arrived.parts():
            if work.is_needed(part):
                dq, dkv = work.differentiate(by_row, dq, part)
            else:
                dkv = varying_like(jnp.zeros(part.value.shape, exact), dq)
            gradients.append(dkv)
        return dq, arrived.join(gradients)

    # With more ranks, the last hop is a small part, and halves only enlarge the program.
    rounds, halved = work.rounds("attention_gradient"), len(work.plan.positions) == 2
    dq, dkv = rounds.tour(by_rows(kv, 1), visit, dq, halved=halved)
    dkv = dkv[:, :length].reshape(kv.shape)
    return back(dq).astype(q.dtype), dkv.astype(kv.dtype), None


attend.defvjp(_attend_forward, _on_own_rows(_attend_backward))
