# %% [markdown]
"""
# An MLP over eight devices in four ways

An MLP over eight devices in four ways, with the memory and the sent bytes of each.

    python -m examples.tutorials.strategies

- data: all weights on every device, gradients summed by an all-reduce;
- tensor: each device has columns of the first matrix and rows of the second; activations are
  gathered and scattered under the products, and gradients of weights are not sent;
- 2-D: both, over the two axes of a mesh;
- FSDP: like data, but each device keeps an eighth of the weights, gathers weights where they are
  used, and gets an eighth of the summed gradients.

Each is written for `jit` with shardings, where the compiler chooses what to send, and with
`ringcoll.layers`, where schedules fix the bytes. The tutorial computes these bytes from the
schedules, and counts them in the compiled program. All numbers are small integers, so losses and
gradients are equal in every bit.
"""

# %%
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll import lax
from ringcoll.costs import wire_bytes
from ringcoll.layers import fsdp
from ringcoll.layers import tensor_parallel as tp
from ringcoll.learn import agree, integers, make_mesh, place, sent, show, start

start(8)
BATCH, SEQUENCE, WIDTH, FEATURES = 8, 8, 16, 64
RING = "ring"
WHAT = "activations", "weights", "gradients", "loss"  # the purposes of messages
Params = dict[str, Array]


@dataclass(frozen=True)
class Strategy:
    """The sizes of the mesh, and whether weights are sharded over `data` too."""

    data: int
    model: int
    sharded: bool = False


STRATEGIES = {
    "data": Strategy(8, 1),
    "tensor": Strategy(1, 8),
    "2-D": Strategy(2, 4),
    "FSDP": Strategy(8, 1, sharded=True),
}


# %% [markdown]
"""
## A step, by ringcoll and by the compiler
"""

# %%


def per_rank(specs: dict[str, P]) -> Callable[..., Any]:
    """Loss and gradients on a rank's shards, `x: [b/data, s/model, d]`."""

    def step(params: Params, x: Array) -> Any:
        def loss(params: Params, x: Array) -> Array:
            # If a weight is whole along `data`, nothing is gathered, and its gradient is summed.
            weights = fsdp.gather(params, specs, "data", algorithm=RING)
            y = tp.mlp(weights, x, "model", activation=jax.nn.relu, algorithm=RING)
            return lax.pmean((y**2).mean(), ("data", "model"), algorithm=RING)

        return jax.value_and_grad(loss, argnums=(0, 1))(params, x)

    return step


