# %% [markdown]
"""
# The four cases of a product of sharded matrices

A product of two sharded matrices, C[I, K] = A[I, J] B[J, K], is one of four cases.

    python -m examples.tutorials.matmuls

An index names the axis of the mesh that shards a dimension: A[I_X, J] is a block of rows on each
rank along X. The sharded dimensions decide what is sent:

1. J is not sharded: nothing, because each rank has the operands of its block of C;
2. J is sharded in one factor: this factor is gathered, or its blocks travel from rank to rank;
3. J is sharded in both: each rank has a term of every sum; the terms are added up on all ranks
   (all-reduce), or each rank gets a part of the sums (reduce-scatter, half the bytes);
4. one axis shards both I and K: one factor is gathered; without that, ranks could only compute the
   diagonal of C.

Each case is written for the compiler (`jit` with shardings), by `jax.lax` in `shard_map`, and by
`ringcoll.sharded_matmul`, which hides the collective under the product. (The cases are those of
"How to Scale Your Model", 2025, chapter 3.)
"""

# %%
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll import costs, lax, sharded_matmul
from ringcoll.learn import agree, integers, make_mesh, place, sent, show, start

start(8)
SIZES = {"I": 16, "J": 32, "K": 24}
Local = Callable[[Array, Array], Array]
Case = tuple[P, P, P, Local]


# %% [markdown]
"""
## The cases
"""

# %%


def gathered(x: Array, dim: int) -> Array:
    """The shards of all ranks along x, one after the other."""
    return jax.lax.all_gather(x, "x", axis=dim, tiled=True)


def scattered(x: Array) -> Array:
    """A rank's rows of the sum."""
    return jax.lax.psum_scatter(x, "x", tiled=True)


ROWS, COLUMNS, WHOLE = P("x", None), P(None, "x"), P(None, None)
CASES: tuple[Case, ...] = (
    (ROWS, P(None, "y"), P("x", "y"), lambda a, b: a @ b),
    (COLUMNS, WHOLE, WHOLE, lambda a, b: gathered(a, 1) @ b),
    (COLUMNS, ROWS, WHOLE, lambda a, b: jax.lax.psum(a @ b, "x")),
    (COLUMNS, ROWS, ROWS, lambda a, b: scattered(a @ b)),
    (ROWS, COLUMNS, ROWS, lambda a, b: a @ gathered(b, 1)),
)


def algebra(a: P, b: P, c: P) -> str:
    """`A[I_X, J] B[J, K_Y] -> C[I_X, K_Y]`"""

    def matrix(name: str, dims: str, spec: P) -> str:
        cut = zip(dims, spec, strict=True)
        return f"{name}[{', '.join(d + (f'_{axis.upper()}' if axis else '') for d, axis in cut)}]"

    return f"{matrix('A', 'IJ', a)} {matrix('B', 'JK', b)} -> {matrix('C', 'IK', c)}"


def by_hand(local: Local, mesh: Any, specs: tuple[P, P], out: P) -> Local:
    """A function of shards over the mesh."""
    # check_vma=False: JAX cannot know that gathered values are equal on all ranks.
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)


