"""Values that all ranks share and each rank uses; their gradients are summed over the ranks."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ringcoll.choose.table import Algorithm
from ringcoll.collectives.all_reduce import psum
from ringcoll.collectives.axes import AxisName, axes_of
from ringcoll.collectives.front_door import Pytree
from ringcoll.costs.wire import Wire
from ringcoll.layers.parameters import check_bound, is_float
from ringcoll.matmuls.options import with_options
from ringcoll.runtime.value_types import is_checked, varying


class SumOptions(TypedDict, total=False):
    """How the gradients of copies are summed over ranks.

    Attributes:
        algorithm: the algorithm of the sums, as for `ringcoll.psum`.
        reduce_dtype: the dtype in which gradients of real floats travel and are summed; None for
            that of the copies.
    """

    algorithm: Algorithm
    reduce_dtype: DTypeLike | None


@with_options("layers.")
def copied(tree: Pytree, axis_name: AxisName, **options: Unpack[SumOptions]) -> Pytree:
    """Mark a replicated pytree as per-rank, so that its gradient is summed over the axes.

    `x: [a, b] -> [a, b]`, typed as varying over the axes. Nothing is sent. Leaves that already
    vary, and those that are not floats, are returned unchanged.

    Options: `SumOptions`.

    Gradient: the sum over the ranks, by `ringcoll.psum`, with small leaves packed. JAX refuses
    forward mode (`jvp`).

    Raises:
        NameError: an axis is not bound.
        ValueError: under `check_vma=False`. There the edge of `shard_map` sums the gradients that
            are taken outside, as for `jax.lax`, and this would sum them twice.

    Source: the operator f of Shoeybi et al., "Megatron-LM" (2019), section 3.

    >>> def gradient(w, x):
    ...     return jax.grad(lambda w: (layers.copied(w, "x") * x).sum())(w)
    >>> print(ranks(gradient, (P(), P("x")), P())(jnp.ones(1), jnp.arange(4.0)))  # 0 + 1 + 2 + 3
    [6.]
    """
    check_bound(axis_name)
    if axes_of(axis_name) and not is_checked():
        raise ValueError("shard_map has check_vma=False; leave it out, and psum a gradient inside")
    return shared(tree, axis_name, **options)


def shared(
    tree: Pytree,
    axis_name: AxisName,
    *,
    wires: Sequence[Wire | None] | None = None,
    algorithm: Algorithm = "auto",
    reduce_dtype: DTypeLike | None = None,
) -> Pytree:
    """`copied`, which under `check_vma=False` does nothing; for each leaf, the wire of its sum."""
    if not is_checked():
        return tree
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, leaf in enumerate(leaves):
        varies = jax.typeof(leaf).mat.varying if is_float(leaf) else axes_of(axis_name)
        if missing := tuple(axis for axis in axes_of(axis_name) if axis not in varies):
            groups[missing, wires and wires[i]].append(i)
    for (axes, wire), members in groups.items():
        copy = _copying(axes, wire, algorithm, reduce_dtype)
        for i, x in zip(members, copy([leaves[i] for i in members]), strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


@with_options("layers.")
def copied_beside(
    call: Callable[..., Pytree],
    operands: tuple[Pytree, ...],
    tree: Pytree,
    axis_name: AxisName,
    **options: Unpack[SumOptions],
) -> tuple[Pytree, Pytree]:
    """`(call(*operands), copied(tree, ...))`; the call's gradient hides the sum of the tree's.

    Use it for a call that sends nothing itself, such as the attention of a rank's own heads, and
    a tree that is used after the call, such as the parameters of the MLP. In the backward pass, the
    gradients of the tree are ready before those of the call. Their sum waits until the wire is
    free, and ends before the wire is needed again.

    Options: `SumOptions`. Gradient and `axis_name`: as `copied`. Only gradients have barriers. JAX
    refuses forward mode (`jvp`).

    >>> def layer(w, x):
    ...     y, w = layers.copied_beside(jnp.square, (x,), w, "x")
    ...     return w * y
    >>> print(ranks(layer, (P(), P("x")))(jnp.full(1, 2.0), jnp.arange(4.0)))
    [ 0.  2.  8. 18.]
    """
    operands, tree = _tied((operands, tree))
    return _tied((call(*operands), copied(tree, axis_name, **options)))


def narrowed(own: np.dtype, dtype: DTypeLike | None) -> np.dtype:
    """`dtype`, if it is given and `own` is a real float; otherwise `own`."""
    real = jnp.issubdtype(own, jnp.floating)
    return jnp.dtype(dtype) if dtype is not None and real else jnp.dtype(own)


@jax.custom_vjp
def _tied(tree: Pytree) -> Pytree:
    """The tree itself. Backward, each gradient waits until all of them are computed.

    A gradient that varies over fewer axes than the others does not wait: in older versions of JAX,
    a barrier gives all its results one type, and the other type cannot be restored.
    """
    return tree


def _tied_backward(_: None, cts: Pytree) -> tuple[Pytree]:
    leaves, structure = jax.tree.flatten(cts)
    floats = [i for i, ct in enumerate(leaves) if ct.dtype != jax.dtypes.float0]
    types = {i: jax.typeof(leaves[i]).mat.varying for i in floats}
    axes = frozenset().union(*types.values())
    tied = lax.optimization_barrier([varying(leaves[i], tuple(axes)) for i in floats])
    for i, ct in zip(floats, tied, strict=True):
        if types[i] == axes:
            leaves[i] = ct
    return (jax.tree.unflatten(structure, leaves),)


_tied.defvjp(lambda tree: (tree, None), _tied_backward)


def _copying(
    axes: tuple[Hashable, ...],
    wire: Wire | None,
    algorithm: Algorithm,
    reduce_dtype: DTypeLike | None,
) -> Callable[[list[Array]], list[Array]]:
    """A function that types arrays as varying over axes, and sums their gradients over these."""

    @jax.custom_vjp
    def copy(leaves: list[Array]) -> list[Array]:
        return [varying(x, axes) for x in leaves]

    def summed(_: None, cts: list[Array]) -> tuple[list[Array]]:
        wide = [ct.astype(narrowed(ct.dtype, reduce_dtype)) for ct in cts]
        sums = psum(wide, axes, algorithm=algorithm, wire=wire)
        return ([y.astype(ct.dtype) for y, ct in zip(sums, cts, strict=True)],)

    copy.defvjp(lambda leaves: (copy(leaves), None), summed)
    return copy
