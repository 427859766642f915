# %% [markdown]
# # Explicit mode: the sharding is part of the type. Its errors, and the cure of each.
#
#     python -m examples.tutorials.explicit_types
#
# On a mesh whose axes are `AxisType.Explicit`, `jax.typeof` shows how an array is sharded, also
# while a function is traced. JAX infers the sharding of every result. Where that would need a
# collective, or is ambiguous, it raises. The cure is always to say what you want; JAX then inserts
# the collective. Here each error is caught and printed with its cure, and beside it stands the
# collective of ringcoll that does the same.

# %%
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll import lax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # instead of eight real ones
mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Explicit,) * 2)
jax.set_mesh(mesh)
random = np.random.default_rng(0)


def integers(*shape):
    """Small integers: their sums are exact in any order."""
    return random.integers(-3, 4, shape).astype(np.float32)


def place(array, *spec):
    """Put an array on the mesh."""
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


# %% [markdown]
# ## Types
#
# `8@x` is a dimension of 8 that is cut along x. Types follow operations as shapes do.

# %%
a = place(integers(8, 16), "x", "y")
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
def transposed(a):
    traced.append(jax.typeof(a.T))
    return a.T


transposed(a)
print(f"{'a.T under jit':16}{traced[0]}")
assert str(traced[0]) == str(jax.typeof(a.T)) == "float32[16@y,8@x]"

# %% [markdown]
# `a.sum(0)` did send: an all-reduce over x is the only way to a sum, so JAX did not ask.
#
# ## Errors


# %%
def shown(title, wrong, right, cure, by_hand, specs, out, *operands):
    """Print the error of `wrong` and its cure; check the cure against ringcoll and numpy."""
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
    np.testing.assert_array_equal(cured, expected)
    np.testing.assert_array_equal(ours, expected)
    print("  numpy = explicit = ringcoll, exactly")


# %% [markdown]
# **Two operands disagree.** Rows of one are cut along x, columns of the other.

# %%
rows, columns = place(integers(8, 16), "x"), place(integers(8, 16), None, "x")
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
# **The contracted dimension is cut.** Every device has a term of the sum. Shall all get the sum, or
# each a part?

# %%
left, right = place(integers(8, 16), None, "y"), place(integers(16, 12), "y")
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
# **Rows are picked by number.** Each device may need rows of every other one.

# %%
table, numbers = place(integers(8, 16), "x"), place(np.array([5, 0, 7, 5]))
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
# **Parts are put one after the other**, but they are cut along different axes.

# %%
shown(
    "rows after columns",
    lambda a, b: (np if isinstance(a, np.ndarray) else jnp).concatenate([a, b], 1),
    lambda a, b: jnp.concatenate([a, jax.sharding.reshard(b, P("x"))], 1),
    "the same as in the first",
    lambda a, b: jnp.concatenate([a, lax.all_to_all(b, "x", 0, 1, tiled=True)], 1),
    (P("x"), P(None, "x")),
    P("x"),
    rows,
    columns,
)

# %% [markdown]
# In `shard_map` none of these can arise: a rank's shard has no sharding. There the type says along
# which axes values differ (`check_vma`), and forgetting a collective is the error.

# %%
kinds: list[Any] = []


def same(a):
    kinds.append(jax.typeof(a))
    return a


jax.shard_map(same, in_specs=P("x"), out_specs=P("x"))(rows)
print(f"\nrows, inside shard_map over x: {kinds[0]}, whose V names the axes along which they vary")
