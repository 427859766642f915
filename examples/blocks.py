"""Shared by the block examples: eight devices, and a comparison with one device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ringcoll.layers import tensor_parallel as tp

RING = "bidirectional_ring"  # "auto" picks the built-in collectives on CPU
#: (parameters, x: [b, s, d]) -> [b, s, d]
Block = Callable[[Any, Array], Array]


def make_mesh() -> Mesh:
    """A mesh of 2 x 4: `data` shards the batch; `model` shards heads, features and sequence."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # instead of eight real ones
    jax.config.update("jax_enable_x64", True)  # so that rounding hides no fault
    return jax.make_mesh((2, 4), ("data", "model"))


def compare(
    mesh: Mesh, alone: Block, over_ranks: Block, params: Any, width: int, limit: float
) -> int:
    """Print the error of a block and its gradients against one device; 1 if over the limit."""
    params = jax.tree.map(lambda p: p.astype("float64"), params)
    x, weights = jax.random.normal(jax.random.key(0), (2, 4, 16, width), "float64")
    specs, activations = tp.partition_specs(params, "model"), P("data", "model")
    mapped = jax.shard_map(
        over_ranks, mesh=mesh, in_specs=(specs, activations), out_specs=activations
    )

    def with_gradients(block: Block) -> Callable[..., Any]:
        def loss(params: Any, x: Array, weights: Array) -> tuple[Array, Array]:
            y = block(params, x)
            return (y * weights).sum(), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))

    expected, y = with_gradients(alone)(params, x, weights)
    place = partial(jax.device_put, device=jax.NamedSharding(mesh, activations))
    shards = tp.shard(params, specs, mesh)
    gradients, ours = with_gradients(mapped)(shards, place(x), place(weights))
    worst = 0.0
    for what, a, b in (("result", ours, y), ("gradients", gradients, expected)):
        off = _largest(jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), a, b)) / _largest(b)
        print(f"{what} as on one device, except {off:.0e} of the largest element")
        worst = max(worst, off)
    return int(not worst < limit)  # NaN is over the limit too


def _largest(tree: Any) -> float:
    return max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree))
