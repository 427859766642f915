"""Collective matmuls in forms for a switch, on which permutes are slow and built-ins are fast.

  chunks2, chunks4, chunks8  the built-in collective of a part of the rows under the matmul of
                             the part before; a barrier between parts keeps them apart
  grouped                    one all-to-all in place of the n-1 permutes of a ring

`python -m benchmarks overlap --topology h100:8 --algorithm chunks4` compiles one.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

FORMS = ("all_gather_matmul", "matmul_reduce_scatter")


def _gathered_in_chunks(x: Array, w: Array, chunks: int) -> Array:
    """x: [m/n, k], w: [k, f] -> [m, f]; a chunk is gathered under the product of the one before."""
    n, parts = lax.axis_size("x"), jnp.split(x, chunks)
    empty = lax.empty((n, chunks, parts[0].shape[0], w.shape[1]), x.dtype)
    out = lax.pcast(empty, "x", to="varying")
    gathered = lax.all_gather(parts[0], "x")
    for i in range(chunks):
        coming = gathered
        if i + 1 < chunks:
            part, gathered = lax.optimization_barrier((parts[i + 1], gathered))
            coming = lax.all_gather(part, "x")
        product = jnp.einsum("nrk,kf->nrf", gathered, w)
        out = lax.dynamic_update_slice(out, product[:, None], (0, i, 0, 0))
        gathered, out = lax.optimization_barrier((coming, out))
    return out.reshape(-1, w.shape[1])


def _scattered_in_chunks(x: Array, w: Array, chunks: int) -> Array:
    """x: [m, k/n], w: [k/n, f] -> [m/n, f]; each chunk is summed under the product of the next."""
    blocks = x.reshape(lax.axis_size("x"), chunks, -1, x.shape[1])
    product = jnp.einsum("nrk,kf->nrf", blocks[:, 0], w)
    sums = []
    for i in range(1, chunks):
        block, w, product = lax.optimization_barrier((blocks[:, i], w, product))
        total = lax.psum_scatter(product, "x")
        product, total = lax.optimization_barrier((jnp.einsum("nrk,kf->nrf", block, w), total))
        sums.append(total)
    return jnp.concatenate([*sums, lax.psum_scatter(product, "x")])


def _gathered_grouped(x: Array, w: Array) -> Array:
    copies = jnp.broadcast_to(x, (lax.axis_size("x"), *x.shape))
    return lax.all_to_all(copies, "x", 0, 0).reshape(-1, x.shape[1]) @ w


def _scattered_grouped(x: Array, w: Array) -> Array:
    product = (x @ w).reshape(lax.axis_size("x"), -1, w.shape[1])
    return lax.all_to_all(product, "x", 0, 0).sum(0)


#: By name, then by form: functions of x and w in `shard_map` over an axis x.
SWITCH_FORMS: Mapping[str, Mapping[str, Callable[[Array, Array], Array]]] = {
    **{
        f"chunks{chunks}": {
            FORMS[0]: partial(_gathered_in_chunks, chunks=chunks),
            FORMS[1]: partial(_scattered_in_chunks, chunks=chunks),
        }
        for chunks in (2, 4, 8)
    },
    "grouped": {FORMS[0]: _gathered_grouped, FORMS[1]: _scattered_grouped},
}
