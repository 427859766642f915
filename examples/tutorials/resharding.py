# %% [markdown]
"""
# From one layout to another

The collective that changes the layout of an array, and how many bytes it sends.

    python -m examples.tutorials.resharding

A matrix on a mesh of 2 x 4 devices is moved from one layout to another in two ways. One is a
collective in `shard_map`, which sends the bytes of its schedule. In the other way you give the
compiler the new layout (`jit` with `out_shardings`, `device_put`), and it inserts the collectives.
Partial sums are an array with one more dimension, which is cut so that each device has one term.
"""

# %%
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll import lax
from ringcoll.costs import wire_bytes
from ringcoll.learn import agree, integers, make_mesh, place, sent, show, start

start(8)
ROWS, COLUMNS = 16, 24
SIZE = ROWS * COLUMNS
RING = "ring"
#: Block b is on rank b in the order (x, y), and goes to rank b in the order (y, x).
SWAP = [(2 * y + x, 4 * x + y) for x in range(2) for y in range(4)]
#: The ranks (x, y) have quarters 2x and 2x + 1; each rank sends one quarter to one rank.
QUARTERS = [(4 * x + y, 4 * (y // 2) + 2 * x + y % 2) for x in range(2) for y in range(4)]


# %% [markdown]
"""
## The changes
"""

# %%


class Change(NamedTuple):
    """A change of layout: both layouts, a function of a rank's shard, and the bytes it sends."""

    words: str
    before: P
    after: P
    by_hand: Callable[[Array], Array]
    bytes: float
    sums: bool = False  # whether the first dimension has terms to add up


def ring(collective: str, ranks: int) -> float:
    """The bytes of a ring's schedule for the whole matrix over so many ranks."""
    return wire_bytes(collective, RING, (ranks,), SIZE / ranks, 4)


def rows(x: Array, number: Array, parts: int) -> Array:
    """One of several equal parts of the rows."""
    size = x.shape[0] // parts
    return jax.lax.dynamic_slice_in_dim(x, number * size, size)


def my_rows(x: Array) -> Array:
    """This rank's part along y of rows that all ranks have."""
    return rows(x, jax.lax.axis_index("y"), 4)


def gathered_and_cut(x: Array) -> Array:
    """Gather all rows, and keep a rank's own."""
    return my_rows(lax.all_gather(x, "x", tiled=True, algorithm=RING))


def cut_and_sent(x: Array) -> Array:
    """Send only the rows that are needed; ranks with the same rows send different parts of them."""
    return lax.ppermute(rows(x, jax.lax.axis_index("y") % 2, 2), ("x", "y"), QUARTERS)


CHANGES = (
    Change(
        "rows to columns: all-to-all", P("y"), P(None, "y"),
        lambda x: lax.all_to_all(x, "y", 1, 0, tiled=True, algorithm="pairwise"),
        wire_bytes("all_to_all", "pairwise", (4,), SIZE / 4 / 4, 4),
    ),
    Change(
        "sharded to the same everywhere: all-gather", P("y"), P(),
        lambda x: lax.all_gather(x, "y", tiled=True, algorithm=RING), ring("all_gather", 4),
    ),
    Change("the same everywhere to sharded: a slice", P(), P("y"), my_rows, 0),
    Change(
        "partial sums to sharded: reduce-scatter", P("y"), P("y"),
        lambda x: lax.psum_scatter(x[0], "y", tiled=True, algorithm=RING),
        ring("psum_scatter", 4), sums=True,
    ),
    Change(
        "partial sums to sums everywhere: all-reduce", P("y"), P(),
        lambda x: lax.psum(x[0], "y", algorithm=RING), ring("psum", 4), sums=True,
    ),
    Change(
        "from one axis to the other: all-gather, a slice", P("x"), P("y"),
        gathered_and_cut, ring("all_gather", 2),
    ),
    Change("the same: a slice, a permutation", P("x"), P("y"), cut_and_sent, 4 * SIZE / 4),
    Change(
        "both axes swapped: a permutation", P(("x", "y")), P(("y", "x")),
        lambda x: lax.ppermute(x, ("x", "y"), SWAP), 4 * SIZE / 8,
    ),
)  # fmt: skip


# %% [markdown]
"""
## Compiled and compared
"""

# %%


def row(mesh: Mesh, change: Change) -> tuple[object, ...]:
    """The bytes that a change sends, by ringcoll and by the compiler.

    Raises:
        AssertionError: the results differ, or the bytes are not those of the schedule.
    """
    words, before, after, by_hand, by_schedule, sums = change
    host = integers(*(4,) * sums, ROWS, COLUMNS)
    x, wanted = place(mesh, host, before), NamedSharding(mesh, after)
    # check_vma=False: JAX cannot know that a permutation makes equal copies.
    mapped = jax.shard_map(by_hand, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)
    ours = jax.jit(mapped).lower(x).compile()
    by_compiler = jax.jit(lambda x: x.sum(0) if sums else x, out_shardings=wanted)
    theirs = by_compiler.lower(x).compile()

    results = {"jit": theirs(x), "ringcoll": ours(x)}
    if not sums:
        results["device_put"] = jax.device_put(x, wanted)
    for name, result in results.items():
        if not result.sharding.is_equivalent_to(wanted, 2):
            raise AssertionError(f"{words}: {name} leaves it {result.sharding}")
    agree(words, numpy=host.sum(0) if sums else host, **results)
    if (counted := sent(ours).permuted) != by_schedule:
        raise AssertionError(f"{words}: {counted} B are sent, by the schedule {by_schedule}")
    found = sent(theirs)
    sizes = (f"{size:g}" for size in (by_schedule, counted, found.bytes))
    return words, str(before), str(after), *sizes, found


mesh = make_mesh(x=2, y=4)
sizes = "bytes by\nschedule", "compiled", "by jit\n(at best)"
heads = ["", "from", "to", *sizes, "\ncollectives"]
table = [row(mesh, change) for change in CHANGES]
show(f"Compiled: bytes that a device sends, of {SIZE * 4}", heads, table)

# %% [markdown]
"""
## Exercise 1: forget one axis

Go from `P(("x", "y"))`, with an eighth of the rows on each device, to `P("x")`, with half of the
rows on each. Which collective does that, over which axis, and how many bytes does it send? Write it
as a `Change`. `row` checks the result and the bytes."""

# %% tags=["solution"]
forget = Change(
    "one axis less: all-gather over it", P(("x", "y")), P("x"),
    lambda x: lax.all_gather(x, "y", tiled=True, algorithm=RING),
    wire_bytes("all_gather", RING, (4,), SIZE / 8, 4),
)  # fmt: skip
show("Compiled: bytes that a device sends", heads, [row(mesh, forget)])

# %% [markdown]
"""
## Exercise 2: columns to rows

Write the reverse of the first change: from `P(None, "y")` to `P("y")`. How does the call differ,
and how do the bytes differ?"""

# %% tags=["solution"]
back = Change(
    "columns to rows: all-to-all", P(None, "y"), P("y"),
    lambda x: lax.all_to_all(x, "y", 0, 1, tiled=True, algorithm="pairwise"),
    wire_bytes("all_to_all", "pairwise", (4,), SIZE / 4 / 4, 4),
)  # fmt: skip
show("Compiled: bytes that a device sends", heads, [row(mesh, back)])
assert back.bytes == CHANGES[0].bytes
