# %% [markdown]
"""
# Leaving pmap

The same training step with `pmap`, `jit`, `shard_map`, and ringcoll.

    python -m examples.tutorials.leaving_pmap

`pmap` runs a function on every device. Each argument gets a new first dimension, and each device
gets one slice of it. You see that dimension, but not which device has which slice. `jit` sees whole
arrays, and the compiler cuts them. `shard_map` sees shards as `pmap` does, but these are shards of
ordinary arrays on a mesh. So it can be mixed with `jit`, and has as many axes as the mesh.
"""

# %%
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll.learn import agree, integers, make_mesh, messages, place, sent, start

start(8)
RANKS, ROWS, WIDTH, RATE, STEPS = 8, 4, 16, 2.0**-6, 3
mesh = make_mesh(data=RANKS)
# Integers and powers of two: nothing is rounded, and all ways agree in every bit.
batch = integers(RANKS * ROWS, WIDTH, largest=2)
weights = integers(WIDTH, seed=1, largest=2)


def loss(weights: Array, rows: Array) -> Array:
    """Linear, with a kink: the gradient is a mean of rows."""
    return jax.nn.relu(rows @ weights).mean()


def trained(step: Callable[..., Array], weights: Array, rows: Array) -> Array:
    """The weights after some steps."""
    for _ in range(STEPS):
        weights = step(weights, rows)
    return weights


# %% [markdown]
"""
## By pmap

You copy the weights to every device yourself, as a dimension of 8, and reshape the batch. The step
averages the gradient along the named axis. The result has 8 copies of the new weights.
"""

# %%


def pmapped(weights: Array, rows: Array) -> Array:
    """The step of a rank."""
    gradient = jax.lax.pmean(jax.grad(loss)(weights, rows), "data")
    return weights - RATE * gradient


stacked = jnp.broadcast_to(weights, (RANKS, WIDTH))
slices = jnp.asarray(batch.reshape(RANKS, ROWS, WIDTH))
copies = np.asarray(trained(jax.pmap(pmapped, axis_name="data"), stacked, slices))
results = {"pmap": copies[0]}
print(f"pmap:      weights {copies.shape}, batch {slices.shape}")
assert (copies == copies[0]).all()
assert (copies[0] != weights).any()

# %% [markdown]
"""
## By jit

The step names no axis, and does not average gradients: its loss is a mean over the whole batch, and
the batch is sharded. Arrays keep their own shapes. Choose `jit` if the `pmean` of gradients is the
only line of your step that names the axis.
"""

# %%
rows, initial = place(mesh, batch, P("data")), place(mesh, weights, P())
jitted = jax.jit(lambda weights, rows: weights - RATE * jax.grad(loss)(weights, rows))
final = trained(jitted, initial, rows)
results["jit"] = np.asarray(final)
print(f"jit:       weights {final.shape}, batch {rows.shape}")
agree("weights after three steps", pmap=results["pmap"], jit=final)

# %% [markdown]
"""
## By shard_map

The body is that of `pmap`. Specs take the place of the extra dimension: `P()` is what `pmap` calls
`in_axes=None`, and `P("data")` cuts the first dimension. One thing differs. JAX knows that the
weights are the same on all ranks, so it adds up their gradient itself. `pcast` makes the weights,
and so the gradient, a rank's own. Then you take the mean yourself, with the algorithm of your
choice.
"""

# %%


def over_mesh(of_rank: Callable[..., Array]) -> jax.stages.Wrapped:
    """A rank's step, over the mesh."""
    in_specs = P(), P("data")
    return jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=in_specs, out_specs=P()))


def mapped(pmean: Callable[..., Array], **options: str) -> jax.stages.Wrapped:
    """The step with a function that averages over ranks."""

    def of_rank(weights: Array, rows: Array) -> Array:
        own = jax.lax.pcast(weights, "data", to="varying")
        return weights - RATE * pmean(jax.grad(loss)(own, rows), "data", **options)

    return over_mesh(of_rank)


programs = {
    "shard_map": mapped(jax.lax.pmean),
    "ringcoll": mapped(ringcoll.pmean, algorithm="ring"),
}
for name, step in programs.items():
    final = trained(step, initial, rows)
    results[name] = np.asarray(final)
    found = sent(step.lower(initial, rows).compile())
    print(f"{name + ':':10} weights {final.shape}, batch {rows.shape}, {found}")
    ways: dict[str, Any] = {"pmap": results["pmap"], name: final}
    agree("weights after three steps", **ways)

# %% [markdown]
"""
## Keep pmap for now

`pmap` code that you do not want to change yet can also use ringcoll's algorithms:
`ringcoll.replaced` puts ours in place of the collectives of its program.
"""

# %%
replaced = jax.pmap(ringcoll.replaced(pmapped, algorithm="ring"), axis_name="data")
permutes = replaced.lower(stacked, slices).as_text().count("stablehlo.collective_permute")
results["pmap, replaced"] = np.asarray(trained(replaced, stacked, slices)[0])
print(f"pmap, replaced: {permutes} collective_permute")
assert permutes == 2 * (RANKS - 1)

# %%
for name, result in results.items():
    np.testing.assert_array_equal(result, results["pmap"], err_msg=name)
print(" = ".join(results), "exactly, after", STEPS, "steps")

# %% [markdown]
"""
| | pmap | jit | shard_map |
|---|---|---|---|
| arrays | a first dimension of devices | as they are | as they are |
| parameters | you copy them, once for each device | `P()` | `P()` |
| cut over two axes | no | yes | yes |
| collectives | yours | the compiler's | yours |

Leave `pmap` when a model no longer fits on a device, when the batch and the weights are cut along
different axes, or when the reshapes cause your bugs. Choose `jit` if the step names no axis, and
`shard_map` if it does.

## Exercise 1: cut the weights too

With `pmap` every device has all weights. Let each device keep an eighth of them, with `jit`. What
changes in the step, and what does it send then?
"""

# %% tags=["solution"]
eighths = place(mesh, weights, P("data"))
cut = jax.jit(jitted, out_shardings=eighths.sharding)
print("only the sharding of the weights changes:", sent(cut.lower(eighths, rows).compile()))
kept = trained(cut, eighths, rows)
agree("weights, an eighth on each device", pmap=results["pmap"], jit=kept)
assert kept.addressable_shards[0].data.shape == (WIDTH // RANKS,)

# %% [markdown]
"""
## Exercise 2: without `pcast`

Take `pcast` out of the step with `shard_map`. JAX then adds up the gradient. What must your step
still do? Why does a `pmean` not do it?
"""


# %% tags=["solution"]
def summed(weights: Array, rows: Array) -> Array:
    total = jax.grad(loss)(weights, rows)  # over all ranks already, and the same on all
    return weights - RATE * total / RANKS


without = over_mesh(summed)
agree("weights", pmap=results["pmap"], shard_map=trained(without, initial, rows))
assert messages(without.lower(initial, rows).compile()) == 0  # JAX's own all-reduce sums
print("divide by the number of ranks: a mean of equal sums is the sum")
