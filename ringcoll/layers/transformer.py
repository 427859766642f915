"""The two halves of a transformer block: attention by heads, and the MLP by features."""

from collections.abc import Callable, Hashable
from functools import partial
from math import gcd
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ringcoll.collectives.axes import AxisName, axes_of, rank_count
from ringcoll.collectives.public import public
from ringcoll.layers.linear import check_bias, column_linears, kernel_and_bias, row_linear_of
from ringcoll.layers.parameters import check_alike, check_bound, parameters
from ringcoll.matmuls.options import LayerOptions, with_options

Activation = Callable[[Array], Array]
#: (query: [b, s, heads, k]; key, value: [b, s, groups, k]) -> [b, s, heads, k]
Attend = Callable[[Array, Array, Array], Array]


@with_options("layers.tensor_parallel.")
def mlp(
    params: Any,
    x: Array,
    axis_name: AxisName,
    *,
    activation: Activation = jax.nn.gelu,
    **options: Unpack[LayerOptions],
) -> Array:
    """Two linear layers, the first by columns and the second by rows.

    `x: [..., s/n, d], up: [d, f/n], down: [f/n, d] -> [..., s/n, d]`; both may have biases. With
    `sequence_parallel=False` x and the result are `[..., s, d]` on every rank.

    Steps and bytes: one `all_gather_matmul` and one `matmul_reduce_scatter`.

    Options: `LayerOptions`. Gradient, raises, source, `params`: as `column_linear`, `row_linear`.

    >>> params = {"up": jnp.ones((2, 4)), "down": jnp.ones((4, 2))}
    >>> specs = tp.partition_specs(params, "x"), P("x")
    >>> mlp = partial(tp.mlp, axis_name="x", activation=jax.nn.relu)
    >>> print(ranks(mlp, specs)(params, jnp.arange(8.0).reshape(4, 2)).T)
    [[ 4. 20. 36. 52.]
     [ 4. 20. 36. 52.]]
    """
    up, down = parameters(params, "up", "down").items()
    (hidden,) = column_linears([up], x, axis_name, **options)
    hidden = activation(hidden).astype(x.dtype)  # `preferred_element_type` may have widened it
    return row_linear_of(down, hidden, axis_name, **options)


@with_options("layers.tensor_parallel.")
def gated_mlp(
    params: Any,
    x: Array,
    axis_name: AxisName,
    *,
    activation: Activation = jax.nn.silu,
    **options: Unpack[LayerOptions],
) -> Array:
    """activation(x @ gate) * (x @ up), then down: gate and up share one gather.

    `x: [..., s/n, d], gate, up: [d, f/n], down: [f/n, d] -> [..., s/n, d]`; all may have biases.
    With `sequence_parallel=False` x and the result are `[..., s, d]` on every rank. gate and up
    are two arrays: with one, the columns would have to be permuted for each number of ranks.

    Steps and bytes: as `mlp`.

    Options: `LayerOptions`. Gradient, raises, `params`: as `column_linear` and `row_linear`.

    Source: Shazeer, "GLU variants improve transformer" (2020).

    >>> params = {"gate": jnp.ones((2, 4)), "up": jnp.ones((2, 4)), "down": jnp.ones((4, 2))}
    >>> specs = tp.partition_specs(params, "x"), P("x")
    >>> mlp = partial(tp.gated_mlp, axis_name="x", activation=jax.nn.relu)
    >>> print(ranks(mlp, specs)(params, jnp.arange(8.0).reshape(4, 2)).T)
    [[  4. 100. 324. 676.]
     [  4. 100. 324. 676.]]
    """
    *linears, down = parameters(params, "gate", "up", "down").items()
    gate, up = column_linears(linears, x, axis_name, **options)
    hidden = (activation(gate) * up).astype(x.dtype)  # as in `mlp`
    return row_linear_of(down, hidden, axis_name, **options)


