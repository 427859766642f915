# %% [markdown]
"""
# Every layout of a matrix, timed

A product and a sum in every layout of a matrix on a 2-D mesh, compared with one device.

    python -m examples.tutorials.layouts

A matrix on a mesh of x by y devices has nine layouts. Each of its dimensions is cut along x, along
y, along both, or along none, and no axis cuts both dimensions. In each layout, two computations are
timed: a product with a second matrix, and the sum of each column. Each is timed on one device, by
`jit` with the shardings of the operands, and by ringcoll in `shard_map`.

The times are those of this machine. Eight virtual CPU devices share its cores, so a ratio says how
much work and communication a layout adds, not how much eight chips would save.
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
## The two computations

On a rank, `a` is a shard. If the columns of `a` are cut, the rows of `b` are cut over the same
axes. The rank multiplies its columns with its rows, and the products are added up over these axes.
The sum of a column adds up over the axes that cut the rows. So a rank computes on its shards as one
device would, and then sums over axes.
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
    """The computation of a rank: its part, then a sum over each axis of the mesh in turn."""

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
            result, spent = timed(program, *operands)
            np.testing.assert_array_equal(result, expected)
            ratios.append(f"{spent / alone:.1f}")
        added = axes_of(spec, work.added)
        silent += [] if added else [spec]
        rows.append((spec, *ratios, " and ".join(added) or "nothing is sent"))
    title = f"Measured: {work.name} of [{SIZE}, {SIZE}], on one device {alone:.2f} ms"
    show(f"{title}; below, times as long", ["", "jit", "ringcoll", "added up over"], rows)
    print(f"one device = jit = ringcoll in all {len(LAYOUTS)} layouts, exactly")
    return silent


for work in WORK:
    compared(work)

# %% [markdown]
"""
The product sends nothing if only rows are cut. The sum of columns sends nothing if only columns are
cut. With `P()` every device does all the work.

## Exercise 1: sums of rows

In which layouts does the sum of each row send nothing? Which of the two computations above is like
it? Answer before you run it. Then write it as `Work`.
"""

# %% tags=["solution"]
row_sums = Work("row_sums", lambda a, b: a.sum(1), 1)
assert compared(row_sums) == [P(), P("x"), P("y"), P(("x", "y"))]
print("only rows may be cut, as for the product")

# %% [markdown]
"""
## Exercise 2: keep a part of the sum

For `P(None, "y")` every rank gets the whole product. Let each rank get only its quarter of the
rows. Which collective does that, and what share of the bytes does it send?
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
