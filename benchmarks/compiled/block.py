"""One tensor-parallel block of a transformer as programs: ringcoll's, and the built-in forms.

x + attention(rms_norm(x)), then x + gated_mlp(rms_norm(x)): grouped heads of keys and values,
rotary positions, a causal mask. All programs have the same functions for norms, rotary positions
and the attention of a rank's own heads. They differ in the code that moves the activations, which
are sharded by sequence between the halves. If the mesh has an axis `data`, the batch is sharded
over it, and gradients are summed over it; the model is sharded over all other axes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from benchmarks.compiled.programs import BUILT_IN, COMPILER, TUNED, by_shardings, options_of
from ringcoll.layers import tensor_parallel as tp

DATA = "data"
#: The base of Llama 3.
ROTARY_BASE = 500000.0

#: Ours, with gradients summed over `DATA` by an algorithm of `ringcoll.psum`; others use XLA's.
BESIDE = "/beside"
SUMMED = ("auto+recursive_doubling", "auto+recursive_doubling" + BESIDE)

Linear = Callable[[Array, Array], Array]


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a block.

    Attributes:
        batch: sequences for each group of ranks that shares a model.
        sequence: tokens in each.
        width: features of a token between layers.
        heads, groups: of queries, of keys and values, each of width / heads features.
        hidden: features inside the MLP.
    """

    batch: int
    sequence: int
    width: int
    heads: int
    groups: int
    hidden: int

    @staticmethod
    def of(text: str) -> "BlockShape":
        """Read a shape such as "2x4096x4096x32x8x14336"."""
        return BlockShape(*map(int, text.split("x")))

    def parameters(self) -> dict[str, Any]:
        """The shapes of the weights, by their names in `tensor_parallel`."""
        d, f, k = self.width, self.hidden, self.width // self.heads
        key = (d, self.groups, k)
        query, out = (d, self.heads, k), (self.heads, k, d)
        return {
            "attention_norm": {"scale": (d,)},
            "attention": {"query": query, "key": key, "value": key, "out": out},
            "mlp_norm": {"scale": (d,)},
            "mlp": {"gate": (d, f), "up": (d, f), "down": (f, d)},
        }


def algorithms_of(mesh: Collection[str], names: Sequence[str]) -> list[str]:
    """The algorithms that make different programs on a mesh of these axes."""
    return [name for name in names if DATA in mesh or name not in SUMMED]


def block(shape: str, algorithm: str, mesh: Mesh, dtype: Any = jnp.bfloat16) -> tuple[Any, tuple]:
    """A block as a function of x and weights, and these operands, for `overlap.compile_for`."""
    sizes, axes = BlockShape.of(shape), tuple(a for a in mesh.axis_names if a != DATA)
    batch = DATA if DATA in mesh.axis_names else None
    x_spec, is_shape = P(batch, axes), lambda x: isinstance(x, tuple)

    def operand(of: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(of, dtype, sharding=NamedSharding(mesh, spec))

    shapes = sizes.parameters()
    arrays = jax.tree.map(lambda of: jax.ShapeDtypeStruct(of, dtype), shapes, is_leaf=is_shape)
    specs = tp.partition_specs(arrays, axes)
    weights = jax.tree.map(operand, shapes, specs, is_leaf=is_shape)
    x = operand((sizes.batch * mesh.shape.get(DATA, 1), sizes.sequence, sizes.width), x_spec)
    algorithm = algorithm.removesuffix(TUNED)
    if algorithm == COMPILER:
        function = partial(by_parts, *by_constraints(mesh, batch, axes))
        return by_shardings(function, (x, weights)), (x, weights)
    if algorithm in BUILT_IN:
        function = partial(by_parts, partial(gather_matmul, axes), partial(matmul_scatter, axes))
    else:
        name, _, summing = algorithm.removesuffix(BESIDE).partition("+")
        ours = _ours_beside if algorithm.endswith(BESIDE) else _ours
        function = partial(ours, axes, summing, options_of(name))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(x_spec, specs), out_specs=x_spec)
    return mapped, (x, weights)


def _ours(
    axes: tuple[str, ...], summing: str, options: dict[str, Any], x: Array, weights: Any
) -> Array:
    if summing:  # each half by itself, so that its gradients travel under the other half
        weights = {n: tp.copied(half, DATA, algorithm=summing) for n, half in weights.items()}
    normed = tp.rms_norm(weights["attention_norm"], x, axes)
    x = x + tp.attention(weights["attention"], normed, axes, rotary_base=ROTARY_BASE, **options)
    return x + tp.gated_mlp(
        weights["mlp"], tp.rms_norm(weights["mlp_norm"], x, axes), axes, **options
    )


def _ours_beside(
    axes: tuple[str, ...], summing: str, options: dict[str, Any], x: Array, weights: Any
) -> Array:
    """The same, but the gradient of the attention hides the sum of later weights' gradients.

    The gradient of the attention sends nothing, so the wire is free.
    """
    late = {"out": weights["attention"]["out"], "mlp": weights["mlp"]}
    early = {**weights, "mlp": None}
    early["attention"] = {n: of for n, of in weights["attention"].items() if n != "out"}
    copied = partial(tp.copied_beside, axis_name=DATA, algorithm=summing)

    def mix(heads: tuple[Array, ...], weights: Any) -> tuple[Array, Any]:
        mixed, used = copied(attend, heads, late)
        return mixed, {**weights, "attention": {"out": used["out"]}, "mlp": used["mlp"]}

    return by_parts(
        *by_ours(axes, options),
        *(x, tp.copied(early, DATA, algorithm=summing)),
        norm=partial(tp.rms_norm, axis_name=axes),
        mix=mix,
    )


def by_parts(
    columns: Callable[[Array, Sequence[Array]], list[Array]],
    rows: Linear,
    x: Array,
    weights: Any,
    norm: Callable[..., Array] = tp.rms_norm,
    mix: Callable[..., tuple[Array, Any]] = lambda heads, weights: (attend(*heads), weights),
) -> Array:
    """The block by two functions, one for linear layers by columns, one for those by rows.

    `mix` attends with a rank's heads; it also returns the weights for the rest of the block.
    """
    of = weights["attention"]
    normed = norm(weights["attention_norm"], x)
    query, key, value = columns(normed, [of[name] for name in ("query", "key", "value")])
    positions = jnp.arange(query.shape[1])
    query, key = (tp.rotary(heads, positions, ROTARY_BASE) for heads in (query, key))
    mixed, weights = mix((query, key, value), weights)
    x = x + rows(mixed, weights["attention"]["out"])
    of = weights["mlp"]
    gate, up = columns(norm(weights["mlp_norm"], x), [of["gate"], of["up"]])
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
