"""The experts of one rank: gated MLPs, on the tokens that are routed to them. Nothing is sent.

`slots[i, j]` is an expert of token i, counted among the experts of this rank; `count` means none.
A *row* is a token at one of its experts. Rows are sorted by expert, and multiplied by
`jax.lax.ragged_dot` or by a caller's kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.tree_util import register_dataclass

from ringcoll.layers.parameters import array_of, check_alike, parameters
from ringcoll.runtime.value_types import with_common_axes

#: (rows sorted by expert `[r, d]`, weights `[e, d, f]`, rows of each expert `[e]`) -> `[r, f]`
Kernel = Callable[[Array, Array, Array], Array]


@partial(
    register_dataclass,
    data_fields=("gate", "up", "down"),
    meta_fields=("activation", "precision", "kernel"),
)
@dataclass(frozen=True)
class Experts:
    """This rank's experts, a pytree of their weights, and how they multiply.

    Attributes:
        gate, up, down: the weights, `[e, d, f]`, `[e, d, f]` and `[e, f, d]`.
        activation: the activation of the gate.
        precision: the precision of the products.
        kernel: multiplies in place of `jax.lax.ragged_dot`; None for `ragged_dot` itself.
    """

    gate: Array
    up: Array
    down: Array
    activation: Callable[[Array], Array]
    precision: Any
    kernel: Kernel | None

    @property
    def count(self) -> int:
        """How many experts there are on this rank."""
        return self.gate.shape[0]

    @property
    def product(self) -> Kernel:
        """The function that multiplies rows that are sorted by expert."""
        return self.kernel or partial(_product, self.precision)

    def mlp(self, rows: Array, sizes: Array) -> Array:
        """The results for rows sorted by expert; expert e has `sizes[e]` rows: `[r, d] -> [r, d]`.

        After the last row of the last expert, results may be anything.
        """
        rows, gate, up, down = with_common_axes([rows, self.gate, self.up, self.down], ())
        product = self.product
        hidden = self.activation(product(rows, gate, sizes)) * product(rows, up, sizes)
        return product(hidden, down, sizes).astype(rows.dtype)  # a kernel may return wider floats

    def weighted(
        self, x: Array, ids: Array, weights: Array, axes: tuple[Any, ...], most: int | None
    ) -> Array:
        """The weighted sum of each token's results here: `[t, d], [t, k], [t, k] -> [t, d]`.

        `ids` are numbered over all ranks of the axes. `most` bounds the rows, and so the buffers:
        if there are more rows, the sums are NaN.
        """
        slots, weights = slots_of(ids, weights, lax.axis_index(axes) * self.count, self.count)
        order, back = orders(slots)
        x, _ = with_common_axes([x, slots], ())
        sizes = count_each(slots.reshape(-1), self.count)
        if most is None or most >= slots.size:
            used = slots < self.count
            rows = self.mlp(spread(x, order, back, used), sizes)
            rows = permute(rows, back, order).reshape(*slots.shape, x.shape[1])
            return weighted_sum(jnp.where(used[..., None], rows, 0), weights)
        order, total = order[:most], sizes.sum()
        fits, used = total <= most, jnp.arange(most) < total
        tokens = jnp.where(used, order // slots.shape[1], len(x))
        of_rows = jnp.where(used, jnp.take(weights.reshape(-1), order), 0)
        rows = self.mlp(take_rows(len(x), x, tokens), jnp.where(fits, sizes, 0))
        rows, of_rows = with_common_axes([rows, of_rows], ())  # features may vary over another axis
        return jnp.where(fits, sum_rows(len(x), rows, of_rows, tokens), jnp.nan)


def experts_of(params: Any, x: Array, total: int, ranks: int, **options: Any) -> Experts:
    """Find this rank's experts by name. They must fit the tokens and the `total` experts."""
    *found, _ = parameters(params, "gate", "up", "down", optional=("router",)).items()
    weights = {name: array_of(name, weight) for name, weight in found}
    check_alike(x=x, **weights)
    shapes = ", ".join(f"{name} {list(w.shape)}" for name, w in weights.items())
    gate, up, down = weights.values()
    d, count = x.shape[-1], total // ranks
    if (
        gate.ndim != 3
        or up.shape != gate.shape
        or down.shape != (*gate.shape[:1], *gate.shape[:0:-1])
    ):
        raise ValueError(f"{shapes}; pass gate, up: [experts, d, f], down: [experts, f, d]")
    if gate.shape[1] != d:
        raise ValueError(
            f"x has {d} features, and the experts take {gate.shape[1]}; make them equal"
        )
    if gate.shape[0] != count:
        raise ValueError(
            f"a rank has {gate.shape[0]} experts, not {count} ({total} over {ranks} ranks); shard "
            "the experts by partition_specs"
        )
    return Experts(gate, up, down, **options)


def slots_of(ids: Array, weights: Array, first: Array, count: int) -> tuple[Array, Array]:
    """The slots of tokens, and their weights, on a rank with `count` experts from `first` on.

    `ids, weights: [t, k] -> [t, s]`, s = min(k, count): a token never has the same expert twice.
    """
    local = ids - first
    if ids.shape[1] <= count:
        mine = (local >= 0) & (local < count)
        return jnp.where(mine, local, count), jnp.where(mine, weights, 0)
    here = jnp.arange(count, dtype=local.dtype)
    is_choice = local[:, :, None] == here[None, None]  # [t, k, count]
    numbers = jnp.where(is_choice.any(1), here[None], count)
    return numbers, jnp.where(is_choice, weights[:, :, None], 0).sum(1)


