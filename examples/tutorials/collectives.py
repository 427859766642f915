# %% [markdown]
"""
# Each collective, and its uses

A use of each collective inside `shard_map`, by `jax.lax` and by ringcoll.

    python -m examples.tutorials.collectives

Every function below is written once, and takes the library as its first argument: ringcoll's
collectives have the signatures of `jax.lax`, and also `algorithm=`.
"""

# %%
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from ringcoll import lax
from ringcoll.costs import error_bound
from ringcoll.layers import fold_rng_over_axis
from ringcoll.learn import agree, gamma, integers, make_mesh, start

start(8)
N = 8
EPS = float(np.finfo(np.float32).eps)
ROWS, COLUMNS, EVERYWHERE = P("x"), P(None, "x"), P()


def both(
    what: str,
    function: Callable[..., Array],
    operands: tuple[Any, ...],
    specs: tuple[P, ...],
    out: P,
    expected: Any,
    algorithm: str | None = None,
    allowed: float = 0.0,
) -> Array:
    """Run a function of a rank's shards with both libraries; returns ringcoll's result."""
    options = {"algorithm": algorithm} if algorithm else {}

    def run(library: Any, **options: str) -> Array:
        def per_rank(*shards: Array) -> Array:
            return function(library, *shards, **options)

        mapped = jax.shard_map(per_rank, mesh=make_mesh(x=N), in_specs=specs, out_specs=out)
        return jax.jit(mapped)(*operands)

    theirs, ours = run(jax.lax), run(lax, **options)
    agree(what, allowed=allowed, expected=expected, lax=theirs, ringcoll=ours)
    return ours


# %% [markdown]
"""
## The functions
"""

# %%


def total(lax: Any, x: Array, **options: str) -> Array:
    """Each rank sums its part. Then the ranks' sums are added up."""
    return lax.psum(x.sum(), "x", **options)


def mean(lax: Any, x: Array, **options: str) -> Array:
    """The mean of equal parts."""
    return lax.pmean(x.mean(), "x", **options)


def softmax(lax: Any, x: Array, **options: str) -> Array:
    """Over a sharded dimension: a rank sends two numbers for each row, and no element of x."""
    largest = lax.pmax(x.max(-1, keepdims=True), "x", **options)
    powers = jnp.exp(x - largest)
    return powers / lax.psum(powers.sum(-1, keepdims=True), "x", **options)


def layer_norm(lax: Any, x: Array, **options: str) -> Array:
    """Two means, one after the other: the variance needs the centred values."""
    centred = x - lax.pmean(x.mean(-1, keepdims=True), "x", **options)
    return centred / jnp.sqrt(lax.pmean((centred**2).mean(-1, keepdims=True), "x", **options))


def weight_gathered(lax: Any, x: Array, w: Array, **options: str) -> Array:
    """`x: [m/n, k], w: [k/n, f] -> [m/n, f]`: each rank stores a part of w, and gathers it."""
    return x @ lax.all_gather(w, "x", tiled=True, **options)


def scattered_sum(lax: Any, x: Array, w: Array, **options: str) -> Array:
    """`x: [m, k/n], w: [k/n, f] -> [m/n, f]`: a rank has a term of all sums, and gets some sums."""
    return lax.psum_scatter(x @ w, "x", tiled=True, **options)


def rolled(lax: Any, x: Array) -> Array:
    """`jnp.roll` by one row: only the row at the edge is sent."""
    n = jax.lax.axis_size("x")
    edge = lax.ppermute(x[-1:], "x", [(rank, (rank + 1) % n) for rank in range(n)])
    return jnp.concatenate([edge, x[:-1]])


def resharded(lax: Any, x: Array, **options: str) -> Array:
    """`[m/n, k] -> [m, k/n]`: the same array, cut along the other dimension."""
    return lax.all_to_all(x, "x", split_axis=1, concat_axis=0, tiled=True, **options)


def numbered(lax: Any, x: Array) -> Array:
    """Adds to each row its number in the whole array."""
    first = lax.axis_index("x") * x.shape[0]
    return x + (first + jnp.arange(x.shape[0], dtype=jnp.int32))[:, None]


def noise(lax: Any, seed: Array) -> Array:
    """A different key on each rank; with one key all ranks would draw the same numbers."""
    return jax.random.uniform(fold_rng_over_axis(jax.random.key(seed), "x"), (2, 3))