def on_one_device(params: Params, x: Array) -> Any:
    """Loss and gradients on one device, or distributed by the compiler."""

    def loss(params: Params, x: Array) -> Array:
        return ((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2).mean()

    return jax.value_and_grad(loss, argnums=(0, 1))(params, x)


# %% [markdown]
"""
## What it should send
"""

# %%


def priced(of: Strategy) -> dict[str, float]:
    """The bytes that a rank sends, by purpose, from the schedules of a ring."""

    def price(collective: str, ranks: int, elements: int) -> float:
        return wire_bytes(collective, RING, (ranks,), elements / ranks, 4)

    activations = BATCH * SEQUENCE * WIDTH // of.data  # on all ranks along `model` together
    weights = 2 * WIDTH * FEATURES // of.model  # on all ranks along `data` together
    both_ways = price("all_gather", of.model, activations)
    both_ways += price("psum_scatter", of.model, activations)
    by_purpose = {"activations": 2 * both_ways}  # of the layer, and of its gradient
    if of.sharded:
        by_purpose["weights"] = price("all_gather", of.data, weights)
        by_purpose["gradients"] = price("psum_scatter", of.data, weights)
    else:
        by_purpose["gradients"] = price("psum", of.data, weights)
    axes = tuple(n for n in (of.data, of.model) if n > 1)
    by_purpose["loss"] = wire_bytes("psum", RING, axes, 1, 4)  # one number, padded to one per rank
    return by_purpose


# %% [markdown]
"""
## What it sends and keeps
"""

# %%


def run(name: str, host: dict[str, np.ndarray], x: np.ndarray) -> tuple[list[Any], list[Any]]:
    """Compile and run one strategy in both forms; returns its rows of memory and of bytes sent.

    Raises:
        AssertionError: results differ, or memory or bytes are not what was computed before.
    """
    of, along = STRATEGIES[name], P("data", "model")
    mesh = make_mesh(data=of.data, model=of.model)
    specs = tp.partition_specs(host, "model")
    if of.sharded:
        specs = fsdp.specs(host, "data", base=specs, mesh=mesh, min_size=1)
    ins, outs = (specs, along), (P(), (specs, along))
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), outs)
    forms = {
        "jit": jax.jit(on_one_device, out_shardings=places),
        "ringcoll": jax.jit(
            jax.shard_map(per_rank(specs), mesh=mesh, in_specs=ins, out_specs=outs)
        ),
    }
    operands = fsdp.shard(host, specs, mesh), place(mesh, x, along)
    programs = {form: f.lower(*operands).compile() for form, f in forms.items()}
    results = {form: program(*operands) for form, program in programs.items()}
    expected = jax.jit(on_one_device)(host, x)
    agree(f"{name}: loss {float(expected[0]):g}, and gradients", alone=expected, **results)

    kept = sum(w.addressable_shards[0].data.nbytes for w in operands[0].values())
    arguments = kept + x.nbytes // 8
    memory = [name, f"{of.data} x {of.model}", kept, 2 * kept, arguments]
    for program in programs.values():
        analysis: Any = program.memory_analysis()
        if analysis.argument_size_in_bytes != arguments:
            raise AssertionError(f"{name}: arguments of {analysis.argument_size_in_bytes} B")
        memory.append(analysis.temp_size_in_bytes)
    parts, counted = priced(of), sent(programs["ringcoll"]).permuted
    if counted != sum(parts.values()):
        raise AssertionError(f"{name}: {counted} B are sent, by the schedules {parts}")
    found = sent(programs["jit"])
    columns = (f"{parts.get(what, 0):g}" for what in WHAT)
    return memory, [name, *columns, f"{counted:g}", f"{found.bytes:g}", found]


# %%
host = {
    "up": integers(WIDTH, FEATURES, seed=1, largest=1),
    "down": integers(FEATURES, WIDTH, seed=2, largest=1),
}
x = integers(BATCH, SEQUENCE, WIDTH, largest=1)
memory, bytes_sent = zip(*(run(name, host, x) for name in STRATEGIES), strict=True)
heads = ["", "data\nx model", "weights", "Adam's\nmoments", "arguments", "temporaries\njit"]
show("Compiled: bytes of memory of a device, of one step", [*heads, "\nringcoll"], memory)
heads = ["", *WHAT, "all, and\ncounted", "by jit's\n(at best)", "\ncollectives"]
title = "Compiled: bytes that a device sends, by ringcoll's schedules, and by jit"
show(title, heads, bytes_sent)

# %% [markdown]
"""
## Exercise 1: tensor parallel and fully sharded

Add a strategy on 4 x 2 devices that cuts weights over `model`, and over `data` too. Which of the
four strategies send more than it does, and what do they send? (`run` checks losses, gradients,
memory and bytes.)"""

# %% tags=["solution"]
STRATEGIES["2-D, FSDP"] = Strategy(4, 2, sharded=True)
kept, row = run("2-D, FSDP", host, x)
show("Compiled: bytes that a device sends", heads, [*bytes_sent, row])
assert kept[2] == (2 * WIDTH * FEATURES * 4) / 8  # an eighth of the weights, as by FSDP

# %% [markdown]
"""
## Exercise 2: a model of 8 billion weights

Training with Adam in float32 keeps four numbers for each weight: the weight, its gradient, and two
moments. The model has 8 billion weights. How many GB does each of eight devices keep, with each
strategy above? Which strategies fit into the 16 GB of a v5e chip, without any activations?
"""

# %% tags=["solution"]
gigabytes = {}
for name, of in STRATEGIES.items():
    shards = of.model * (of.data if of.sharded else 1)
    gigabytes[name] = 16 * 8 / shards
print(*(f"{name}: {size:g} GB" for name, size in gigabytes.items()), sep="\n")
assert gigabytes == {"data": 128, "tensor": 16, "2-D": 32, "FSDP": 16, "2-D, FSDP": 16}
print("none: three take all of it, and nothing is left for activations")
