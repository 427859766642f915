# %% [markdown]
"""
# Arrays on a mesh

Which device holds which part of an array, and what each rank passes to a collective and gets back.

    python -m examples.tutorials.arrays

A `Mesh` gives devices coordinates. A `PartitionSpec` says, for each dimension of an array, along
which axes of the mesh it is cut. Along an axis that it does not name, the array is repeated.
Outside `shard_map` you see whole arrays, wherever their parts are. Inside you see shards, and a
device gets a different device's shard only by a message.
"""

# %%
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll import lax
from ringcoll.learn import agree, make_mesh, show, start

start(8)
SPECS = {
    "rows over x, columns over y": P("x", "y"),
    "rows over x, the same along y": P("x"),
    "columns over y, the same along x": P(None, "y"),
    "rows over both, x first": P(("x", "y")),
}


# %% [markdown]
"""
## One array in several layouts

(`jax.debug.visualize_array_sharding(x)` draws the same in colours, if `rich` is installed.)
"""

# %%


def show_devices(x: Any) -> None:
    """Which devices hold each part of a matrix; parts by their first row and column."""
    parts = defaultdict(list)
    for shard in x.addressable_shards:
        parts[tuple(part.start or 0 for part in shard.index)].append(shard.device.id)
    rows, columns = (sorted(set(starts)) for starts in zip(*parts, strict=True))
    cells = [[" ".join(map(str, parts[row, column])) for column in columns] for row in rows]
    heads = ["from row", *(f"from column {column}" for column in columns)]
    show("Devices", heads, [[row, *held] for row, held in zip(rows, cells, strict=True)])


def placements() -> None:
    """One array in several layouts."""
    mesh, values = make_mesh(x=2, y=4), np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    print("the mesh, by device:", *np.vectorize(lambda d: d.id)(mesh.devices).tolist())
    for words, spec in SPECS.items():
        x = jax.device_put(values, NamedSharding(mesh, spec))
        copies = [shard for shard in x.addressable_shards if shard.replica_id]
        print(f"\n{spec}: {words}; a shard is {x.sharding.shard_shape(x.shape)}, ", end="")
        print(f"{8 - len(copies)} are different and {len(copies)} copies")
        show_devices(x)
        agree("  each shard is its slice of the array", numpy=values, device_put=x)


placements()

# %% [markdown]
"""
## Devices compute on the parts that they hold
"""

# %%


def following() -> None:
    """The sharding of an operand decides how a result is sharded."""
    mesh = make_mesh(x=2, y=4)
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, P("x", "y")))
    print("\nthe sharding of a result follows from its operand's: for x as P('x', 'y')")
    for words, result in {
        "2 x + 1": jax.jit(lambda x: 2 * x + 1)(x),
        "x.T": jax.jit(jnp.transpose)(x),
        "x.sum(1)": jax.jit(lambda x: x.sum(1))(x),  # this sum sends: see `collectives`
    }.items():
        print(f"  {words:9} is {result.sharding.spec}")
    moved = jax.device_put(x, NamedSharding(mesh, P(None, "y")))
    agree("a second device_put moves it", before=np.asarray(x), after=moved)


following()

# %% [markdown]
"""
## What a rank passes to a collective, and what it gets
"""

# %%


def collectives() -> None:
    """Inside shard_map: each rank's operand and result."""
    mesh = make_mesh(x=4)
    calls = {
        "psum": lambda lib, x, **options: lib.psum(x, "x", **options),
        "all_gather": lambda lib, x, **options: lib.all_gather(x, "x", tiled=True, **options),
        "psum_scatter": lambda lib, x, **options: lib.psum_scatter(x, "x", tiled=True, **options),
        "all_to_all": lambda lib, x, **options: lib.all_to_all(x, "x", 0, 0, tiled=True, **options),
        "ppermute": lambda lib, x: lib.ppermute(x, "x", [(r, (r + 1) % 4) for r in range(4)]),
    }
    x = np.array([[10 * rank + i for i in range(4)] for rank in range(4)], np.int32)
    print("\nranks 0 to 3 pass", *x.tolist())
    rows = []
    for name, call in calls.items():
        options = {} if name == "ppermute" else {"algorithm": "bruck"}  # all others have it

        def every(lib: Any, call: Any = call, **options: str) -> jax.Array:
            """The result of every rank, one after the other."""
            mapped = jax.shard_map(
                lambda x: call(lib, x[0], **options)[None],
                mesh=mesh,
                in_specs=P("x"),
                out_specs=P("x"),
            )
            return jax.jit(mapped)(x)

        ours = every(lax, **options)
        agree(f"  {name}", lax=every(jax.lax), ringcoll=ours)
        results = np.asarray(ours).tolist()
        rows.append((name, x.shape[1:], ours.shape[1:], results[0], results[3]))
    heads = ["", "passes", "gets", "rank 0 gets", "rank 3 gets"]
    show("What a rank passes and gets", heads, rows)


collectives()

# %% [markdown]
"""
## Exercise 1: find the spec

The mesh has x=2 and y=4, and the array is [8, 16]. Which `PartitionSpec` gives each device all rows
of two columns, other columns than those of any other device? Which gives each device all columns of
four rows, with each row on four devices?
"""

# %% tags=["solution"]
mesh, values = make_mesh(x=2, y=4), np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
for spec, shape in {P(None, ("x", "y")): (8, 2), P("x"): (4, 16)}.items():
    shard = jax.device_put(values, NamedSharding(mesh, spec)).addressable_shards[0].data
    print(spec, "gives the first device", shard.shape)
    assert shard.shape == shape

# %% [markdown]
"""
## Exercise 2: predict a collective

Ranks 0 to 3 pass `[r, r + 10, r + 20, r + 30]` to `lax.all_to_all(x, "x", 0, 0, tiled=True)`. What
does rank 2 get? What does every rank get if the result is passed to a second `all_to_all`?
"""


# %% tags=["solution"]
def swapped(x: jax.Array) -> jax.Array:
    return lax.all_to_all(x[0], "x", 0, 0, tiled=True, algorithm="bruck")[None]


passed = np.array([[rank + 10 * i for i in range(4)] for rank in range(4)])
run = jax.jit(jax.shard_map(swapped, mesh=make_mesh(x=4), in_specs=P("x"), out_specs=P("x")))
print("rank 2 gets", np.asarray(run(passed))[2])
agree("rank 2 gets the third number of each rank", columns=passed.T, ringcoll=run(passed))
agree("a second one restores the operands", passed=passed, ringcoll=run(run(passed)))