# %% [markdown]
"""
## With both libraries

First small integers, whose sums are exact in any order.
"""

# %%
x, w = integers(2 * N, 2 * N), integers(2 * N, 4, seed=1)
numbers = np.arange(len(x), dtype=np.float32)[:, None]
for words, function, operands, specs, out, expected, algorithm in (
    ("a sum", total, (x,), (ROWS,), EVERYWHERE, x.sum(), "recursive_doubling"),
    ("a mean", mean, (x,), (ROWS,), EVERYWHERE, x.mean(), "recursive_doubling"),
    ("a gathered weight", weight_gathered, (x, w), (ROWS, ROWS), ROWS, x @ w, "two_ended"),
    ("a scattered sum", scattered_sum, (x, w), (COLUMNS, ROWS), ROWS, x @ w, "two_ended"),
    ("a roll", rolled, (x,), (ROWS,), ROWS, np.roll(x, 1, 0), None),
    ("rows to columns", resharded, (x,), (ROWS,), COLUMNS, x, "pairwise"),
    ("rows with their numbers", numbered, (x,), (ROWS,), ROWS, x + numbers, None),
):
    both(f"  {words}", function, operands, specs, out, expected, algorithm)

# %% [markdown]
"""
Then results that are rounded:
"""

# %%
values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
wide = values.astype(np.float64)
powers = np.exp(wide - wide.max(1, keepdims=True))
softmaxed = powers / powers.sum(1, keepdims=True)
centred, deviation = wide - wide.mean(1, keepdims=True), wide.std(1, keepdims=True)
normal = centred / deviation
# A sum of positive terms has a relative error within its bound, on a rank and then over ranks.
# There are a few more roundings, also in exp.
off = gamma(wide.shape[1] // N + 8) + error_bound("psum", "recursive_doubling", (N,), EPS)
# The error of a mean, and so of each centred value, is that times the largest value. The
# quotient has the errors of the centred value and of the deviation.
off_normal = off * (1 + np.abs(wide).max() / deviation.min()) * (1 + np.abs(normal).max())
for words, function, expected, allowed in (
    ("softmax", softmax, softmaxed, 2 * off),
    ("layer norm", layer_norm, normal, 2 * off_normal),
):
    words = f"  {words} over a sharded dimension"
    operands, specs = (values,), (COLUMNS,)
    both(words, function, operands, specs, COLUMNS, expected, "recursive_doubling", allowed)

# %% [markdown]
"""
And random numbers:
"""

# %%
keys = [jax.random.fold_in(jax.random.key(7), rank) for rank in range(N)]
alone = np.concatenate([jax.random.uniform(key, (2, 3)) for key in keys])
drawn = both("different random numbers on each rank", noise, (np.int32(7),), (P(),), ROWS, alone)
if len(np.unique(np.asarray(drawn))) < drawn.size:
    raise AssertionError("two ranks drew the same")

# %% [markdown]
"""
## Exercise 1: log-sum-exp

Write `log(sum(exp(x)))` of each row, where the columns are sharded. It needs two collectives. Each
sends one number per row. (Without the first one, `exp` overflows for x = 100.)"""


# %% tags=["solution"]
def log_sum_exp(lax: Any, x: Array, **options: str) -> Array:
    largest = lax.pmax(x.max(-1), "x", **options)
    return largest + jnp.log(lax.psum(jnp.exp(x - largest[:, None]).sum(-1), "x", **options))


large = values + 100
expected = np.log(np.exp(large.astype(np.float64)).sum(1))
allowed = 16 * EPS * float(expected.max())  # exp, sums and log: each a few roundings
rest = expected, "recursive_doubling", allowed
both("log-sum-exp", log_sum_exp, (large,), (COLUMNS,), EVERYWHERE, *rest)

# %% [markdown]
"""
## Exercise 2: a running sum

Write `jnp.cumsum` down the rows, where the rows are sharded. A rank needs the sums of all ranks
before it. Gather one number for each rank and column, not the array.
"""


# %% tags=["solution"]
def running_sum(lax: Any, x: Array, **options: str) -> Array:
    totals = lax.all_gather(x.sum(0), "x", **options)  # [n, columns]
    before = jnp.arange(totals.shape[0]) < lax.axis_index("x")
    return jnp.cumsum(x, 0) + jnp.where(before[:, None], totals, 0).sum(0)


both("a running sum", running_sum, (x,), (ROWS,), ROWS, np.cumsum(x, 0), "bruck")
