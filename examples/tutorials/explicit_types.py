# %% [markdown]
"""
# Shardings as types

Explicit mode, where the sharding is part of the type: its errors, and the cure for each.

    python -m examples.tutorials.explicit_types

On a mesh whose axes are `AxisType.Explicit`, `jax.typeof` shows how an array is sharded, also
while a function is traced. JAX infers the sharding of every result. If a result would need a
collective, or its sharding is ambiguous, JAX raises an error. The cure is always to say which
sharding you want. Then JAX inserts the collective. Here each error is caught and printed with its
cure, and the result is compared with the collective of ringcoll that does the same.
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
from ringcoll.learn import agree, integers, make_mesh, place, start

start(8)
mesh = make_mesh(explicit=True, x=2, y=4)
jax.set_mesh(mesh)

# %% [markdown]
"""
## Types

`8@x` is a dimension of 8 that is cut along x. Types follow operations as shapes do.
"""

# %%
a = place(mesh, integers(8, 16), P("x", "y"))
for words, value in {
    "a": a,
    "2 a + 1": 2 * a + 1,
    "a.T": a.T,
    "a.sum(0)": a.sum(0),
    "a.reshape(128)": a.reshape(128),
}.items():
    print(f"{words:16}{jax.typeof(value)}")
traced: list[Any] = []


@jax.jit
def transposed(a: Array) -> Array:
    traced.append(jax.typeof(a.T))
    return a.T


transposed(a)
print(f"{'a.T under jit':16}{traced[0]}")
assert str(traced[0]) == str(jax.typeof(a.T)) == "float32[16@y,8@x]"

# %% [markdown]
"""
`a.sum(0)` sent messages without an error: only an all-reduce over x gives this sum, so the sharding
is not ambiguous.