@with_options("layers.tensor_parallel.")
def attention(
    params: Any,
    x: Array,
    axis_name: AxisName,
    *,
    causal: bool = True,
    rotary_base: float | None = 10000.0,
    positions: ArrayLike | None = None,
    attend: Attend | None = None,
    kv_heads: int | None = None,
    **options: Unpack[LayerOptions],
) -> Array:
    """Multi-head attention; each rank has some of the heads.

    `x: [b, s/n, d], query: [d, h/n, k], key, value: [d, g/n, k], out: [h/n, k, d] ->
    [b, s/n, d]`, h a multiple of g: grouped heads of keys and values. All may have biases.
    With `sequence_parallel=False` x and the result are `[b, s, d]` on every rank.

    Args:
        causal: whether a position sees only itself and those before it.
        rotary_base: the base of the wavelengths of `rotary`; None for no rotary positions.
        positions: `[s]` or `[b, s]`, for the whole sequence; None for 0, 1, 2, ...
        attend: a function (query, key, value) -> `[b, s, heads, k]`, the shape of query; None for
            `jax.nn.dot_product_attention`, whose scores are float32 even for float64. Your own
            function applies its own mask: `causal` is not passed to it.
        kv_heads: g, the heads of keys and values of the whole model. If the ranks do not divide g,
            leave keys and values whole, or cut them over only the first axes of `axis_name`: each
            rank uses the heads of its own queries. With None, the types of keys show how they are
            cut. After `copied` they vary even if keys are whole: pass kv_heads. Under
            `check_vma=False` there are no types: pass kv_heads unless a rank has one head of keys.

    Steps and bytes: as `mlp`; query, key and value share one gather.

    Options: `LayerOptions`. Gradient, `params`: as `column_linear` and `row_linear`.

    Raises: as `column_linear` and `row_linear`; and
        ValueError: heads of queries are not a multiple of those of keys; `kv_heads` does not fit,
            or is needed.

    Source: Vaswani et al. (2017); Ainslie et al., "GQA" (2023); Shoeybi et al. (2019).

    >>> shapes = {"query": (8, 4, 2), "key": (8, 4, 2), "value": (8, 4, 2), "out": (4, 2, 8)}
    >>> params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    >>> specs = tp.partition_specs(params, "x"), P(None, "x")
    >>> attend = partial(tp.attention, axis_name="x", causal=True)
    >>> jax.eval_shape(ranks(attend, specs, specs[1]), params, jnp.ones((1, 4, 8))).shape
    (1, 4, 8)
    """
    *of_heads, out = parameters(params, "query", "key", "value", "out").items()
    linears = {name: kernel_and_bias(linear) for name, linear in of_heads}
    kernels = {name: kernel for name, (kernel, _) in linears.items()}
    check_alike(x=x, **kernels)
    check_bound(axis_name)
    of_query, of_key, of_value = (kernel.shape for kernel in kernels.values())
    shapes = f"x is {x.shape}; on a rank: query {of_query}, key {of_key}, value {of_value}"
    if x.ndim not in (2, 3) or {len(of_query), len(of_key), len(of_value)} != {3}:
        raise ValueError(f"{shapes}; pass x: [b, s, d] and kernels [d, heads, head_dim]")
    if of_value != of_key or of_query[-1] != of_key[-1]:
        raise ValueError(f"{shapes}; use as many keys as values, and heads of one width")
    own = _heads_of_own_queries(kv_heads, **kernels, axis_name=axis_name)
    if own is not None:
        for name in "key", "value":
            linears[name] = _with_heads(own, *linears[name])
    named = [(name, {"kernel": kernel, "bias": bias}) for name, (kernel, bias) in linears.items()]
    query, key, value = column_linears(named, x, axis_name, **options)
    if rotary_base is not None:
        length = query.shape[-3]
        where = jnp.arange(length) if positions is None else jnp.asarray(positions)
        if where.shape not in ((length,), (*query.shape[:-3], length)):
            raise ValueError(
                f"positions are {where.shape}, and the whole sequence has {length}; pass [s] or "
                "[b, s], of the whole sequence on every rank"
            )
        query, key = (rotary(part, where, rotary_base) for part in (query, key))
    if attend is None:
        attend = partial(jax.nn.dot_product_attention, is_causal=causal)
    mixed = attend(query, key, value).astype(x.dtype)  # as in `mlp`
    return row_linear_of(out, mixed, axis_name, **options)


