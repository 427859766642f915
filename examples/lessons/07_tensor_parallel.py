# %% [markdown]
"""
# Lesson 7: a layer over eight ranks

An MLP is two products. Cut the first kernel by columns and the second by rows. Then nothing is sent
between the two products: a rank computes its own features, and its rows of the second kernel need
only these. The matmuls of lesson 5 hide the messages before and after: tokens are gathered under
the first product, and the sum over ranks is scattered under the second.

    tokens of rank r       features of rank r        tokens of rank r
    x: [s/n, d]    @up     [s, f/n]         @down    y: [s/n, d]
           all_gather_matmul        matmul_reduce_scatter

Each rank holds 1/n of the weights and activations, except for small weights such as those of norms.
The layer is one function of `ringcoll.layers`.
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
from ringcoll.layers import tensor_parallel as tp
from ringcoll.learn import claim, messages, start

start(8)
N, S, D, F = 8, 64, 32, 128
Params = dict[str, Array]
Mlp = Callable[[Params, Array], Array]
rng = np.random.default_rng(0)
params = {
    "up": jnp.asarray(rng.standard_normal((D, F), np.float32) / D**0.5),
    "down": jnp.asarray(rng.standard_normal((F, D), np.float32) / F**0.5),
}
x = jnp.asarray(rng.standard_normal((S, D), np.float32))


def alone(params: Params, x: Array) -> Array:
    """On one device."""
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


# %% [markdown]
"""
## The layer over ranks
"""

# %%


def by_hand(params: Params, x: Array) -> Array:
    """On a rank's shards."""
    hidden = ringcoll.all_gather_matmul(x, params["up"], "x", algorithm="ring")
    return ringcoll.matmul_reduce_scatter(
        jax.nn.gelu(hidden), params["down"], "x", algorithm="ring"
    )


def layer(params: Params, x: Array) -> Array:
    return tp.mlp(params, x, "x", algorithm="ring")  # "auto" is plain on CPU


def with_gradients(mlp: Mlp) -> Any:
    return jax.jit(jax.value_and_grad(lambda params, x: (mlp(params, x) ** 2).mean(), (0, 1)))


def close(tree: object, other: object) -> bool:
    """Equal, except for the order of additions."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(np.abs(np.asarray(a) - b).max() < 1e-5 * np.abs(b).max() for a, b in pairs)


expected, expected_gradients = jax.device_get(with_gradients(alone)(params, x))
jax.set_mesh(jax.make_mesh((N,), ("x",)))
specs = tp.partition_specs(params, "x")  # by the names of the kernels
print(", ".join(f"{name}: {spec}" for name, spec in specs.items()))
operands = tp.shard(params, specs), jax.device_put(x, P("x"))
kept = {name: leaf.addressable_shards[0].data.shape for name, leaf in operands[0].items()}
claim("a rank keeps 1/8 of each kernel", kept == {"up": (D, F // N), "down": (F // N, D)})


def over_ranks(mlp: Mlp) -> Mlp:
    return jax.shard_map(mlp, in_specs=(specs, P("x")), out_specs=P("x"))


two_lines, forward = (
    jax.jit(over_ranks(mlp)).lower(*operands).compile() for mlp in (by_hand, layer)
)
claim("tp.mlp is the two matmuls", np.array_equal(forward(*operands), two_lines(*operands)))
claim("7 messages gather, 7 scatter", messages(forward) == 2 * (N - 1))
both = with_gradients(over_ranks(layer)).lower(*operands).compile()
loss, gradients = both(*operands)
print(f"loss {loss:.6f}, on one device {expected:.6f}")
claim("the same loss", close(loss, expected))
claim("the same gradients", close(gradients, expected_gradients))
claim("the gradients double the messages", messages(both) == 4 * (N - 1))

# %% [markdown]
"""
## Exercise 1: without sharded tokens

Some programs keep all tokens on every rank. Then nothing is gathered, and the result is the sum of
all ranks' terms. Write such a layer, with one `ringcoll.psum` by a ring. How many messages does it
take? Compare that with the 14 messages above. How many tokens does a rank hold in each layer?
"""


# %% tags=["solution"]
def replicated(params: Params, x: Array) -> Array:
    term = jax.nn.gelu(x @ params["up"]) @ params["down"]  # [s, d], of this rank's features
    return ringcoll.psum(term, "x", algorithm="ring")


mapped = jax.shard_map(replicated, in_specs=(specs, P()), out_specs=P())
program = jax.jit(mapped).lower(operands[0], jax.device_put(x, P())).compile()
everywhere = program(operands[0], jax.device_put(x, P()))
claim("the layer with all tokens on every rank", close(everywhere, alone(params, x)))
claim("14 messages too, but each rank holds all tokens", messages(program) == 2 * (N - 1))

# %% [markdown]
"""
## Exercise 2: one gather for two kernels

In Llama's MLP, `silu(x @ gate) * (x @ up)` takes the place of `gelu(x @ up)`. Both products need
the same gathered tokens. `all_gather_matmul` takes a list of kernels. Write the layer so that the
tokens travel once, and count the messages.
"""


# %% tags=["solution"]
def gated(params: Params, x: Array) -> Array:
    kernels = [params["gate"], params["up"]]
    gate, up = ringcoll.all_gather_matmul(x, kernels, "x", algorithm="ring")
    hidden = jax.nn.silu(gate) * up
    return ringcoll.matmul_reduce_scatter(hidden, params["down"], "x", algorithm="ring")


with_gate = {**params, "gate": params["up"][::-1]}
gated_specs = tp.partition_specs(with_gate, "x")
mapped = jax.shard_map(gated, in_specs=(gated_specs, P("x")), out_specs=P("x"))
cut = tp.shard(with_gate, gated_specs), operands[1]
program = jax.jit(mapped).lower(*cut).compile()
wanted = (jax.nn.silu(x @ with_gate["gate"]) * (x @ params["up"])) @ params["down"]
claim("the gated layer", close(program(*cut), wanted))
claim("14 messages, as with one kernel", messages(program) == 2 * (N - 1))
