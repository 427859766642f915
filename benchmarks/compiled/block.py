"""A block of a transformer, by the functions that move its activations: ringcoll's or built in.

x + attention(rms_norm(x)), then x + gated_mlp(rms_norm(x)): grouped heads of keys and values,
rotary positions, a causal mask. Between the halves activations are sharded by sequence.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll.layers import tensor_parallel as tp

#: The base of Llama 3.
ROTARY_BASE = 500000.0

Linear = Callable[[Array, Array], Array]


def parameters(width: int, heads: int, groups: int, hidden: int) -> dict[str, Any]:
    """The shapes of the weights, by their names in `tensor_parallel`."""
    key = (width, groups, width // heads)
    query, out = (width, heads, key[-1]), (heads, key[-1], width)
    return {
        "attention_norm": {"scale": (width,)},
        "attention": {"query": query, "key": key, "value": key, "out": out},
        "mlp_norm": {"scale": (width,)},
        "mlp": {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)},
    }


def by_parts(
    columns: Callable[[Array, Sequence[Array]], list[Array]],
    rows: Linear,
    attend: Callable[[Array, Array, Array], Array],
    x: Array,
    weights: Any,
) -> Array:
    """The block by functions: linear layers by columns, by rows, and attention of own heads."""
    of = weights["attention"]
    normed = tp.rms_norm(weights["attention_norm"], x)
    query, key, value = columns(normed, [of[name] for name in ("query", "key", "value")])
    positions = jnp.arange(query.shape[1])
    query, key = (tp.rotary(heads, positions, ROTARY_BASE) for heads in (query, key))
    x = x + rows(attend(query, key, value), of["out"])
    of = weights["mlp"]
    gate, up = columns(tp.rms_norm(weights["mlp_norm"], x), [of["gate"], of["up"]])
    return x + rows(jax.nn.silu(gate) * up, of["down"])


def attend(query: Array, key: Array, value: Array) -> Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def gather_matmul(axes: tuple[str, ...], x: Array, kernels: Sequence[Array]) -> list[Array]:
    """Gather x once, by `lax`, and multiply it by each kernel."""
    rows = lax.all_gather(x, axes, axis=1, tiled=True)
    return [product(rows, kernel) for kernel in kernels]


def matmul_scatter(axes: tuple[str, ...], x: Array, kernel: Array) -> Array:
    """Multiply, and reduce-scatter the product by `lax`."""
    return lax.psum_scatter(product(x, kernel), axes, scatter_dimension=1, tiled=True)


def by_ours(
    axes: tuple[str, ...], options: dict[str, Any]
) -> tuple[Callable[..., list[Array]], Linear]:
    """The same two functions of ringcoll."""
    multiply = partial(ringcoll.all_gather_matmul, axis_name=axes, **options)
    rows = lambda x, kernel: tp.row_linear(kernel, x, axes, **options)  # noqa: E731
    return partial(by_matrices, multiply), rows


def by_matrices(
    multiply: Callable[..., list[Array]], x: Array, kernels: Sequence[Array]
) -> list[Array]:
    """Kernels `[d, *f]` as matrices, and their products as `[..., *f]`."""
    products = multiply(x, [kernel.reshape(kernel.shape[0], -1) for kernel in kernels])
    shapes = [(-1, *kernel.shape[2:]) for kernel in kernels]
    return [y.reshape(*y.shape[:-1], *of) for y, of in zip(products, shapes, strict=True)]


def by_constraints(
    mesh: Mesh, batch: str | None, axes: tuple[str, ...]
) -> tuple[Callable[..., list[Array]], Linear]:
    """The same two functions for whole arrays: they constrain shardings, and XLA does the rest."""

    def put(x: Array, *spec: Any) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(batch, *spec)))

    def columns(x: Array, kernels: Sequence[Array]) -> list[Array]:
        return [put(product(x, kernel), None, axes) for kernel in kernels]

    def rows(x: Array, kernel: Array) -> Array:
        return put(product(put(x, None, axes), kernel), axes)

    return columns, rows


def product(x: Array, kernel: Array) -> Array:
    """x: [b, s, *k], kernel: [*k, f] -> [b, s, f]; a kernel [d, h, k] gives [b, s, h, k]."""
    return jnp.tensordot(x, kernel, x.ndim - 2)
