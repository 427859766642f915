"""The nearest points of every query: all pairs of shards meet while the next points travel.

Queries and points are sharded over one axis. Each rank compares its queries with the points that
have arrived, and keeps the k nearest so far: the carry of a `ringcoll.gather`. So no rank ever has
all points, or all distances.

The distances are squares: |q - p|^2 = |q|^2 - 2 q.p + |p|^2. The first term is the same for all
points of a query, so it is added at the end. Of points at equal distances, the first ones are
nearer. For that, points are compared a part at a time: the algorithms of `gather` bring several
parts in a round, in an order of their own.
"""

import jax.numpy as jnp
from jax import Array, lax

import ringcoll

Nearest = tuple[Array, Array]  # squares of distances, and numbers of points: [queries, k] each


def nearest(queries: Array, points: Array, k: int, axis: str) -> Nearest:
    """The k nearest points, nearest first, inside `jax.shard_map`.

    `queries: [q/n, d], points: [p/n, d] -> [q/n, k]` twice, with k at most p.
    """
    numbers = jnp.arange(lax.axis_size(axis) * len(points))

    def visit(best: Nearest, arrived: ringcoll.Rows) -> tuple[Nearest, None]:
        for part in arrived.parts():  # of a shard, or a whole one
            products = jnp.dot(queries, part.value.T, preferred_element_type=jnp.float32)
            closeness = 2 * products - squared_length(part.value)[None]
            closest, rows = lax.top_k(closeness, min(k, len(part.value)))
            best = merged(best, (-closest, part.take(numbers)[rows]))
        return best, None

    start = jnp.full((len(queries), k), jnp.inf), jnp.zeros((len(queries), k), numbers.dtype)
    (squares, found), _ = ringcoll.gather(points, axis, visit, start)
    return squares + squared_length(queries)[:, None], found


def squared_length(x: Array) -> Array:
    """The sum of squares of each row."""
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1)


def merged(a: Nearest, b: Nearest) -> Nearest:
    """As many of both as a has: by distance, then by number."""
    squares, found = (jnp.concatenate(pair, axis=1) for pair in zip(a, b, strict=True))
    squares, found = lax.sort((squares, found), dimension=1, num_keys=2)
    k = a[0].shape[1]
    return squares[:, :k], found[:, :k]
