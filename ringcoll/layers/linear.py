"""Linear layers sharded by columns and by rows.

Every tensor-parallel layer consists of these two, with local work between them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from string import ascii_lowercase, ascii_uppercase
from typing import Any, Unpack

import jax.numpy as jnp
from jax import Array

from ringcoll.collectives.axes import AxisName, axes_of, rank_count
from ringcoll.layers.parameters import check_alike, check_bound, parameters
from ringcoll.layers.replicas import shared
from ringcoll.matmuls.all_reduce import matmul_all_reduce
from ringcoll.matmuls.functions import all_gather_einsum, einsum_reduce_scatter
from ringcoll.matmuls.labels import matrix_spec
from ringcoll.matmuls.options import GatherOptions, LayerOptions, MatmulOptions, with_options


@with_options("layers.tensor_parallel.")
def column_linear(
    params: Any, x: Array, axis_name: AxisName, **options: Unpack[LayerOptions]
) -> Array:
    """x @ kernel + bias; each rank computes its columns.

    `x: [..., s/n, d], kernel: [d, f/n], bias: [f/n] -> [..., s, f/n]`; a kernel `[d, h/n, k]`
    makes `[..., s, h/n, k]`. With `sequence_parallel=False` x is `[..., s, d]` on every rank.

    Steps and bytes: those of `all_gather_matmul`, or none.

    Gradient: for x a `matmul_reduce_scatter`; if x is replicated, a `psum`.

    Raises:
        KeyError: there is no kernel.
        TypeError: x and the kernel have different dtypes.
        ValueError: their features differ.

    Source: Shoeybi et al., "Megatron-LM" (2019), and Korthikanti et al., "Reducing activation
    recomputation in large transformer models" (2022), for the sharded sequence.

    Options: `LayerOptions`. What `params` may be: see `ringcoll.layers.tensor_parallel`.

    >>> params, specs = {"kernel": jnp.ones((2, 4))}, {"kernel": P(None, "x")}
    >>> linear = partial(tp.column_linear, axis_name="x")
    >>> print(ranks(linear, (specs, P("x")), P(None, "x"))(params, jnp.arange(8.0).reshape(4, 2)).T)
    [[ 1.  5.  9. 13.]
     [ 1.  5.  9. 13.]
     [ 1.  5.  9. 13.]
     [ 1.  5.  9. 13.]]
    """
    (y,) = column_linears([("kernel", params)], x, axis_name, **options)
    return y


@with_options("layers.tensor_parallel.")
def row_linear(
    params: Any, x: Array, axis_name: AxisName, **options: Unpack[LayerOptions]
) -> Array:
    """The sum over the ranks of x @ kernel, plus bias; each rank has rows of the kernel.

    `x: [..., s, f/n], kernel: [f/n, d], bias: [d] -> [..., s/n, d]`; a kernel `[h/n, k, d]` takes
    x `[..., s, h/n, k]`. With `sequence_parallel=False` the result is `[..., s, d]`, the same on
    every rank.

    Steps and bytes: those of `matmul_reduce_scatter`, or of `matmul_all_reduce`.

    Gradient: for x an `all_gather_matmul`; if the result is replicated, one product. With
    `sequence_parallel=False` and `check_vma=False` the gradient is that of the sum.

    Raises: as `column_linear`; and
        ValueError: the sequence is not divisible by n.

    Options: `LayerOptions`. Source and `params`: as `column_linear`.

    >>> params = {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}
    >>> specs = {"kernel": P("x"), "bias": P()}
    >>> linear = partial(tp.row_linear, axis_name="x")
    >>> print(ranks(linear, (specs, P(None, "x")))(params, jnp.arange(16.0).reshape(4, 4)).T)
    [[ 7. 23. 39. 55.]
     [ 7. 23. 39. 55.]]
    """
    return row_linear_of(("kernel", params), x, axis_name, **options)


def kernel_and_bias(linear: Any) -> tuple[Any, Array | None]:
    """The kernel of a linear layer, and its bias or None. An array is a kernel without a bias."""
    kernel, bias = linear, None
    if not hasattr(linear, "dtype"):
        kernel, bias = parameters(linear, "kernel", optional=("bias",)).values()
    return jnp.asarray(kernel), None if bias is None else jnp.asarray(bias)


def column_linears(
    linears: Sequence[tuple[str, Any]],
    x: Array,
    axis_name: AxisName,
    *,
    sequence_parallel: bool,
    **options: Unpack[GatherOptions],
) -> list[Array]:
    """`column_linear` of several layers, by name; they share one gather of x."""
    named = [(name, *kernel_and_bias(linear)) for name, linear in linears]
    for name, kernel, _ in named:
        check_alike(x=x, **{name: kernel})
        if kernel.ndim < 2 or x.shape[-1] != kernel.shape[0]:
            raise ValueError(
                f"x is {x.shape}, {name} is {kernel.shape}; the last dimension of x and the first "
                "of a kernel, not sharded, must be equal"
            )
    if x.ndim < 2:
        raise ValueError(f"x is {x.shape}; give it a dimension of tokens before that of features")
    check_bound(axis_name)
    factors = [kernel for _, kernel, _ in named]
    if sequence_parallel:  # kernels of heads keep their shapes; a TPU would copy them for others
        tokens, features = ascii_lowercase[: x.ndim - 1], ascii_uppercase[: factors[0].ndim - 1]
        spec = f"{tokens}z,z{features}->{tokens}{features}"
        products = all_gather_einsum(spec, x, factors, axis_name, gather=tokens[-1], **options)
    else:  # nothing is gathered, so the options of a gather do not apply
        copy = shared(x, axis_name, algorithm=options["algorithm"])
        exact: dict[str, Any] = {
            name: options[name] for name in ("precision", "preferred_element_type")
        }
        matrices = [kernel.reshape(kernel.shape[0], -1) for kernel in factors]
        products = [jnp.matmul(copy, matrix, **exact) for matrix in matrices]
    results = []
    for y, (_, kernel, bias) in zip(products, named, strict=True):
        shape = (*y.shape[: x.ndim - 1], *kernel.shape[1:])
        results.append(with_bias(y.reshape(shape), bias))
    return results


def row_linear_of(
    linear: tuple[str, Any],
    x: Array,
    axis_name: AxisName,
    *,
    sequence_parallel: bool,
    residuals: str,
    **options: Unpack[MatmulOptions],
) -> Array:
    """`row_linear` of a layer with a name. It ignores `residuals`: it keeps only its operands."""
    name, params = linear
    kernel, bias = kernel_and_bias(params)
    check_alike(x=x, **{name: kernel})
    inner = kernel.ndim - 1
    if kernel.ndim < 2 or x.ndim <= inner or x.shape[-inner:] != kernel.shape[:-1]:
        raise ValueError(
            f"x is {x.shape}, {name} is {kernel.shape}; the last dimensions of x must be those of "
            "the kernel without its last one"
        )
    check_bound(axis_name)
    x = x.reshape(*x.shape[:-inner], prod(kernel.shape[:-1]))
    matrix = kernel.reshape(-1, kernel.shape[-1])
    multiply: Callable[..., Array] = matmul_all_reduce
    if sequence_parallel:
        check_sequence(x.shape[-2], axis_name)
        spec = matrix_spec(x.ndim)
        sequence = spec[-2]
        multiply = partial(einsum_reduce_scatter, spec, scatter=sequence)
    y = multiply(x, matrix, axis_name, **options)
    sharded = axes_of(axis_name) if sequence_parallel else ()
    return with_bias(y, shared(bias, sharded))


def check_sequence(size: int, axis_name: AxisName) -> None:
    """Refuse a sequence that cannot be cut into one part for each rank."""
    ranks = rank_count(axis_name)
    if size % ranks:
        raise ValueError(
            f"the sequence of {size} is not divisible by the {ranks} ranks of {axis_name!r}; pad "
            "it, or pass sequence_parallel=False"
        )


def with_bias(y: Array, bias: Array | None) -> Array:
    """y + bias, in the dtype of y."""
    if bias is None:
        return y
    check_bias(y.shape, bias)
    return y + bias.astype(y.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


def check_bias(shape: tuple[int, ...], bias: Array) -> None:
    """Refuse a bias that does not fit a result of this shape."""
    if bias.shape != shape[len(shape) - bias.ndim :]:
        raise ValueError(
            f"the bias is {bias.shape}, the result without it {shape}; pass one number for each "
            "feature; a bias is sharded as the columns of its kernel"
        )
