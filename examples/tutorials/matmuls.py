"""The four cases of a product of two sharded matrices, C[I, K] = A[I, J] B[J, K].

    python -m examples.tutorials.matmuls

An index says over which axis of the mesh a dimension is cut: A[I_X, J] is a block of rows on each
rank along X. Which dimensions are cut decides what has to be sent:

1. nowhere along J: nothing, each rank has what its block of C takes;
2. along J in one factor: that factor is gathered, or the blocks of it come by one after another;
3. along J in both: each rank has a part of the sum of every element: they are added up, whole
   (all-reduce) or each rank the part that it keeps (reduce-scatter, half of the bytes);
4. I and K over one axis: one factor is gathered, for of blocks alone C would have the diagonal.

Each is done by the compiler (`jit`, told how operands and result are sharded), by `jax.lax` in
`shard_map`, and by `ringcoll.sharded_matmul`, which hides the collective under the product. (The
cases are those of "How to Scale Your Model", 2025, chapter 3.)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.tutorials.shared import agree, integers, make_mesh, place, sent, show
from ringcoll import lax, pricing, sharded_matmul

SIZES = {"I": 16, "J": 32, "K": 24}
Local = Callable[[Array, Array], Array]
Case = tuple[P, P, P, Local]


def gathered(x: Array, dim: int) -> Array:
    """The shards of all ranks along x, end to end."""
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


def main() -> None:
    """All cases, and what an all-reduce is made of."""
    mesh = make_mesh(x=2, y=2)
    i, j, k = SIZES.values()
    a, b = integers(i, j), integers(j, k, seed=1)
    rows = []
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
        rows.append((words, *found, *(one.bytes for one in found)))
    heads = ["case", *forms, *(f"bytes sent\n{name}" for name in forms)]
    show("Collectives in the compiled programs, and what a rank sends", heads, rows)
    in_two_halves()


def by_hand(local: Local, mesh: Any, specs: tuple[P, P], out: P) -> Local:
    """A function of shards over the mesh."""
    # (JAX does not know that what was gathered is the same everywhere, so do not let it ask.)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)


def in_two_halves() -> None:
    """An all-reduce is a reduce-scatter, and an all-gather of what that leaves."""
    n = 4
    mesh, host = make_mesh(x=n), integers(n, 3 * n, 5)
    x = place(mesh, host, P("x"))
    ring: Any = {"algorithm": "ring"}

    def two_halves(x: Array) -> Array:
        part = lax.psum_scatter(x, "x", tiled=True, **ring)
        return lax.all_gather(part, "x", tiled=True, **ring)

    made, found = {}, {}
    for name, function in {
        "lax": lambda x: jax.lax.psum(x, "x"),
        "two_halves": two_halves,
        "ringcoll": lambda x: lax.psum(x, "x", **ring),
    }.items():

        def per_rank(x: Array, function: Any = function) -> Array:
            return function(x[0])

        mapped = jax.shard_map(per_rank, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
        program = jax.jit(mapped).lower(x).compile()
        made[name], found[name] = program(x), sent(program).bytes
    agree("an all-reduce in two halves", numpy=host.sum(0), **made)
    shard = host[0].size // n
    halves = [
        pricing.wire_bytes(half, "ring", (n,), shard, x.itemsize)
        for half in ("psum_scatter", "all_gather")
    ]
    whole = pricing.wire_bytes("psum", "ring", (n,), shard, x.itemsize)
    print(f"bytes by the schedules: {halves[0]:g} + {halves[1]:g} = {whole:g}; compiled: {found}")
    if not found["two_halves"] == found["ringcoll"] == whole == sum(halves):
        raise AssertionError("the bytes of the compiled programs are not those of the schedules")


if __name__ == "__main__":
    main()
