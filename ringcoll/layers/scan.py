"""A scan over layers: the parameters of the next layer travel while a layer computes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ringcoll.collectives.axes import AxisName, axes_of
from ringcoll.collectives.front_door import Pytree
from ringcoll.collectives.table import Algorithm
from ringcoll.collectives.wires import WireLike
from ringcoll.layers.gathered import Gathered, gather
from ringcoll.layers.parameters import check_bound, map_with_specs, refusal
from ringcoll.runtime.value_types import varying

#: (parameters of one layer, whole; x) -> x
Block = Callable[[Pytree, Pytree], Pytree]


def scan_layers(
    block: Block,
    params: Pytree,
    x: Pytree,
    specs: Pytree,
    axis_name: AxisName,
    *,
    policy: Callable[..., Any] | None = None,
    dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
    replicas: AxisName = (),
    fused: bool = False,
    algorithm: Algorithm = "auto",
    wire: WireLike | None = None,
    gradient_wire: WireLike | None = None,
) -> Pytree:
    """Run x through a stack of layers, while the parameters of the next layer travel.

    `params: [l, ...] of shards, x -> x`, as `for i in range(l): x = block(gather(params[i]), x)`.
    It is a loop: the program does not grow with l.

        forward    gather 0 | compute 0, gather 1 | compute 1, gather 2 | ...
        backward   | recompute and differentiate i, gather i - 1, reduce-scatter i + 1 | ...

    It holds at most two whole layers at a time and, backward, also the whole gradient of one. The
    backward pass starts with the last layer's parameters, which are still in memory.

    Args:
        block: (parameters of one layer, whole; x) -> x, of the same shapes and types.
        params: stacked: each leaf has a leading dimension of layers, which is not sharded.
            A leaf that is not a float, such as a random key for each layer, is not gathered.
        x: a pytree of arrays.
        specs: of the stacked parameters; the first entry of each is None.
        policy: what to keep of each layer besides its x: None for nothing (all is computed again),
            or one of `jax.checkpoint_policies`; `everything_saveable` computes nothing again.
            Gathered parameters are never kept.
        axis_name, dtype, reduce_dtype, replicas, fused, algorithm, wire, gradient_wire: as for
            `gather`.

    Steps and bytes: forward l + 1 gathers of one layer; backward l gathers and l + 1
    reduce-scatters. That is one more of each than needed, so that all turns of a loop are equal.

    Gradient: that of the loop above.

    Raises:
        ValueError: the leaves do not have the same number of layers, or a spec shards the dimension
            of layers; and as `gather`.

    Source: prefetching as in Zhao et al., "PyTorch FSDP" (2023), section 3.3.

    >>> params, specs = jnp.arange(1.0, 9.0).reshape(2, 4), P(None, "x")  # two layers
    >>> def model(params, x):
    ...     return fsdp.scan_layers(lambda w, x: x * w.sum(), params, x, specs, "x")
    >>> print(ranks(model, (specs, P("x")))(params, jnp.arange(4.0)))  # times 10, times 26
    [  0. 260. 520. 780.]
    """
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(params)}
    if len(lengths) != 1 or lengths == {()} or lengths == {(0,)}:
        words = f"the leading dimensions of the leaves are {sorted(lengths)}"
        raise refusal(ValueError, "scan_layers", words, "stack one or more layers along the first")

    def of_one(name: str, _: Any, spec: PartitionSpec) -> PartitionSpec:
        if spec and spec[0] is not None:
            words = f"{name}: its spec {spec} shards the dimension of layers"
            raise refusal(ValueError, "scan_layers", words, "make specs with leading=1")
        return PartitionSpec(*spec[1:])

    gather_one = partial(
        gather,
        specs=map_with_specs("scan_layers", of_one, params, specs),
        axis_name=axis_name,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        replicas=replicas,
        fused=fused,
        algorithm=algorithm,
        wire=wire,
        gradient_wire=gradient_wire,
    )
    ((length,),) = lengths
    check_bound("scan_layers", axis_name)
    check_bound("scan_layers", replicas, "replicas")
    axes = (*axes_of(axis_name), *axes_of(replicas))
    x = jax.tree.map(lambda leaf: varying(jnp.asarray(leaf), axes), x)
    gathered = jax.eval_shape(lambda p: gather_one(jax.tree.map(lambda leaf: leaf[0], p)), params)
    explicit, captured = _closed(block, gathered, x)

    def reordered(gathered: Pytree, captured: list[Array], x: Pytree) -> Pytree:
        return explicit(gathered, x, captured)

    checkpointed = jax.checkpoint(reordered, policy=policy, prevent_cse=False)
    return _scanned(_Scan(checkpointed, gather_one, length), params, captured, x)


def _closed(block: Block, gathered: Pytree, x: Pytree) -> tuple[Callable[..., Pytree], list[Array]]:
    """A function of (gathered, x, captured) that equals `block`, and the list `captured`.

    `captured` has all the arrays that `block` closes over. A `custom_vjp` must not close over
    traced values, and gives no gradient to arrays that it closes over; a user's block may close
    over arrays, and may need their gradients.
    """
    program, shapes = jax.make_jaxpr(block, return_shape=True)(gathered, x)
    structure = jax.tree.structure(shapes)

    def explicit(gathered: Pytree, x: Pytree, captured: list[Array]) -> Pytree:
        operands = jax.tree.leaves((gathered, x))
        leaves = jax.core.eval_jaxpr(program.jaxpr, captured, *operands)
        return jax.tree.unflatten(structure, leaves)

    return explicit, [jnp.asarray(leaf) for leaf in program.consts]


@dataclass(frozen=True, eq=False)
class _Scan:
    """One call: the block, the gather of its parameters, the number of layers."""

    block: Callable[[Pytree, list[Array], Pytree], Pytree]
    gather: Callable[[Pytree], Pytree]
    length: int

    def layer(self, params: Pytree, i: Any) -> Pytree:
        """The shards of layer i; if there is no such layer, those of the nearest layer."""
        i = jnp.clip(i, 0, self.length - 1)
        return jax.tree.map(lambda p: lax.dynamic_index_in_dim(p, i, keepdims=False), params)

    def gather_with_transpose(self, params: Pytree, i: Any) -> tuple[Pytree, Callable]:
        """The whole parameters of layer i, and the function that reduces their gradients."""
        shards, join = _split(self.layer(params, i))

        def gather_shards(shards: list[Array]) -> tuple[list[Array], Pytree]:
            gathered = self.gather(join(shards))
            return _split(gathered)[0], gathered

        # If only the transpose is used, the gather has no effect, and sends nothing.
        _, pull_back, gathered = jax.vjp(gather_shards, shards, has_aux=True)
        return gathered, lambda cts: pull_back(cts)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scanned(scan: _Scan, params: Pytree, captured: list[Array], x: Pytree) -> Pytree:
    return _through(scan, params, captured, x, lambda w, g, x: (scan.block(w, g, x), None))[0]


def _through(
    scan: _Scan, params: Pytree, captured: list[Array], x: Pytree, call: Callable
) -> tuple[Pytree, Any, Any]:
    """The last x, the whole parameters of the last layer, and what `call` kept of each layer."""

    def step(carry: Any, i: Array) -> Any:
        gathered, captured, x = carry
        coming = scan.gather(scan.layer(params, i + 1))
        x, kept = call(gathered, captured, x)
        return (coming, captured, x), kept

    start = (scan.gather(scan.layer(params, 0)), captured, x)
    (gathered, _, x), kept = lax.scan(step, start, jnp.arange(scan.length))
    return x, gathered, kept


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Shared:
    """Stands among the residuals of a layer for an array that is not kept with them."""

    number: int


def _scanned_forward(
    scan: _Scan, params: Pytree, captured: list[Array], x: Pytree
) -> tuple[Pytree, Any]:
    def call(gathered: Pytree, captured: list[Array], x: Pytree) -> Any:
        weights, join = _split((gathered, captured))

        def apply(weights: list[Array], x: Pytree) -> Pytree:
            gathered, captured = join(weights)
            return scan.block(gathered, captured, x)

        x, pull_back = jax.vjp(apply, weights, x)
        # `jax.vjp` returns a pytree of its residuals. Two kinds of them are not kept: whole
        # parameters, which the backward pass gathers again, and arrays that all layers share.
        # They are recognised by identity: `jax.vjp` keeps the same arrays that it was given.
        numbers = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((gathered, captured)))}
        leaves, tree = jax.tree.flatten(pull_back)
        kept = [_Shared(numbers[id(x)]) if id(x) in numbers else x for x in leaves]
        return x, jax.tree.unflatten(tree, kept)

    y, gathered, kept = _through(scan, params, captured, x, call)
    return y, (params, captured, gathered, kept)


def _scanned_backward(scan: _Scan, residuals: Any, ct: Pytree) -> tuple[Pytree, Any, Pytree]:
    params, captured, gathered, kept = residuals
    constants, join_captured = _split(captured)

    def step(carry: Any, at: Any) -> Any:
        gathered, ct_of_next, ct_of_captured, ct, grads = carry
        i, pull_back = at
        # The transpose of a gather does not depend on values. So the transpose of the gather of
        # layer i - 1 can reduce the gradients of layer i + 1. (After the last layer there is no
        # layer i + 1: the zeros that this gives are overwritten later.)
        coming, reduce = scan.gather_with_transpose(params, i - 1)
        grads = _placed(grads, reduce(ct_of_next), (i + 1) % scan.length)
        arrays = jax.tree.leaves((gathered, captured))
        leaves, tree = jax.tree.flatten(pull_back, is_leaf=lambda x: isinstance(x, _Shared))
        kept = [arrays[x.number] if isinstance(x, _Shared) else x for x in leaves]
        cts, ct = jax.tree.unflatten(tree, kept)(ct)
        ct_of_this, more = cts[: len(ct_of_next)], cts[len(ct_of_next) :]
        return (coming, ct_of_this, jax.tree.map(lax.add, ct_of_captured, more), ct, grads), None

    shards, join = _split(params)
    nothing = [_zeros(w) for w in _split(gathered)[0]]
    start = (gathered, nothing, [_zeros(c) for c in constants], ct, [_zeros(p) for p in shards])
    steps = (jnp.arange(scan.length), kept)
    (_, ct_of_first, ct_of_captured, ct, grads), _ = lax.scan(step, start, steps, reverse=True)
    _, reduce = scan.gather_with_transpose(params, 0)
    grads = _placed(grads, reduce(ct_of_first), 0)
    return join(grads, _no_gradient), join_captured(ct_of_captured, _no_gradient), ct


def _no_gradient(x: Array) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)


_scanned.defvjp(_scanned_forward, _scanned_backward)


def _split(tree: Pytree) -> tuple[list[Array], Callable[..., Pytree]]:
    """The arrays that have gradients, and a function that puts other arrays in their places."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, Gathered))
    own = [leaf.shard if isinstance(leaf, Gathered) else leaf for leaf in leaves]
    floats = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in own]

    def join(arrays: list[Array], other: Callable = lambda leaf: leaf) -> Pytree:
        rest = iter(arrays)

        def one(leaf: Any, is_float: bool) -> Any:
            if isinstance(leaf, Gathered):
                return replace(leaf, shard=next(rest))
            return next(rest) if is_float else other(leaf)

        return jax.tree.unflatten(structure, map(one, leaves, floats))

    return [leaf for leaf, is_float in zip(own, floats, strict=True) if is_float], join


def _zeros(x: Array) -> Array:
    return varying(jnp.zeros_like(x), tuple(jax.typeof(x).mat.varying))


def _placed(stacks: list[Array], layers: list[Array], i: Any) -> list[Array]:
    """The stacks, each with layer i written into it."""
    return [
        lax.dynamic_update_index_in_dim(stack, layer, i, 0)
        for stack, layer in zip(stacks, layers, strict=True)
    ]