def _heads_of_own_queries(
    kv_heads: int | None, query: Array, key: Array, value: Array, axis_name: AxisName
) -> Array | None:
    """Which of a rank's heads of keys its queries see, in order; None if it is all of them.

    The heads of keys are cut over the first axes of `axis_name`: none of them, some, or all.
    """
    heads, groups, ranks = query.shape[1], key.shape[1], rank_count(axis_name)
    axes = tuple(axis for axis in axes_of(axis_name) if rank_count(axis) > 1)
    rank = lax.axis_index(axes)
    is_typed = {*axes} <= jax.typeof(rank).mat.varying  # and not the axes of a `vmap`
    types = [{*axes} & jax.typeof(kernel).mat.varying for kernel in (key, value)]

    def possible(cut: tuple[Hashable, ...]) -> bool:
        total = groups * rank_count(cut)
        if not total or heads * ranks % total or kv_heads not in (None, total):
            return False
        if not is_typed:
            return True
        if kv_heads is None:
            return all({*cut} == varying for varying in types)
        return all({*cut} <= varying for varying in types)  # more axes after `copied`

    cuts = [axes[:i] for i in range(len(axes) + 1) if possible(axes[:i])]
    if cuts and groups == 1:
        return None  # a rank's only head, however the heads are cut
    if len(cuts) != 1:
        raise ValueError(
            f"kv_heads={kv_heads}, and each of {ranks} ranks has {heads} heads of queries and "
            f"{groups} of keys; pass kv_heads= of the whole model; a rank has all of them, or an "
            "equal part"
        )
    (cut,) = cuts
    if cut == axes:
        return None
    sharing = heads * ranks // (groups * rank_count(cut))  # heads of queries for one of keys
    alike = gcd(heads, sharing)  # so many consecutive heads of a rank's queries see the same one
    first = rank * heads + jnp.arange(0, heads, alike)
    return first // sharing - lax.axis_index(cut) * groups


def _with_heads(own: Array, kernel: Array, bias: Array | None) -> tuple[Array, Array | None]:
    """Some heads of a linear layer. A bias of one number for each feature is that of all heads."""
    if bias is not None:
        check_bias(kernel.shape, bias)
        bias = bias if bias.ndim < 2 else jnp.take(bias, own, axis=-2)
    return jnp.take(kernel, own, axis=-2), bias


@public("layers.tensor_parallel.", arguments=False)
def rotary(x: Array, positions: ArrayLike, base: float = 10000.0) -> Array:
    """x with each pair (x[i], x[i + k/2]) rotated by an angle that grows with its position.

    `x: [..., s, h, k], positions: [s] or [..., s] -> [..., s, h, k]`; pair i is rotated by
    positions * base**(-2i/k), in float32 or wider.

    Raises:
        ValueError: k is odd.

    Source: Su et al., "RoFormer" (2021); the order of pairs is GPT-NeoX's and Llama's.

    >>> turned = jax.jit(tp.rotary)(jnp.ones((3, 1, 2)), jnp.pi / 2 * jnp.arange(3))
    >>> print(turned[:, 0].round())  # three positions, each a quarter turn further
    [[ 1.  1.]
     [-1.  1.]
     [-1. -1.]]
    """
    size = x.shape[-1]
    if size % 2:
        raise ValueError(
            f"heads of {size} dimensions have no pairs; use an even head_dim, or rotary_base=None"
        )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = base ** -(jnp.arange(0, size, 2, dtype=wide) / size)
    angles = jnp.multiply.outer(jnp.asarray(positions).astype(wide), frequencies)  # [s, k/2]
    shape = (*angles.shape[:-1], 1, size // 2)
    angles = angles.reshape((1,) * (x.ndim - len(shape)) + shape)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
