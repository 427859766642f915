# %% [markdown]
"""
# Lesson 13: the same bits on any number of ranks

Train on one device, and then on eight. The losses differ in their last digits, and after some steps
in more digits. Nothing is wrong. A float sum is rounded after every addition. So its bits depend on
the order of the additions, and that order depends on the number of ranks.

a + b has the same bits as b + a. But (a + b) + c can differ from a + (b + c). So the bits of a sum
depend on its *tree*: which sums are added to which. If any number of ranks uses the same tree, the
bits are the same.
"""

# %%
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll import algorithms, costs
from ringcoll.learn import claim, make_mesh, start

start(8)
LEAVES, S = 8, 1000
SIZES = 1, 2, 4, 8
rng = np.random.default_rng(0)
leaves = rng.standard_normal((LEAVES, S), np.float32)  # eight vectors to add


def bits(x: Array) -> bytes:
    return np.asarray(x).tobytes()


# %% [markdown]
"""
## Two orders, two results
"""

# %%
chain, backward = leaves[0], leaves[-1]
for i in range(1, LEAVES):
    chain, backward = chain + leaves[i], backward + leaves[-1 - i]
print(
    f"{(chain != backward).sum()} of {S} sums differ, by {abs(chain - backward).max():.1e} at most"
)
claim("from the front and from the back: different bits", bits(chain) != bits(backward))
claim("but a + b is b + a", bits(leaves[0] + leaves[1]) == bits(leaves[1] + leaves[0]))

# %% [markdown]
"""
## A tree that any number of ranks can share

Add neighbouring leaves, then neighbouring sums, and so on. Each of n ranks has 8/n neighbouring
leaves. So it can add the lower levels of the tree by itself. The upper levels start with one sum on
each rank, and add the sums of the nearest ranks first: rank r exchanges sums with rank r xor 1,
then with r xor 2, then with r xor 4.
"""

# %%


def by_pairs(x: Array) -> Array:
    """The sum over the first dimension, whose size is a power of two."""
    while len(x) > 1:
        x = x[::2] + x[1::2]
    return x[0]


def tree_sum(x: Array) -> Array:
    """The sum over the ranks' leaves, on every rank."""
    total, n, distance = by_pairs(x), lax.axis_size("x"), 1
    while distance < n:
        total += lax.ppermute(total, "x", [(r, r ^ distance) for r in range(n)])
        distance *= 2
    return total[None]


def on_ranks(function: Callable[[Array], Array], n: int, x: np.ndarray) -> Array:
    """A row for each rank."""
    mapped = jax.shard_map(function, mesh=make_mesh(x=n), in_specs=P("x"), out_specs=P("x"))
    return jax.jit(mapped)(x)


def results(function: Callable[[Array], Array], x: np.ndarray) -> set[bytes]:
    """The different results of all ranks, for all numbers of ranks."""
    return {bits(row) for n in SIZES for row in on_ranks(function, n, x)}


claim("by the tree: one result", len(results(tree_sum, leaves)) == 1)


def plain_sum(x: Array) -> Array:
    return lax.psum(x.sum(0), "x")[None]


found = results(plain_sum, leaves)
print(f"by psum of plain sums: {len(found)} results on {SIZES} ranks")
claim("by psum of plain sums: several", len(found) > 1)

# %% [markdown]
"""
## The tree of a schedule

A schedule fixes which sums are added on which rank. So `costs.tree` runs the schedule on
symbols, and returns the tree. `check_balanced` proves that all ranks add by the balanced tree, or
names a rank that does not.
"""

# %%
ring, doubling = algorithms.ring(4), algorithms.recursive_doubling(4)
print("ring:              ", costs.tree(ring))
print("recursive doubling:", costs.tree(doubling))
claim("a ring adds one leaf at a time", costs.tree(ring) == (0, (1, (2, 3))))
claim("recursive doubling adds by pairs", costs.tree(doubling) == ((0, 1), (2, 3)))
costs.check_balanced(algorithms.recursive_doubling(8))

# %% [markdown]
"""
## The tree in the library

`order=ringcoll.Tree(8)` uses an algorithm that adds by this tree, and refuses others. You add the
lower levels yourself: each rank passes the sum of its own leaves.
"""


# %%
def ours(x: Array) -> Array:
    return ringcoll.psum(by_pairs(x), "x", order=ringcoll.Tree(LEAVES))[None]


claim("the bits of the tree by hand", results(ours, leaves) == results(tree_sum, leaves))
try:
    jax.eval_shape(
        lambda x: on_ranks(
            lambda x: ringcoll.psum(x, "x", algorithm="ring", order=ringcoll.Tree(8)), 8, x
        ),
        leaves,
    )
except ValueError as error:
    print(f"ValueError: {error}")
    claim("a ring is refused", "ring" in str(error))

# %% [markdown]
"""
## Exercise 1: which other algorithms?

Which algorithms of `ringcoll.psum_scatter` add by the balanced tree on 8 ranks?
`algorithms.names("psum_scatter")` lists the algorithms, `algorithms.build` makes their schedules,
and `costs.check_balanced` raises an error if the tree is not balanced.
"""

# %% tags=["solution"]
balanced = []
for name in algorithms.names("psum_scatter"):
    try:
        costs.check_balanced(algorithms.build("psum_scatter", name, (8,)))
        balanced.append(name)
    except ValueError:
        pass
print(*balanced)
claim("only recursive doubling", balanced == ["recursive_doubling"])

# %% [markdown]
"""
## Exercise 2: a matmul

The contracted dimension of x @ w is sharded over the ranks, which add their products. Give each
leaf 64 of the 512 columns of x. A rank multiplies leaf by leaf, adds its products by pairs, and
passes their sum to `ringcoll.psum_scatter` with `order=ringcoll.Tree(8)`. On 1, 2, 4 and 8 ranks,
compare the bits of the result, and those of `jax.lax.psum_scatter` of x @ w.
"""


# %% tags=["solution"]
def by_tree(x: Array, w: Array) -> Array:
    own = LEAVES // lax.axis_size("x")
    x = x.reshape(len(x), own, -1).swapaxes(0, 1)
    products = jnp.stack([a @ b for a, b in zip(x, w.reshape(own, -1, w.shape[1]), strict=True)])
    return ringcoll.psum_scatter(by_pairs(products), "x", tiled=True, order=ringcoll.Tree(LEAVES))


def plain(x: Array, w: Array) -> Array:
    return lax.psum_scatter(x @ w, "x", tiled=True)


def product(n: int, function: Callable[[Array, Array], Array]) -> bytes:
    mapped = jax.shard_map(
        function, mesh=make_mesh(x=n), in_specs=(P(None, "x"), P("x")), out_specs=P("x")
    )
    return bits(jax.jit(mapped)(x, w))


x, w = (rng.standard_normal(shape, np.float32) for shape in ((16, 512), (512, 16)))
claim("by the tree: one result", len({product(n, by_tree) for n in SIZES}) == 1)
without = len({product(n, plain) for n in SIZES})
print(f"without it: {without} results")
claim("without it: several", without > 1)
