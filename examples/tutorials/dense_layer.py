# %% [markdown]
"""
# One layer in four ways

One layer, sigmoid(x W + b), written in four ways for several devices.

    python -m examples.tutorials.dense_layer

The rows of x are sharded over both axes of the mesh, and the columns of W over one axis. So devices
with different columns need each other's rows.

- automatic: you shard the arrays, and the compiler inserts the collective;
- explicit: the sharding is part of the type, and JAX refuses an operation that needs a collective
  until you name the sharding of its result;
- manual: you write what one device does with its shards, by `jax.lax`: gather, then multiply;
- the same by ringcoll: multiply each shard of rows while the next one travels.

The results of the four ways, and their gradients by x, W and b, are compared with each other and
with those of one device.
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
from ringcoll.learn import agree, gamma, integers, make_mesh, place, sent, show, start

start(8)
BATCH, WIDTH, FEATURES = 16, 32, 64
SPECS = {"x": P(("data", "model")), "w": P(None, "model"), "b": P("model")}
OUT = P("data", "model")
Layer = Callable[[Array, Array, Array], Array]


# %% [markdown]
"""
## The four ways
"""

# %%


def layer(x: Array, w: Array, b: Array) -> Array:
    """The layer on one device, and in automatic mode, where the program is the same."""
    return jax.nn.sigmoid(x @ w + b)


def explicit(x: Array, w: Array, b: Array) -> Array:
    """Rows and columns are both sharded over "model", so the product needs a sharding."""
    return jax.nn.sigmoid(jnp.einsum("bd,df->bf", x, w, out_sharding=OUT) + b)


def manual(x: Array, w: Array, b: Array) -> Array:
    """`x: [b/8, d], w: [d, f/4], b: [f/4] -> [b/2, f/4]`, on each device."""
    rows = jax.lax.all_gather(x, "model", tiled=True)  # [b/2, d]
    return jax.nn.sigmoid(rows @ w + b)


def overlapped(x: Array, w: Array, b: Array) -> Array:
    """The same shapes, without gathered rows in memory."""
    return jax.nn.sigmoid(ringcoll.all_gather_matmul(x, w, "model", algorithm="two_ended") + b)


def with_gradients(layer: Layer, weights: Any) -> Any:
    """The layer's result, and the gradients of a loss that weighs its elements."""

    def loss(x: Array, w: Array, b: Array) -> tuple[Array, Array]:
        y = layer(x, w, b)
        return (y * weights).sum(), y

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))


def refused(x: Array, w: Array) -> str:
    """JAX's error for a product without a sharding of its result.

    Raises:
        AssertionError: there is no error.
    """
    try:
        jax.jit(jnp.matmul)(x, w)
    except Exception as error:  # its type is not public
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    raise AssertionError("explicit mode took a product whose sharding is not known")


# %% [markdown]
"""
## Compared

All numbers are small integers, some divided by a power of two. So x W + b is exact in any order of
additions.
"""

# %%
x, w = integers(BATCH, WIDTH), integers(WIDTH, FEATURES, seed=1) / 64
b, weights = integers(FEATURES, seed=2) / 64, integers(BATCH, FEATURES, seed=3)
alone = with_gradients(layer, weights)(x, w, b)
results, rows = {}, []
for name, form in (
    ("automatic", layer), ("explicit", explicit), ("manual", manual), ("ringcoll", overlapped)
):  # fmt: skip
    mesh = make_mesh(explicit=name == "explicit", data=2, model=4)
    if form in (manual, overlapped):
        specs = tuple(SPECS.values())
        form = jax.shard_map(form, mesh=mesh, in_specs=specs, out_specs=OUT)
    with jax.set_mesh(mesh):
        operands = [
            place(mesh, value, spec) for value, spec in zip((x, w, b), SPECS.values(), strict=True)
        ]
        placed = place(mesh, weights, OUT)
        step = with_gradients(form, placed).lower(*operands).compile()
        results[name] = gradients, y = step(*operands)
    for gradient, operand in zip(gradients, operands, strict=True):
        same = gradient.sharding.is_equivalent_to(operand.sharding, operand.ndim)
        if name != "automatic" and not same:  # there the compiler chooses
            raise AssertionError(f"{name}: a gradient is {gradient.sharding}")
    shardings = [str(of.sharding.spec) for of in (y, *gradients)]
    rows.append((name, *shardings, sent(step)))
