# %% [markdown]
"""
# Every layout of a matrix, timed

Every layout of a matrix on a 2-D mesh: a product and a sum, sharded against unsharded.

    python -m examples.tutorials.layouts

A matrix on a mesh of x by y devices has nine layouts: each of its dimensions is cut along x,
along y, along both, or along none, and no axis cuts both. For each, two things are timed: a
product with a matrix that is the same everywhere, and the sum of its columns. They are timed on
one device, by `jit` with the shardings of the operands, and by ringcoll in `shard_map`.

The times are of this machine. Eight virtual CPU devices share its cores, so a ratio says how much
work and communication a layout adds, not how much eight chips would save.
"""

# %%
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll import lax
from ringcoll.learn import agree, integers, make_mesh, place, sent, show, start

start(8)
mesh = make_mesh(x=2, y=4)
SIZE, REPEATS = 256, 5
LAYOUTS = [P(), P("x"), P("y"), P(("x", "y")), P(None, "x"), P(None, "y")]
LAYOUTS += [P(None, ("x", "y")), P("x", "y"), P("y", "x")]
a, b = (integers(SIZE, SIZE, seed=seed, largest=2) for seed in range(2))

# %% [markdown]
"""
## What is to be computed

On a rank, `a` is a shard. If its columns are cut, the rank multiplies them with the rows of `b`
that they meet, and the products are added up over the axes that cut them. The sum of a column
adds up over the axes that cut the rows. So what a rank computes is what one device computes, and
then a sum over axes.
"""

# %%


class Work(NamedTuple):
    """A function of both matrices, and the dimension of `a` over which it adds up."""

    name: str
    function: Callable[[Array, Array], Array]
    added: int


WORK = Work("product", lambda a, b: a @ b, 1), Work("column_sums", lambda a, b: a.sum(0), 0)


def axes_of(spec: P, dim: int) -> tuple[str, ...]:
    """The axes along which a spec cuts a dimension."""
    entry: Any = spec[dim] if dim < len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def per_rank(work: Work, spec: P) -> Callable[[Array, Array], Array]:
    """What a rank does: its part, then a sum over axes of the mesh, one after the other."""

    def function(a: Array, b: Array) -> Array:
        terms = work.function(a, b)
        for axis in axes_of(spec, work.added):
            terms = lax.psum(terms, axis, algorithm="ring")
        return terms

    return function


def timed(program: Callable[..., Array], *operands: Array) -> tuple[np.ndarray, float]:
    """The result, and the median of some runs in milliseconds."""
    result, times = jax.block_until_ready(program(*operands)), []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        jax.block_until_ready(program(*operands))
        times.append(1e3 * (time.perf_counter() - begun))
    return np.asarray(result), median(times)


# %% [markdown]
"""
## Side by side
"""

# %%


def compared(work: Work) -> list[P]:
    """Time a computation in every layout; returns the layouts in which nothing is sent."""
    one = [jax.device_put(m, jax.devices()[0]) for m in (a, b)]
    expected, alone = timed(jax.jit(work.function), *one)
    rows, silent = [], []
    for spec in LAYOUTS:
        ins, out = (spec, P(axes_of(spec, 1) or None)), P(axes_of(spec, 1 - work.added) or None)
        operands = [place(mesh, m, s) for m, s in zip((a, b), ins, strict=True)]
        by_jit = jax.jit(work.function, out_shardings=NamedSharding(mesh, out))
        mapped = jax.shard_map(per_rank(work, spec), mesh=mesh, in_specs=ins, out_specs=out)
        ratios = []
        for program in (by_jit, jax.jit(mapped)):
            made, spent = timed(program, *operands)
            np.testing.assert_array_equal(made, expected)
            ratios.append(f"{spent / alone:.1f}")
        added = axes_of(spec, work.added)
        silent += [] if added else [spec]
        rows.append((spec, *ratios, " and ".join(added) or "nothing is sent"))
    title = f"Measured: {work.name} of [{SIZE}, {SIZE}], on one device {alone:.2f} ms"
    show(f"{title}; below, times one device", ["", "jit", "ringcoll", "added up over"], rows)
    print(f"one device = jit = ringcoll in all {len(LAYOUTS)} layouts, exactly")
    return silent


for work in WORK:
    compared(work)

# %% [markdown]
"""
A product sends nothing if only rows are cut, a sum of columns nothing if only columns are. With
`P()` every device does all the work.

## Exercise 1: sums of rows

Before you run it: in which layouts does the sum of each row send nothing? Which of the two
computations above is it like? Write it as `Work`.
"""

# %% tags=["solution"]
row_sums = Work("row_sums", lambda a, b: a.sum(1), 1)
assert compared(row_sums) == [P(), P("x"), P("y"), P(("x", "y"))]
print("only rows may be cut, as for the product")

# %% [markdown]
"""
## Exercise 2: keep a part of the sum

For `P(None, "y")` every rank gets the whole product. Let each keep only its quarter of the rows.
Which collective does that, and how many of the bytes does it send?
"""


# %% tags=["solution"]
def quarter(a: Array, b: Array) -> Array:
    return lax.psum_scatter(a @ b, "y", tiled=True, algorithm="ring")


ins = P(None, "y"), P("y")
operands = [place(mesh, m, s) for m, s in zip((a, b), ins, strict=True)]
programs = {}
for name, function, out in (
    ("all", per_rank(WORK[0], ins[0]), P()),
    ("a quarter", quarter, P("y")),
):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=out)
    programs[name] = jax.jit(mapped).lower(*operands).compile()
    agree(name, numpy=a @ b, ringcoll=programs[name](*operands))
    print(f"  sends {sent(programs[name]).bytes:g} bytes")
assert 2 * sent(programs["a quarter"]).bytes == sent(programs["all"]).bytes