def orders(slots: Array) -> tuple[Array, Array]:
    """The order of slots by expert, and its inverse: `[t, s] -> [t s]`."""
    order = jnp.argsort(slots.reshape(-1), stable=True)
    return order, jnp.argsort(order)


def count_each(numbers: Array, count: int) -> Array:
    """How often each of 0 to count - 1 occurs: `[r] -> [count]`."""
    each = jnp.arange(count, dtype=numbers.dtype)
    return (numbers[:, None] == each[None]).sum(0, dtype=jnp.int32)


def weighted_sum(rows: Array, weights: Array) -> Array:
    """The weighted sum of the rows of each token: `[t, s, d], [t, s] -> [t, d]`.

    It is added in the dtype of the weights, then rounded to that of the rows.
    """
    wide = rows.astype(weights.dtype) * weights[..., None]
    return wide.sum(1).astype(rows.dtype)


# The gradients of the next two gathers are gathers. JAX's own gradient of a gather is a scatter.


@jax.custom_vjp
def spread(x: Array, order: Array, back: Array, used: Array) -> Array:
    """The row of each slot, with slots in this order: `[t, d], [t s] -> [t s, d]`.

    `back` is the inverse of `order`. Slots that are not `used` give no gradient.
    """
    return jnp.take(x, order // used.shape[1], axis=0, mode="clip")


def _spread_backward(residuals: tuple[Array, Array], ct: Array) -> tuple[Any, ...]:
    back, used = residuals
    by_slot = jnp.take(ct, back, axis=0, mode="clip").reshape(*used.shape, ct.shape[1])
    wide = jnp.promote_types(ct.dtype, jnp.float32)
    summed = jnp.where(used[..., None], by_slot, 0).sum(1, dtype=wide)
    return summed.astype(ct.dtype), None, None, None


spread.defvjp(lambda x, *where: (spread(x, *where), where[1:]), _spread_backward)


@jax.custom_vjp
def permute(x: Array, order: Array, back: Array) -> Array:
    """The rows of x in an order, whose inverse is `back`."""
    return jnp.take(x, order, axis=0, mode="clip")


permute.defvjp(
    lambda x, order, back: (permute(x, order, back), back),
    lambda back, ct: (jnp.take(ct, back, axis=0, mode="clip"), None, None),
)


# In the next two, `count` is the number of tokens of x. A row without a token has token `count`.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def take_rows(count: int, x: Array, tokens: Array) -> Array:
    """The rows of these tokens: `[t, d], [r] -> [r, d]`. A row without a token is zero."""
    return jnp.take(x, tokens, axis=0, mode="fill", fill_value=0)


def _take_rows_backward(count: int, tokens: Array, ct: Array) -> tuple[Any, ...]:
    ones = jnp.ones(len(ct), jnp.promote_types(ct.dtype, jnp.float32))
    return sum_rows(count, ct, ones, tokens), None


take_rows.defvjp(
    lambda count, x, tokens: (take_rows(count, x, tokens), tokens), _take_rows_backward
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_rows(count: int, rows: Array, weights: Array, tokens: Array) -> Array:
    """The weighted sum of the rows of each token: `[r, d], [r], [r] -> [t, d]`.

    It is added in the dtype of the weights, then rounded to that of the rows.
    """
    wide = rows.astype(weights.dtype) * weights[:, None]
    zeros, wide = with_common_axes([jnp.zeros((count, rows.shape[1]), wide.dtype), wide], ())
    return zeros.at[tokens].add(wide, mode="drop").astype(rows.dtype)


def _sum_rows_backward(count: int, residuals: tuple[Array, ...], ct: Array) -> tuple[Any, ...]:
    # Rows are gathered in their own dtype. JAX's gradient would widen all tokens first.
    rows, weights, tokens = residuals
    wide = take_rows(count, ct, tokens).astype(weights.dtype)
    of_rows = (wide * weights[:, None]).astype(rows.dtype)
    of_weights = (wide * rows.astype(weights.dtype)).sum(1)
    return of_rows, jnp.where(tokens < count, of_weights, 0), None


sum_rows.defvjp(lambda count, *operands: (sum_rows(count, *operands), operands), _sum_rows_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(precision: Any, rows: Array, weights: Array, sizes: Array) -> Array:
    """`jax.lax.ragged_dot`. JAX cannot batch it; `vmap` runs this once for each batch element."""
    return _each(partial(lax.ragged_dot, precision=precision))(rows, weights, sizes)


def _product_backward(precision: Any, residuals: tuple[Array, ...], ct: Array) -> tuple[Any, ...]:
    rows, weights, sizes = residuals
    exact = {"precision": precision}
    of_rows = _each(partial(lax.ragged_dot, **exact))(ct, weights.swapaxes(1, 2), sizes)
    general = partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=_OF_WEIGHTS, **exact)
    return of_rows, _each(general)(rows, ct, sizes), None


_OF_WEIGHTS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)
_product.defvjp(
    lambda precision, *operands: (_product(precision, *operands), operands), _product_backward
)


def _each(call: Callable[..., Array]) -> Callable[..., Array]:
    """`call`, which `vmap` runs once for each batch element; unbatched operands are not copied."""
    batched = custom_vmap(call)

    @batched.def_vmap
    def rule(_: int, is_batched: Sequence[bool], *operands: Array) -> tuple[Array, bool]:
        moving = [x for x, batch in zip(operands, is_batched, strict=True) if batch]

        def one_call(moving: list[Array]) -> Array:
            rest = iter(moving)
            pairs = zip(operands, is_batched, strict=True)
            return _each(call)(*(next(rest) if batch else x for x, batch in pairs))

        return lax.map(one_call, moving), True

    return batched
