# %% [markdown]
"""
# Lesson 8: weights in parts

In data parallelism every rank has different rows of the batch, and all weights. But it uses one
layer at a time. In fully sharded data parallelism (FSDP), a rank keeps 1/n of each weight, and
gathers the whole weight just before it uses it. The gradient of that gather is a reduce-scatter, as
in lesson 3. It adds up the gradients from all ranks' rows, and gives each rank the gradient of its
own part. A rank updates only that part.

    forward     part --all-gather--> whole --> loss of my rows
    backward    part <--reduce-scatter-- whole's gradient

The gather and the reduce-scatter send as many bytes as an all-reduce of the gradients. A rank keeps
1/n of the weights, of their gradients and of the state of the optimizer. (The backward pass needs
the whole weights again. They are kept for it, unless they are gathered under `jax.checkpoint`. Then
they are gathered twice.)
"""

# %%
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from ringcoll.layers import fsdp
from ringcoll.learn import claim, messages, start

start(8)
N, BATCH, D, F = 8, 64, 64, 256
Params = dict[str, Array]
rng = np.random.default_rng(0)
params = {
    "up": jnp.asarray(rng.standard_normal((D, F), np.float32) / D**0.5),
    "down": jnp.asarray(rng.standard_normal((F, D), np.float32) / F**0.5),
}
x = jnp.asarray(rng.standard_normal((BATCH, D), np.float32))


def loss(params: Params, x: Array) -> Array:
    return jnp.mean((x - jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)


def updated(params: Params, gradients: Params) -> Params:
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients)


def bytes_of_a_device(params: Params) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in params.values())


@jax.jit
def step_alone(params: Params, x: Array) -> tuple[Params, Array]:
    value, gradients = jax.value_and_grad(loss)(params, x)
    return updated(params, gradients), value


# %% [markdown]
"""
## Sharded weights
"""

# %%
jax.set_mesh(jax.make_mesh((N,), ("x",)))
specs = fsdp.specs(params, "x")  # cuts the largest dimension; small weights would stay whole
print(", ".join(f"{name}: {spec}" for name, spec in specs.items()))


@jax.jit
@jax.shard_map(in_specs=(specs, P("x")), out_specs=(specs, P()))
def step(parts: Params, x: Array) -> tuple[Params, Array]:
    def mean_loss(parts: Params) -> Array:
        weights = fsdp.gather(parts, specs, "x", algorithm="ring")
        return lax.pmean(loss(weights, x), "x")

    value, gradients = jax.value_and_grad(mean_loss)(parts)
    return updated(parts, gradients), value


# %% [markdown]
"""
## Three steps
"""

# %%
everywhere = jax.device_put(params, P())
parts, rows = fsdp.shard(params, specs), jax.device_put(x, P("x"))
before, after = bytes_of_a_device(everywhere), bytes_of_a_device(parts)
print(f"bytes of weights on a device: {before} whole, {after} in parts")
claim("that is 1/8", after * N == before)
for number in range(3):
    params, expected = step_alone(params, x)
    parts, value = step(parts, rows)
    print(f"step {number}: loss {value:.6f}")
    claim("the loss is that of one device", abs(value - expected) < 1e-5 * expected)
off = max(float(abs(np.asarray(parts[k]) - np.asarray(params[k])).max()) for k in params)
claim("so are the weights, up to rounding", off < 1e-5)
claim("they are still in parts", bytes_of_a_device(parts) == after)
sent = messages(step.lower(parts, rows).compile())
claim("each kernel: 7 messages gather, 7 scatter the gradient", sent == 2 * 2 * (N - 1))

# %% [markdown]
"""
## Exercise 1: an optimizer

Give the step a momentum: `velocity = 0.9 * velocity + gradient`, and weights change by
`-0.5 * velocity`. The velocity has the specs of the weights. How many more messages does a step
take, and how many bytes does a device keep for weights and velocity?
"""


# %% tags=["solution"]
@jax.jit
@jax.shard_map(in_specs=(specs, specs, P("x")), out_specs=(specs, specs))
def with_momentum(parts: Params, velocity: Params, x: Array) -> tuple[Params, Params]:
    def mean_loss(parts: Params) -> Array:
        return lax.pmean(loss(fsdp.gather(parts, specs, "x", algorithm="ring"), x), "x")

    gradients = jax.grad(mean_loss)(parts)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
    return updated(parts, velocity), velocity


velocity = jax.tree.map(jnp.zeros_like, parts)
program = with_momentum.lower(parts, velocity, rows).compile()
parts, velocity = program(parts, velocity, rows)
claim("no more messages: a rank updates its own part", messages(program) == sent)
kept = bytes_of_a_device(parts) + bytes_of_a_device(velocity)
claim(f"{kept} bytes, 2/8 of the weights", kept == 2 * after)

# %% [markdown]
"""
## Exercise 2: gather twice

The whole weights are kept from the forward pass to the backward pass. Under `jax.checkpoint` they
are not: the backward pass computes the loss again, with its gather. Put the loss under
`jax.checkpoint`, and take its gradient. Count the gathers in the program that JAX traces
(`jax.make_jaxpr`): the primitive is called `ringcoll_all_gather`. Which gathers are new? (A
compiler may see that it has the weights already, and keep them. So count the messages of the
compiled program too.)
"""


# %% tags=["solution"]
@jax.jit
@jax.shard_map(in_specs=(specs, P("x")), out_specs=(P(), specs))
def twice(parts: Params, x: Array) -> tuple[Array, Params]:
    @jax.checkpoint
    def own_loss(parts: Params) -> Array:
        return loss(fsdp.gather(parts, specs, "x", algorithm="ring"), x)

    return jax.value_and_grad(lambda parts: lax.pmean(own_loss(parts), "x"))(parts)


def gathers(step: Callable[..., Any]) -> int:
    return str(jax.make_jaxpr(step)(parts, rows)).count("ringcoll_all_gather[")


print(f"messages: {sent}, {messages(twice.lower(parts, rows).compile())} with jax.checkpoint")
claim("two gathers without it, one of each kernel", gathers(step) == 2)
claim("two more with jax.checkpoint", gathers(twice) == 4)
