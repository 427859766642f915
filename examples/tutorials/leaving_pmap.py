# %% [markdown]
# # The same training step by `pmap`, by `jit`, by `shard_map`, and by ringcoll.
#
#     python -m examples.tutorials.leaving_pmap
#
# `pmap` runs a function on every device, on a slice of each argument along a new first dimension.
# What you see is that dimension; where the slices are, you do not. `jit` sees whole arrays, and the
# compiler cuts them. `shard_map` sees shards like `pmap`, but of ordinary arrays on a mesh, so it
# can be mixed with `jit` and has as many axes as the mesh.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # instead of eight real ones
RANKS, ROWS, WIDTH, RATE, STEPS = 8, 4, 16, 2.0**-6, 3
mesh = jax.make_mesh((RANKS,), ("data",), (AxisType.Auto,))
random = np.random.default_rng(0)
# Integers and powers of two: nothing is rounded, and all ways agree in every bit.
batch = random.integers(-2, 3, (RANKS * ROWS, WIDTH)).astype(np.float32)
weights = random.integers(-2, 3, WIDTH).astype(np.float32)


def loss(weights, rows):
    """Linear, with a kink: the gradient is a mean of rows."""
    return jax.nn.relu(rows @ weights).mean()


# %% [markdown]
# ## By pmap
#
# The weights are copied to every device by hand, as a dimension of 8. The batch is reshaped. The
# gradient is averaged along the named axis. The new weights come back 8 times.

# %%


def pmapped(weights, rows):
    gradient = jax.lax.pmean(jax.grad(loss)(weights, rows), "data")
    return weights - RATE * gradient


step = jax.pmap(pmapped, axis_name="data")
stacked = jnp.broadcast_to(weights, (RANKS, WIDTH))
slices = batch.reshape(RANKS, ROWS, WIDTH)
for _ in range(STEPS):
    stacked = step(stacked, slices)
results = {"pmap": np.asarray(stacked[0])}
print(f"pmap:      weights {stacked.shape}, batch {slices.shape}")
np.testing.assert_array_equal(stacked, jnp.broadcast_to(stacked[0], stacked.shape))

# %% [markdown]
# ## By jit
#
# No axis is named, and nothing is averaged by hand: the loss is a mean over the whole batch, and
# the batch is cut. Arrays have their own shapes. This is where to go from `pmap` if no line of the
# step mentions the axis but the `pmean` of gradients.

# %%
rows = jax.device_put(batch, NamedSharding(mesh, P("data")))
whole = jax.device_put(weights, NamedSharding(mesh, P()))
step = jax.jit(lambda weights, rows: weights - RATE * jax.grad(loss)(weights, rows))
made = whole
for _ in range(STEPS):
    made = step(made, rows)
results["jit"] = np.asarray(made)
print(f"jit:       weights {made.shape}, batch {rows.shape}, {made.sharding.spec}")

# %% [markdown]
# ## By shard_map
#
# The body is that of `pmap`. Specs take the place of the extra dimension: `P()` is what `pmap`
# calls `in_axes=None`, and `P("data")` cuts the first dimension. One thing differs. The weights are
# known to be the same on all ranks, so JAX adds up their gradient itself. `pcast` makes them a
# rank's own, and the gradient with them; then the mean is yours to take, by the algorithm of your
# choice.

# %%


def mapped(pmean):
    """The step of a rank, with a function that averages over ranks."""

    def of_rank(weights, rows):
        own = jax.lax.pcast(weights, "data", to="varying")
        return weights - RATE * pmean(jax.grad(loss)(own, rows), "data")

    of_mesh = jax.shard_map(of_rank, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    return jax.jit(of_mesh)


def ring_mean(x, axis_name):
    return ringcoll.pmean(x, axis_name, algorithm="ring")


programs = {"shard_map": mapped(jax.lax.pmean), "ringcoll": mapped(ring_mean)}
for name, step in programs.items():
    made = whole
    for _ in range(STEPS):
        made = step(made, rows)
    results[name] = np.asarray(made)
    sent = step.lower(made, rows).as_text()
    counts = {k: sent.count(f"stablehlo.{k}") for k in ("all_reduce", "collective_permute")}
    print(f"{name + ':':10} weights {made.shape}, batch {rows.shape}, {counts}")

# %% [markdown]
# ## An old step as it is
#
# `pmap` code that you do not want to change yet can have ringcoll's algorithms too:
# `ringcoll.replacing` swaps the collectives while the step is traced.

# %%
with ringcoll.replacing(jax.lax, algorithm="ring"):
    step = jax.pmap(pmapped, axis_name="data")
    stacked = jnp.broadcast_to(weights, (RANKS, WIDTH))
    sent = step.lower(stacked, slices).as_text()
    for _ in range(STEPS):
        stacked = step(stacked, slices)
results["pmap, replaced"] = np.asarray(stacked[0])
permutes = sent.count("stablehlo.collective_permute")
print(f"pmap, replaced: {permutes} collective_permute")
assert permutes == 2 * (RANKS - 1)

# %%
for name, made in results.items():
    np.testing.assert_array_equal(made, results["pmap"], err_msg=name)
print(" = ".join(results), "exactly, after", STEPS, "steps")

# %% [markdown]
# | | pmap | jit | shard_map |
# |---|---|---|---|
# | arrays | a first dimension of devices | as they are | as they are |
# | parameters | copied by hand, one for each device | `P()` | `P()` |
# | cut over two axes | no | yes | yes |
# | collectives | yours | the compiler's | yours |
#
# Leave `pmap` when a model no longer fits on a device, when the batch and the weights are cut along
# different axes, or when the reshapes are what you debug. Go to `jit` if the step names no axis, to
# `shard_map` if it does.
