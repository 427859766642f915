"""Lesson 7: a layer over eight ranks.

An MLP is two products. Cut the first kernel by columns and the second by rows. Then nothing has
to be sent between the two: a rank computes its own features, and its rows of the second kernel
need only these. Lesson 5 hides the rest: tokens are gathered under the first product, and the sum
over ranks is scattered under the second.

    tokens of rank r       features of rank r        tokens of rank r
    x: [s/n, d]    @up     [s, f/n]         @down    y: [s/n, d]
           all_gather_matmul        matmul_reduce_scatter

Weights and activations are cut into n parts, except for norms and the like. The layer is one
function of `ringcoll.layers`.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")  # eight ranks on any machine

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

import ringcoll
from examples.lessons.claims import claim, permutes
from ringcoll.layers import tensor_parallel as tp

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
claim("a rank keeps 1/8 of each", kept == {"up": (D, F // N), "down": (F // N, D)})


def over_ranks(mlp: Mlp) -> Mlp:
    return jax.shard_map(mlp, in_specs=(specs, P("x")), out_specs=P("x"))


two_lines, forward = (
    jax.jit(over_ranks(mlp)).lower(*operands).compile() for mlp in (by_hand, layer)
)
claim("tp.mlp is the two matmuls", np.array_equal(forward(*operands), two_lines(*operands)))
claim("7 messages there, 7 back", permutes(forward) == 2 * (N - 1))
both = with_gradients(over_ranks(layer)).lower(*operands).compile()
loss, gradients = both(*operands)
print(f"loss {loss:.6f}, on one device {expected:.6f}")
claim("the same loss", close(loss, expected))
claim("the same gradients", close(gradients, expected_gradients))
claim("with gradients twice as many messages", permutes(both) == 4 * (N - 1))
