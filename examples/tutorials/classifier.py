# %% [markdown]
"""
# Data-parallel training of a classifier

Data-parallel training of a linear classifier, which averages gradients in three ways.

    python -m examples.tutorials.classifier

Every device has all weights and an eighth of the examples. In each step the gradients are averaged:

- by `jit`: the loss is a mean over examples on several devices, so the compiler inserts an
  all-reduce;
- by `jax.lax.pmean` in `shard_map`, of the gradient of a rank's own examples;
- by `ringcoll.pmean`, in the same place, with a chosen algorithm.

The right answer is known, because a known linear classifier made the labels. `allowed_drift`
computes how far the losses of two runs may differ.
"""

# %%
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll.costs import error_bound
from ringcoll.learn import gamma, make_mesh, place, sent, show, start

start(8)
EPS = float(np.finfo(np.float32).eps)
EXAMPLES, FEATURES, CLASSES, STEPS = 2048, 8, 4, 100
Gradient = Callable[..., tuple[Array, Array]]
Mean = Callable[[Any, str], Any]


# %% [markdown]
"""
## The model, and a step
"""

# %%


def loss(weights: Array, x: Array, labels: Array) -> Array:
    """The mean of -log of the probability of the right class."""
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ weights), labels[:, None], 1).mean()


def by_pmean(pmean: Mean, weights: Array, x: Array, labels: Array) -> tuple[Array, Array]:
    """Gradient of a rank's examples, then the mean over ranks."""
    # JAX sums the gradient of a value that all ranks share, but not that of a rank's own copy.
    own = jax.lax.pcast(weights, "data", to="varying")
    return pmean(jax.value_and_grad(loss)(own, x, labels), "data")


def train(
    gradient: Gradient, rate: float, mesh: Any, *data: Array
) -> tuple[np.ndarray, Array, Any]:
    """Returns the loss before each step, the weights at the end, and the program of a step."""

    def step(weights: Array, *data: Array) -> tuple[Array, Array]:
        value, slope = gradient(weights, *data)
        return weights - rate * slope, value

    replicated = NamedSharding(mesh, P())
    weights = jax.device_put(jnp.zeros((FEATURES, CLASSES)), replicated)
    program = jax.jit(step, out_shardings=(replicated, replicated)).lower(weights, *data).compile()
    losses = []
    for _ in range(STEPS):
        weights, value = program(weights, *data)
        losses.append(float(value))
    return np.array(losses), weights, program


# %% [markdown]
"""
## How far runs may differ
"""

# %%


def allowed_drift(x: np.ndarray, rate: float, weights: np.ndarray) -> np.ndarray:
    """How far rounding may move the losses of two runs apart, in each step.

    The loss is convex, and its gradient changes by at most L = ||X||^2 / 2B times the distance of
    the weights. So a step of at most 2/L does not increase the distance of two runs, except by the
    rate times the error of both gradients. The losses differ by this distance times the slope,
    which is at most sqrt(2) times the mean norm of an example. They also differ by the rounding of
    the loss, which grows with the logits, and so with the weights. Sums over a rank's examples and
    over ranks have the bounds of their algorithms, with a few more roundings.
    """
    relative = gamma(len(x) // 8 + FEATURES + 16)
    relative += error_bound("pmean", "bidirectional_ring", (8,), EPS)
    norm = np.linalg.norm(x, axis=1).mean()
    slope = 2**0.5 * norm
    drift = 2 * rate * slope * relative * np.arange(STEPS)
    return slope * drift + 2 * relative * (np.log(CLASSES) + norm * np.linalg.norm(weights))


# %% [markdown]
"""
## Three runs
"""

# %%
random = np.random.default_rng(0)
x = random.normal(size=(2 * EXAMPLES, FEATURES)).astype(np.float32)
truth = random.normal(size=(FEATURES, CLASSES))
labels = (x @ truth).argmax(1).astype(np.int32)
seen, held_out = slice(EXAMPLES), slice(EXAMPLES, None)
rate = 3 * EXAMPLES / float(np.linalg.norm(x[seen], 2) ** 2)  # 1.5/L: see `allowed_drift`

mesh = make_mesh(data=8)
data = [place(mesh, of[seen], P("data")) for of in (x, labels)]
over_ranks = partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
forms: dict[str, Gradient] = {
    "jit": jax.value_and_grad(loss),
    "lax.pmean": over_ranks(partial(by_pmean, jax.lax.pmean)),
    "ringcoll.pmean": over_ranks(
        partial(by_pmean, partial(ringcoll.pmean, algorithm="bidirectional_ring"))
    ),
}
runs = {name: train(gradient, rate, mesh, *data) for name, gradient in forms.items()}
allowed = allowed_drift(x[seen], rate, np.asarray(runs["jit"][1]))
rows = []
for name, (losses, weights, program) in runs.items():
    off = np.abs(losses - runs["jit"][0])
    if not (off <= allowed).all():
        raise AssertionError(f"{name}: losses are {off.max():.1e} off those of jit")
    right = float(((x[held_out] @ np.asarray(weights)).argmax(1) == labels[held_out]).mean())
    if not (right > 0.95 and abs(losses[0] - np.log(CLASSES)) <= allowed[0]):
        raise AssertionError(f"{name}: {right:.1%} are right, the first loss is {losses[0]}")
    shown = (f"{losses[step]:.6f}" for step in (0, 10, STEPS - 1))
    worst = f"{off.max():.0e} of {allowed[off.argmax()]:.0e}"
    rows.append((name, *shown, f"{right:.1%}", worst, sent(program)))
heads = ("loss\nof step 0", "\n10", f"\n{STEPS - 1}", "held out,\nright")
title = f"A classifier over 8 devices, {EXAMPLES // 8} examples each"
show(title, ("", *heads, "furthest off jit\nand allowed", "collectives\nof a step"), rows)

# %% [markdown]
"""
## Exercise 1: a sum in place of the mean

Replace `pmean` by `ringcoll.psum`, for the gradient and for the loss. Which rate then gives the
same weights? Which loss does the first step print?
"""

# %% tags=["solution"]
total = over_ranks(partial(by_pmean, partial(ringcoll.psum, algorithm="bidirectional_ring")))
losses, weights, _ = train(total, rate / 8, mesh, *data)
print(f"the first loss is {losses[0]:.3f}, eight times {runs['jit'][0][0]:.3f}")
assert (np.abs(losses / 8 - runs["jit"][0]) <= allowed).all()

# %% [markdown]
"""
## Exercise 2: let JAX sum the gradient

`by_pmean` casts the weights to "varying" before it takes the gradient. Leave that line out. Then
JAX itself sums the gradient over the ranks, because all ranks share the weights. Divide this sum by
the number of ranks, and compare with the run above."""


# %% tags=["solution"]
def by_jax(weights: Array, x: Array, labels: Array) -> tuple[Array, Array]:
    value, slope = jax.value_and_grad(loss)(weights, x, labels)  # slope: the sum over ranks
    return jax.lax.pmean(value, "data"), slope / jax.lax.axis_size("data")


losses, weights, _ = train(over_ranks(by_jax), rate, mesh, *data)
assert (np.abs(losses - runs["jit"][0]) <= allowed).all()
print(f"the same losses: {losses[0]:.6f}, {losses[10]:.6f}, {losses[-1]:.6f}")
