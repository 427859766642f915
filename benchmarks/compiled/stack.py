"""A stack of fully sharded layers as programs: ringcoll's, and the built-in forms.

Each layer is x + down(silu(gate(x)) * up(x)); a scan runs them. Parameters are float32 and
sharded over the one axis of the mesh; x is sharded by tokens. All programs have the same layer.
They differ in how and when they gather its parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.compiled.programs import BUILT_IN, COMPILER, SPARSE, TUNED, by_shardings
from ringcoll.layers import fsdp

#: `fsdp.linear` by these algorithms.
OURS = {"linear": "auto", "linear/bidirectional_ring": "bidirectional_ring"}

#: What a layer keeps for the gradient besides its x; the rest is computed again.
POLICIES = {"nothing": None, "products": jax.checkpoint_policies.dots_saveable}

Weights = dict[str, Any]
#: (x, a kernel) -> x @ kernel
Product = Callable[[Array, Any], Array]


@dataclass(frozen=True)
class StackShape:
    """Sizes of a stack.

    Attributes:
        layers: the number of layers.
        tokens: the tokens on each rank.
        width: features of a token between layers.
        hidden: features inside a layer.
    """

    layers: int
    tokens: int
    width: int
    hidden: int

    @staticmethod
    def of(text: str) -> "StackShape":
        """Read a shape such as "4x4096x4096x14336"."""
        return StackShape(*map(int, text.split("x")))

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights."""
        into, out = (self.width, self.hidden), (self.hidden, self.width)
        return {
            "gate": (self.layers, *into),
            "up": (self.layers, *into),
            "down": (self.layers, *out),
        }


def stack(
    shape: str, kept: str, algorithm: str, mesh: Mesh, dtype: Any = jnp.bfloat16
) -> tuple[Callable, tuple]:
    """A stack as a function of x and weights, and these operands, for `overlap.compile_for`.

    Args:
        shape: see `StackShape`.
        kept: one of `POLICIES`.
        algorithm: one of `programs.BUILT_IN` or `OURS`, with or without `programs.SPARSE`.
        mesh: a mesh with one axis.
        dtype: the dtype of everything but the weights, which are float32.
    """
    sizes, (axis,) = StackShape.of(shape), mesh.axis_names
    shapes = {
        name: jax.ShapeDtypeStruct(of, jnp.float32) for name, of in sizes.parameters().items()
    }
    algorithm = algorithm.removesuffix(SPARSE)
    dim = -1 if algorithm in OURS else None
    specs = fsdp.specs(shapes, axis, mesh=mesh, leading=1, dim=dim)

    def operand(of: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(of, dtype, sharding=NamedSharding(mesh, spec))

    weights = {name: operand(of.shape, of.dtype, specs[name]) for name, of in shapes.items()}
    x = operand((sizes.tokens * mesh.size, sizes.width), dtype, P(axis))
    policy, algorithm = POLICIES[kept], algorithm.removesuffix(TUNED)
    if algorithm == COMPILER:
        function = partial(_scanned, jnp.matmul, partial(_placed, mesh), policy)
        return by_shardings(function, (x, weights)), (x, weights)
    if algorithm in BUILT_IN:
        function = partial(_scanned, jnp.matmul, partial(_gathered, axis, specs), policy)
    else:
        linear = partial(_linear, axis, algorithm=OURS[algorithm])
        function = partial(_scanned, linear, lambda shards: shards, policy)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(P(axis), specs), out_specs=P(axis))
    return mapped, (x, weights)


def _linear(axis: str, x: Array, kernel: Any, algorithm: str) -> Array:
    return fsdp.linear({"kernel": kernel}, x, axis, algorithm=algorithm)


def _scanned(
    product: Product,
    gather: Callable[[Weights], Weights],
    policy: Any,
    x: Array,
    weights: Weights,
) -> Array:
    """The stack: a scan, in which each layer gathers its own parameters."""

    def step(x: Array, shards: Weights) -> tuple[Array, None]:
        narrow = {name: shard.astype(x.dtype) for name, shard in shards.items()}
        return _layer(product, gather(narrow), x), None

    step = jax.checkpoint(step, policy=policy, prevent_cse=False)
    return lax.scan(step, x, weights)[0]


def _gathered(axis: str, specs: Any, shards: Weights) -> Weights:
    """Gather sharded parameters by `lax.all_gather`; the first entry of a spec is for layers."""

    def one(shard: Array, dims: list[Any]) -> Array:
        return lax.all_gather(shard, axis, axis=dims.index(axis), tiled=True)

    dims = {name: list(specs[name])[1:] for name in shards}
    return {n: one(shard, dims[n]) if axis in dims[n] else shard for n, shard in shards.items()}


def _placed(mesh: Mesh, shards: Weights) -> Weights:
    """Constrain shardings, so that XLA gathers."""
    return lax.with_sharding_constraint(shards, NamedSharding(mesh, P()))


def _layer(product: Product, weights: Weights, x: Array) -> Array:
    gate, up = (product(x, weights[name]) for name in ("gate", "up"))
    return x + product(jax.nn.silu(gate) * up, weights["down"])