heads = ["", "result", "gradient by x", "by W", "by b", "collectives in the program"]
show("How the results are sharded", heads, rows)

with jax.set_mesh(make_mesh(explicit=True, data=2, model=4)) as mesh:
    refusal = refused(*(jax.device_put(v, s) for v, s in ((x, SPECS["x"]), (w, SPECS["w"]))))
print("explicit mode, without a sharding for the result:", refusal, sep="\n  ")

# Each derivative of the sigmoid has an error of a few roundings: exp, a sum, a quotient, and
# s (1 - s). Then it is a factor in a sum of so many terms.
slope = np.asarray(alone[1], np.float64)
slope *= (1 - slope) * np.abs(weights)
sums = {
    "result": (4, np.ones(())),
    "gradient by x": (FEATURES + 8, slope @ np.abs(w).T),
    "gradient by W": (BATCH + 8, np.abs(x).T @ slope),
    "gradient by b": (BATCH + 8, slope.sum(0)),
}
every = {name: (y, *gradients) for name, (gradients, y) in {"one device": alone, **results}.items()}
for i, (what, (terms, size)) in enumerate(sums.items()):
    allowed = 2 * gamma(terms) * float(size.max())  # both may have this error
    agree(what, allowed=allowed, **{name: result[i] for name, result in every.items()})

# %% [markdown]
"""
## Exercise 1: gather the other factor

Now cut W by rows over "model" (`P("model", None)`), and the rows of x over both axes as before.
Gather W instead of x: `all_gather_matmul(x, w, "model", operand=1)`. How is the result sharded? Is
it fewer bytes to gather W, or x?"""


# %% tags=["solution"]
def by_weights(x: Array, w: Array) -> Array:
    return ringcoll.all_gather_matmul(x, w, "model", operand=1, algorithm="ring")  # [b/8, f]


mesh = make_mesh(data=2, model=4)
rows_of_both, specs = P(("data", "model")), (P(("data", "model")), P("model", None))
mapped = jax.shard_map(by_weights, mesh=mesh, in_specs=specs, out_specs=rows_of_both)
cut = [place(mesh, value, spec) for value, spec in zip((x, w), specs, strict=True)]
program = jax.jit(mapped).lower(*cut).compile()
agree("the product, by gathered weights", one_device=x @ w, ringcoll=program(*cut))
# A rank sends 3 shards: of w [32/4, 64], or of x [16/8, 32].
print(f"it sends {sent(program).permuted} bytes; gathered rows are {3 * 2 * 32 * 4}")
assert sent(program).permuted == 3 * 8 * 64 * 4

# %% [markdown]
"""
## Exercise 2: a contracted dimension that is sharded

Now the columns of x and the rows of W are cut over "model", so each device has one term of every
sum. The rows of x are cut over "data". Write the layer (without b) so that the rows of its result
are cut over "data" and "model": multiply, and scatter the sums."""


# %% tags=["solution"]
def scattered(x: Array, w: Array) -> Array:
    return ringcoll.matmul_reduce_scatter(x, w, "model", algorithm="ring")


mesh, specs = make_mesh(data=2, model=4), (P("data", "model"), P("model", None))
out = P(("data", "model"))
mapped = jax.shard_map(scattered, mesh=mesh, in_specs=specs, out_specs=out)
cut = [place(mesh, value, spec) for value, spec in zip((x, w), specs, strict=True)]
agree("the product, by scattered sums", one_device=x @ w, ringcoll=jax.jit(mapped)(*cut))
