"""Shared by the training examples: FSDP and tensor parallelism against one device, some steps."""

from typing import Any

import jax
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.blocks import RING, Block
from ringcoll import lax, overlap
from ringcoll.layers import fsdp
from ringcoll.layers import tensor_parallel as tp

STEPS, BATCH, SEQUENCE = 4, 4, 16
AXES = "data", "model"


def compare_training(
    mesh: Mesh, alone: Block, over_ranks: Block, params: Any, width: int, limit: float
) -> int:
    """Train a block both ways; print losses, memory and bytes; 1 if losses differ by over `limit`.

    Weights are cut twice: over "model" for tensor parallelism, and over "data" for FSDP. A rank
    gathers along "data" the weights that it uses next, and multiplies its part along "model".
    """
    params = jax.tree.map(lambda p: p.astype("float64"), params)
    x, wanted = jax.random.normal(jax.random.key(1), (2, BATCH, SEQUENCE, width), "float64")
    base, along = tp.partition_specs(params, "model"), P(*AXES)
    specs = fsdp.specs(params, "data", mesh=mesh, base=base)

    def loss_alone(params: Any, x: Array, wanted: Array) -> Array:
        return ((alone(params, x) - wanted) ** 2).mean()

    def loss_of_rank(params: Any, x: Array, wanted: Array) -> Array:
        weights = fsdp.gather(params, specs, "data", algorithm=RING)
        off = over_ranks(weights, x) - wanted
        return lax.pmean((off**2).mean(), AXES, algorithm=RING)

    sharded = jax.shard_map(loss_of_rank, mesh=mesh, in_specs=(specs, along, along), out_specs=P())
    data = [jax.device_put(of, NamedSharding(mesh, along)) for of in (x, wanted)]
    ways = {
        "one device": (loss_alone, params, (x, wanted)),
        "FSDP x tensor": (sharded, fsdp.shard(params, specs, mesh), data),
    }
    losses = {}
    for name, (loss, state, operands) in ways.items():
        losses[name], program = _train(loss, state, *operands)
        kept = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
        sent = sum(row.count * row.bytes for row in overlap.report(program).rows)
        print(f"{name}: {kept} B of weights on a device, {sent:.0f} B sent by it in a step")
        print("  losses", *(f"{loss:.6f}" for loss in losses[name]))
    first, second = losses.values()
    off = float(np.max(np.abs(second / first - 1)))
    print(f"the losses are equal, except {off:.0e}; {limit:.0e} is allowed")
    return int(not (off < limit and second[-1] < second[0]))  # NaN is no less than the limit


def _train(loss: Any, params: Any, *data: Array) -> tuple[np.ndarray, Any]:
    """The loss before each step, and the compiled step."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(state: Any, *data: Array) -> Any:
        params, kept = state
        value, gradients = jax.value_and_grad(loss)(params, *data)
        updates, kept = optimizer.update(gradients, kept, params)
        return (optax.apply_updates(params, updates), kept), value

    state = params, optimizer.init(params)
    # Without this a step could return a state with a different sharding.
    outs = jax.tree.map(lambda leaf: leaf.sharding, state), None
    program = jax.jit(step, out_shardings=outs).lower(state, *data).compile()
    losses = []
    for _ in range(STEPS):
        state, value = program(state, *data)
        losses.append(float(value))
    return np.array(losses), program