## Errors
"""


# %%
def shown(
    title: str,
    wrong: Callable[..., Any],
    right: Callable[..., Array],
    cure: str,
    by_hand: Callable[..., Array],
    specs: tuple[P, ...],
    out: P,
    *operands: Array,
) -> Array:
    """Print the error of `wrong` and its cure; compare it with ringcoll and numpy."""
    print(f"\n{title}:", *(str(jax.typeof(x)) for x in operands))
    try:
        wrong(*operands)
    except Exception as error:  # a TypeError; its class has no public name
        kind = type(error).__name__
        print(f"  {kind}: {str(error).partition('. Got')[0]}")
    else:
        raise AssertionError(f"{title}: no error")
    assert kind == "ShardingTypeError"
    cured = right(*operands)
    print(f"  cure: {cure}\n  -> {jax.typeof(cured)}")
    # check_vma=False: JAX cannot know that gathered rows are the same on all ranks.
    mapped = jax.shard_map(by_hand, in_specs=specs, out_specs=out, check_vma=False)
    ours = jax.jit(mapped)(*operands)
    assert jax.typeof(ours) == jax.typeof(cured)
    expected = wrong(*map(np.asarray, operands))
    agree("  the result", numpy=expected, explicit=cured, ringcoll=ours)
    return ours


# %% [markdown]
"""
**Two operands are sharded differently.** The rows of one are cut along x, and the columns of the
other.
"""

# %%
rows = place(mesh, integers(8, 16), P("x"))
columns = place(mesh, integers(8, 16, seed=1), P(None, "x"))
shown(
    "a sum of rows and columns",
    lambda a, b: a + b,
    lambda a, b: a + jax.sharding.reshard(b, P("x")),
    'jax.sharding.reshard(b, P("x"))',
    lambda a, b: a + lax.all_to_all(b, "x", 0, 1, tiled=True, algorithm="pairwise"),
    (P("x"), P(None, "x")),
    P("x"),
    rows,
    columns,
)

# %% [markdown]
"""
**The contracted dimension is cut.** Every device has a term of the sum. JAX cannot know whether all
devices should get the whole sum, or each a part of it.
"""

# %%
left = place(mesh, integers(8, 16), P(None, "y"))
right = place(mesh, integers(16, 12, seed=1), P("y"))
for spec, words, by_hand in (
    (P(), "all devices get the sum", lambda a, b: lax.psum(a @ b, "y", algorithm="ring")),
    (
        P("y"),
        "each gets some rows of it",
        lambda a, b: lax.psum_scatter(a @ b, "y", tiled=True, algorithm="ring"),
    ),
):
    shown(
        f"a product over y, {words}",
        lambda a, b: a @ b,
        lambda a, b, spec=spec: jnp.matmul(a, b, out_sharding=spec),
        f"jnp.matmul(a, b, out_sharding={spec})",
        by_hand,
        (P(None, "y"), P("y")),
        spec,
        left,
        right,
    )

# %% [markdown]
"""
**Rows are picked by number.** Each device may need rows of every other device.
"""

# %%
table, numbers = place(mesh, integers(8, 16), P("x")), place(mesh, np.array([5, 0, 7, 5]), P())
shown(
    "rows of a table",
    lambda t, i: t[i],
    lambda t, i: t.at[i].get(out_sharding=P()),
    "t.at[i].get(out_sharding=P())",
    lambda t, i: lax.all_gather(t, "x", tiled=True, algorithm="ring")[i],
    (P("x"), P()),
    P(),
    table,
    numbers,
)

# %% [markdown]
"""
**Two arrays are concatenated**, but they are sharded differently.
"""

# %%
shown(
    "rows after columns",
    lambda a, b: (np if isinstance(a, np.ndarray) else jnp).concatenate([a, b], 1),
    lambda a, b: jnp.concatenate([a, jax.sharding.reshard(b, P("x"))], 1),
    'jax.sharding.reshard(b, P("x")), as in the first error',
    lambda a, b: jnp.concatenate([a, lax.all_to_all(b, "x", 0, 1, tiled=True)], 1),
    (P("x"), P(None, "x")),
    P("x"),
    rows,
    columns,
)

# %% [markdown]
"""
None of these errors can happen in `shard_map`, because a rank's shard has no sharding. There the
type says along which axes values vary (`check_vma`). JAX raises an error if a collective is
missing.
"""

# %%
kinds: list[Any] = []


def same(a: Array) -> Array:
    kinds.append(jax.typeof(a))
    return a


jax.shard_map(same, in_specs=P("x"), out_specs=P("x"))(rows)
print(f"\nrows, inside shard_map over x: {kinds[0]}, whose V names the axes along which they vary")

# %% [markdown]
"""
## Exercise 1: an eighth each

The rows of `a` are cut along x, and the contracted dimension along y. Which `out_sharding` gives
each device an eighth of the rows of `a @ b`? Which collective does that?
"""

# %% tags=["solution"]
eighths = shown(
    "a product over y, rows over x",
    lambda a, b: a @ b,
    lambda a, b: jnp.matmul(a, b, out_sharding=P(("x", "y"))),
    'jnp.matmul(a, b, out_sharding=P(("x", "y")))',
    lambda a, b: lax.psum_scatter(a @ b, "y", tiled=True, algorithm="ring"),
    (P("x", "y"), P("y")),
    P(("x", "y")),
    a,
    right,
)
assert eighths.addressable_shards[0].data.shape == (1, 12)

# %% [markdown]
"""
## Exercise 2: send only the picked rows

The cure for `t[i]` gathers the whole table. Write a cheaper function: each rank takes the picked
rows that it has, and zeros for the other picked rows. Then only as many rows travel as were picked.
"""


# %% tags=["solution"]
def picked(table: Array, numbers: Array) -> Array:
    size = table.shape[0]
    mine = numbers - jax.lax.axis_index("x") * size
    is_here = (mine >= 0) & (mine < size)
    found = jnp.where(is_here[:, None], table[jnp.clip(mine, 0, size - 1)], 0)
    return lax.psum(found, "x", algorithm="ring")


by_rows = jax.jit(jax.shard_map(picked, in_specs=(P("x"), P()), out_specs=P()))
agree("rows of a table", numpy=np.asarray(table)[[5, 0, 7, 5]], ringcoll=by_rows(table, numbers))