def in_two_halves() -> None:
    """An all-reduce is a reduce-scatter, and then an all-gather of its result."""
    n = 4
    mesh, host = make_mesh(x=n), integers(n, 3 * n, 5)
    x = place(mesh, host, P("x"))
    ring: Any = {"algorithm": "ring"}

    def two_halves(x: Array) -> Array:
        part = lax.psum_scatter(x, "x", tiled=True, **ring)
        return lax.all_gather(part, "x", tiled=True, **ring)

    results, found = {}, {}
    for name, function in {
        "lax": lambda x: jax.lax.psum(x, "x"),
        "two_halves": two_halves,
        "ringcoll": lambda x: lax.psum(x, "x", **ring),
    }.items():

        def per_rank(x: Array, function: Any = function) -> Array:
            return function(x[0])

        mapped = jax.shard_map(per_rank, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
        program = jax.jit(mapped).lower(x).compile()
        results[name], found[name] = program(x), sent(program).bytes
    agree("an all-reduce in two halves", numpy=host.sum(0), **results)
    shard = host[0].size // n
    halves = [
        costs.wire_bytes(half, "ring", (n,), shard, x.itemsize)
        for half in ("psum_scatter", "all_gather")
    ]
    total = costs.wire_bytes("psum", "ring", (n,), shard, x.itemsize)
    print(f"bytes by the schedules: {halves[0]:g} + {halves[1]:g} = {total:g}; compiled: {found}")
    if not found["two_halves"] == found["ringcoll"] == total == sum(halves):
        raise AssertionError("the bytes of the compiled programs are not those of the schedules")


# %% [markdown]
"""
## All cases, and an all-reduce in two halves
"""

# %%
mesh = make_mesh(x=2, y=2)
i, j, k = SIZES.values()
a, b = integers(i, j), integers(j, k, seed=1)
rows, sizes = [], []
for a_spec, b_spec, c_spec, by_lax in CASES:
    operands = place(mesh, a, a_spec), place(mesh, b, b_spec)
    specs = a_spec, b_spec

    def ours(a: Array, b: Array, specs: Any = (*specs, c_spec)) -> Array:
        return sharded_matmul(a, b, *specs, algorithm="ring")

    forms = {
        "jit": jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, c_spec)),
        "lax": jax.jit(by_hand(by_lax, mesh, specs, c_spec)),
        "ringcoll": jax.jit(by_hand(ours, mesh, specs, c_spec)),
    }
    programs = {name: form.lower(*operands).compile() for name, form in forms.items()}
    words = algebra(a_spec, b_spec, c_spec)
    agree(words, numpy=a @ b, **{name: run(*operands) for name, run in programs.items()})
    found = [sent(program) for program in programs.values()]
    rows.append((words, *(str(one).replace("collective-", "") for one in found)))
    sizes.append((words, *(one.bytes for one in found)))
show("Collectives in the compiled programs", ["case", *forms], rows)
show("The bytes that a rank sends", ["case", *forms], sizes)
in_two_halves()

# %% [markdown]
"""
## Exercise 1: a different layout of the sums

In the fourth line of the table J is sharded in both factors, and the sums are cut by rows. Let
`sharded_matmul` return sums that are cut by columns: C[I, K_X]. Does it send more?
"""

# %% tags=["solution"]
specs, out = (COLUMNS, ROWS), P(None, "x")
by_columns = by_hand(
    lambda a, b: sharded_matmul(a, b, *specs, out, algorithm="ring"), mesh, specs, out
)
operands = place(mesh, a, COLUMNS), place(mesh, b, ROWS)
program = jax.jit(by_columns).lower(*operands).compile()
agree(algebra(*specs, out), numpy=a @ b, ringcoll=program(*operands))
print(f"it sends {sent(program).bytes:g} bytes, half of C: as many as by rows")
assert sent(program).bytes == i * k * 4 / 2

# %% [markdown]
"""
## Exercise 2: gather, or sum

In the second line of the table A's columns are gathered. Instead, each rank can multiply its
columns of A by the matching rows of B, which it has, and an all-reduce can sum these terms. Write
that. For which sizes of C does it send less than the gather?
"""


# %% tags=["solution"]
def by_terms(a: Array, b: Array) -> Array:
    mine = jax.lax.dynamic_slice_in_dim(b, jax.lax.axis_index("x") * a.shape[1], a.shape[1])
    return lax.psum(a @ mine, "x", algorithm="ring")


operands = place(mesh, a, COLUMNS), place(mesh, b, WHOLE)
terms = by_hand(by_terms, mesh, (COLUMNS, WHOLE), WHOLE)
program = jax.jit(terms).lower(*operands).compile()
agree("by terms", numpy=a @ b, ringcoll=program(*operands))
by_gather, by_sum = i * j * 4 / 2, 2 * i * k * 4 / 2  # (n-1)/n of A; 2(n-1)/n of C
print(f"gather: {by_gather:g} bytes; sums: {by_sum:g}. Sums send less if K is less than J / 2")
assert sent(program).bytes == by_sum
