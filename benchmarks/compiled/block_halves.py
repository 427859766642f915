"""The halves of a transformer block as programs: a gated MLP, and grouped-query attention.

Each is one gather, several products with the gathered array, and one reduce-scatter. An addition
of query, key and value replaces the attention itself, which sends nothing and would take most of
the time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.compiled.block import Linear, by_constraints, gather_matmul, matmul_scatter
from benchmarks.compiled.programs import BUILT_IN, COMPILER, TUNED, by_shardings, options_of
from ringcoll.layers import tensor_parallel as tp

MLP, ATTENTION = "gated_mlp", "attention"
FORMS = (MLP, ATTENTION)
#: The features of a head, and the heads of keys and values: one for each rank of the largest mesh.
HEAD, GROUPS = 128, 16

Columns = Callable[[Array, Sequence[Array]], list[Array]]


def half(
    name: str, shape: str, algorithm: str, mesh: Mesh, dtype: Any = jnp.bfloat16
) -> tuple[Callable, tuple]:
    """A half as a function of x and weights, and these operands, for `overlap.compile_for`.

    Args:
        name: one of `FORMS`.
        shape: tokens x features of a token x features inside, such as "8192x8192x28672".
        algorithm: an algorithm of ringcoll, such as "auto", or one of `programs.BUILT_IN`.
        mesh: a mesh with one axis, x.
        dtype: the dtype of x and weights.
    """
    m, k, f = map(int, shape.split("x"))
    shapes = shapes_of(name, k, f)

    def operand(of: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(of, dtype, sharding=NamedSharding(mesh, spec))

    arrays = {part: jax.ShapeDtypeStruct(of, dtype) for part, of in shapes.items()}
    specs = tp.partition_specs(arrays, "x")
    weights = {part: operand(of, specs[part]) for part, of in shapes.items()}
    x_spec = P(None, "x")
    x = operand((1, m, k), x_spec)
    algorithm = algorithm.removesuffix(TUNED)
    if algorithm == COMPILER:
        function = partial(by_parts, name, *by_constraints(mesh, None, ("x",)))
        return by_shardings(function, (x, weights)), (x, weights)
    if algorithm in BUILT_IN:
        moves = partial(gather_matmul, ("x",)), partial(matmul_scatter, ("x",))
        function = partial(by_parts, name, *moves)
    else:
        function = partial(_ours, name, options_of(algorithm))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(x_spec, specs), out_specs=x_spec)
    return mapped, (x, weights)


def shapes_of(name: str, k: int, f: int) -> dict[str, tuple[int, ...]]:
    if name == MLP:
        return {"gate": (k, f), "up": (k, f), "down": (f, k)}
    heads, key = f // HEAD, (k, GROUPS, HEAD)
    return {"query": (k, heads, HEAD), "key": key, "value": key, "out": (heads, HEAD, k)}


def _ours(name: str, options: dict[str, Any], x: Array, weights: dict[str, Array]) -> Array:
    if name == MLP:
        return tp.gated_mlp(weights, x, "x", **options)
    return tp.attention(weights, x, "x", rotary_base=None, attend=_added, **options)


def by_parts(
    name: str, columns: Columns, rows: Linear, x: Array, weights: dict[str, Array]
) -> Array:
    if name == MLP:
        gate, up = columns(x, [weights["gate"], weights["up"]])
        return rows(jax.nn.silu(gate) * up, weights["down"])
    query, key, value = columns(x, [weights[part] for part in ("query", "key", "value")])
    return rows(_added(query, key, value), weights["out"])


def _added(query: Array, key: Array, value: Array) -> Array:
    """What replaces attention: add the key and value of its group to each head of queries."""
    grouped = query.reshape(*key.shape[:-1], -1, key.shape[-1])  # [b, s, groups, heads, k]
    return (grouped + (key + value)[..., None, :]).reshape(query.shape)
