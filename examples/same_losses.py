"""An MLP whose losses have the same bits on 1, 2, 4 and 8 ranks.

    python -m examples.same_losses

The batch has eight leaves. A rank computes the loss and the gradients of each of its leaves, adds
them by pairs, and `ringcoll.psum` with `order=Tree(8)` adds the sums of the ranks. So every number
of ranks adds the leaves by one tree.

The leaves themselves must have the same bits too. XLA:CPU rounds and adds differently if it fuses a
formula with the operations around it. `apart` keeps it from that: what a leaf computes, and the
update of the parameters, are functions that it does not inline. This was compared on CPU only.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ringcoll

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # instead of eight real ones

LEAVES, ROWS, FEATURES, HIDDEN = 8, 4, 32, 64
SIZES = 1, 2, 4, 8
STEPS, RATE = 100, 0.1
Params = dict[str, Array]


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which XLA:CPU compiles by itself; its operands are arrays in memory."""

    def inside(*operands: Any) -> Any:
        with set_xla_metadata(inlineable=None):  # functions that it calls may be inlined
            return function(*operands)

    compiled = jax.jit(inside)

    def call(*operands: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return compiled(*operands)

    return call


def loss(params: Params, x: Array, y: Array) -> Array:
    """The sum over rows of the squared error; `x: [rows, FEATURES], y: [rows]`."""
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return jnp.sum((hidden @ params["down"] - y) ** 2)


def by_pairs(parts: list[Any]) -> Any:
    """The sum of pytrees, whose number is a power of two."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [jax.tree.map(lax.add, a, b) for a, b in pairs]
    return parts[0]


def by_tree(params: Params, x: Array, y: Array) -> Any:
    """The loss and the gradients of the whole batch, by one tree of all leaves."""
    of_leaf, own = apart(jax.value_and_grad(loss)), len(x) // ROWS
    leaves = zip(jnp.split(x, own), jnp.split(y, own), strict=True)
    parts = [of_leaf(params, *leaf) for leaf in leaves]
    return ringcoll.psum(by_pairs(parts), "x", order=ringcoll.Tree(LEAVES))


def plainly(params: Params, x: Array, y: Array) -> Any:
    """The same in the usual way."""
    return lax.psum(jax.value_and_grad(loss)(params, x, y), "x")


def updated(params: Params, gradients: Params) -> Params:
    """The parameters after a step."""
    scale = RATE / (LEAVES * ROWS)
    return jax.tree.map(lambda w, g: w - scale * g, params, gradients)


def train(gradient: Callable[..., Any], n: int) -> list[float]:
    """The loss of each step on n ranks."""

    def step(params: Params, x: Array, y: Array) -> tuple[Array, Params]:
        own = jax.tree.map(lambda w: lax.pcast(w, "x", to="varying"), params)
        total, gradients = gradient(own, x, y)
        return total, apart(updated)(params, gradients)

    mesh = jax.make_mesh((n,), ("x",), (AxisType.Auto,), devices=jax.devices()[:n])
    ins = P(), P("x"), P("x")
    program = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=P()))
    rng, losses = np.random.default_rng(0), []
    shapes = {"up": (FEATURES, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN,)}
    params: Any = {k: rng.standard_normal(s, np.float32) / s[0] ** 0.5 for k, s in shapes.items()}
    for _ in range(STEPS):
        x = rng.standard_normal((LEAVES * ROWS, FEATURES), np.float32)
        total, params = program(params, x, np.sin(x.sum(1)))
        losses.append(float(total))
    return losses


def main() -> int:
    """Train on every number of ranks; 1 if losses by the tree differ."""
    status = 0
    for name, gradient in {"by the tree": by_tree, "in the usual way": plainly}.items():
        runs = [train(gradient, n) for n in SIZES]
        differ = sum(len(set(of_step)) > 1 for of_step in zip(*runs, strict=True))
        print(f"{name:17} {differ:3} of {STEPS} losses differ, from {runs[0][0]:.3f} to ", end="")
        print(f"{runs[0][-1]:.3f}, on {', '.join(map(str, SIZES))} ranks")
        status |= gradient is by_tree and differ > 0
    return status


if __name__ == "__main__":
    sys.exit(main())
