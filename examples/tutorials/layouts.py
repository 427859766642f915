# %% [markdown]
# # Every layout of a matrix on a 2-D mesh, timed: a product and a sum, sharded against unsharded
#
#     python -m examples.tutorials.layouts
#
# A matrix on a mesh of x by y devices has nine layouts: each of its dimensions is cut along x,
# along y, along both, or along none, and no axis cuts both. For each, two things are timed: a
# product with a matrix that is the same everywhere, and the sum of its columns. They are timed on
# one device, by `jit` with the shardings of the operands, and by ringcoll in `shard_map`.
#
# The times are of this machine. Eight virtual CPU devices share its cores, so a ratio says how much
# work and communication a layout adds, not how much eight chips would save.

# %%
import time
from functools import partial
from statistics import median

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll import lax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # instead of eight real ones
mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)
SIZE, REPEATS = 256, 5
LAYOUTS = [P(), P("x"), P("y"), P(("x", "y")), P(None, "x"), P(None, "y")]
LAYOUTS += [P(None, ("x", "y")), P("x", "y"), P("y", "x")]
random = np.random.default_rng(0)
# Small integers: sums are exact in any order.
a, b = (random.integers(-2, 3, (SIZE, SIZE)).astype(np.float32) for _ in range(2))

# %% [markdown]
# ## What is to be computed
#
# On a rank, `a` is a shard. If its columns are cut, the rank multiplies them with the rows of `b`
# that they meet, and the products are added up over the axes that cut them. The sum of a column
# adds up over the axes that cut the rows.

# %%


def axes_of(spec, dim):
    """The axes along which a spec cuts a dimension."""
    entry = spec[dim] if dim < len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def total(terms, axes):
    """The sum over some axes of the mesh, one after the other, by rings."""
    for axis in axes:
        terms = lax.psum(terms, axis, algorithm="ring")
    return terms


def product(a, b, spec):
    return total(a @ b, axes_of(spec, 1))


def column_sums(a, b, spec):
    return total(a.sum(0), axes_of(spec, 0))


def on_one(a, b, what):
    return a @ b if what is product else a.sum(0)


def timed(program, *operands):
    """The result, and the median of some runs in milliseconds."""
    result, times = jax.block_until_ready(program(*operands)), []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        jax.block_until_ready(program(*operands))
        times.append(1e3 * (time.perf_counter() - begun))
    return np.asarray(result), median(times)


# %% [markdown]
# ## Side by side

# %%
for what in (product, column_sums):
    one = jax.jit(partial(on_one, what=what))
    expected, alone = timed(one, *(jax.device_put(m, jax.devices()[0]) for m in (a, b)))
    print(f"\nMeasured: {what.__name__} of [{SIZE}, {SIZE}], on one device {alone:.2f} ms")
    print(f"{'layout':24}{'jit':>12}{'ringcoll':>12}   times one device; added up over")
    for spec in LAYOUTS:
        added = axes_of(spec, 1 if what is product else 0)
        specs = spec, P(axes_of(spec, 1) or None)
        operands = [
            jax.device_put(m, NamedSharding(mesh, s)) for m, s in zip((a, b), specs, strict=True)
        ]
        rows = spec[0] if len(spec) else None
        columns = spec[1] if len(spec) > 1 else None
        out = P(rows) if what is product else P(columns)
        wanted = NamedSharding(mesh, out)
        by_jit = jax.jit(partial(on_one, what=what), out_shardings=wanted)
        mapped = jax.shard_map(partial(what, spec=spec), mesh=mesh, in_specs=specs, out_specs=out)
        ratios = []
        for program in (by_jit, jax.jit(mapped)):
            made, spent = timed(program, *operands)
            np.testing.assert_array_equal(made, expected)
            ratios.append(spent / alone)
        words = " and ".join(added) or "nothing is sent"
        print(f"{spec!s:24}" + "".join(f"{ratio:12.1f}" for ratio in ratios) + f"   {words}")
    print(f"one device = jit = ringcoll in all {len(LAYOUTS)} layouts, exactly")

# %% [markdown]
# A product sends nothing if only rows are cut, a sum of columns nothing if only columns are. With
# `P()` every device does all the work.
