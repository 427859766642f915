"""Products that are computed while shards are on the wire: the form of each, and its gradients.

There are two functions. Each is the transpose of the other, by the same schedule:

- `gather_and_multiply` computes y = einsum(all shards of x, other) for every other factor. Each
  shard is multiplied as it arrives. A rank holds the gathered x only for gradients, or for products
  that are computed late.
- `multiply_and_scatter` computes this rank's shard of the sum over ranks of einsum(a, b). Each
  block is multiplied just before its partial sum is sent on.

The gradient of `gather_and_multiply` with respect to x is a `multiply_and_scatter`; with respect to
the other factor it is a `gather_and_multiply`. Both gradients of `multiply_and_scatter` are
products with one gather of its cotangent. So derivatives of every order overlap as the function
does.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
from jax import Array, lax

from ringcoll.collectives import as_bytes
from ringcoll.collectives.by_schedule import named
from ringcoll.collectives.table import LAX
from ringcoll.matmuls import auto, auto_hosts, exchange
from ringcoll.matmuls.by_rounds import (
    gather_by_rounds,
    multiply,
    scatter_by_rounds,
    sum_of_products,
    times_as_long,
)
from ringcoll.matmuls.forms import Form, by_platform
from ringcoll.matmuls.labels import Gather, Product, Scatter
from ringcoll.matmuls.options import Options
from ringcoll.runtime import built_in
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.scopes import watched
from ringcoll.runtime.slicing import concatenated
from ringcoll.runtime.value_types import empty, explicit_spec


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_and_multiply(
    options: Options, gather: Gather, x: Array, others: list[Array]
) -> list[Array]:
    """Every einsum(all shards of x, other).

    Args:
        options: see `Options`.
        gather: see `Gather`.
        x: this rank's shard.
        others: the other factors, one for each product; each is whole.
    """
    return _gather_and_multiply(options, gather, x, others)[0]


def _gather_and_multiply_forward(options, gather, x, others):
    if not options.saves or exchange.stays(options, gather, x, others, keeps=True):
        return gather_and_multiply(options, gather, x, others), (x, None, others)
    keeping = replace(gather, keeps=True)
    results, gathered = _gather_and_multiply(options, keeping, x, others)
    return results, (None, gathered, others)


def _gather_and_multiply_backward(options, gather, residuals, cts):
    x, gathered, others = residuals
    label, moving, products = gather.label, gather.moving, gather.products
    terms = tuple((product.out, product.other) for product in products)
    like = x if gathered is None else gathered
    to_x = Scatter(label, moving, terms, like.dtype, explicit_spec(like), follows=True)
    ct_x = multiply_and_scatter(options, to_x, list(zip(cts, others, strict=True)))
    back = tuple(
        Product(p.out, p.other, other.dtype, explicit_spec(other))
        for p, other in zip(products, others, strict=True)
    )
    if gathered is None:
        ct_others = gather_and_multiply(options, replace(gather, products=back), x, cts)
    else:
        ct_others = [
            multiply(options, moving, p, gathered, ct) for p, ct in zip(back, cts, strict=True)
        ]
    return ct_x, ct_others


gather_and_multiply.defvjp(_gather_and_multiply_forward, _gather_and_multiply_backward)


def _gather_and_multiply(
    options: Options, gather: Gather, x: Array, others: list[Array], late: Sequence[int] = ()
) -> tuple[list[Array], Array | None]:
    """The results, and the gathered x if `gather.keeps`.

    The products with indices in `late` are computed at the end, from the gathered x.
    """
    if options.algorithm == "auto":
        model, sizes = options.model(), options.sizes()
        if not gather.keeps and exchange.stays(options, gather, x, others):
            form = Form(exchange.EXCHANGED)
        else:
            form = Form(*auto.to_gather(gather, x, others, sizes, model))
        between = Form(auto_hosts.to_gather(gather, x, others, prod(sizes)))

        def run(form: Form, x: Array, others: list[Array]) -> Any:
            if form.algorithm == exchange.EXCHANGED:
                return _exchanged(options, gather, x, others), None
            with_form = replace(options, algorithm=form.algorithm)
            return _gather_and_multiply(with_form, gather, x, others, form.late)

        return by_platform(options.axes, form, between, run, x, others)
    dim = gather.moving.index(gather.label)

    def send(x: Array) -> Array:
        if gather.wire:
            return as_bytes.all_gather(x, dim, Ranks.over(options.axes, None), gather.wire)
        return built_in.all_gather(x, options.axes, axis=dim, tiled=True)

    if options.algorithm != LAX:
        with named("all_gather_einsum", options.algorithm, "all_gather"):
            return gather_by_rounds(options, gather, x, others, late)
    elif 0 in x.shape:  # nothing to send, and lax's all_gather cannot be compiled for it
        gathered = empty(times_as_long(x.shape, dim, prod(options.sizes())), x, options.axes)
    else:
        with named("all_gather_einsum", LAX, "all_gather"):
            gathered = watched(send, x, options.axes)
    results = [
        multiply(options, gather.moving, p, gathered, other)
        for p, other in zip(gather.products, others, strict=True)
    ]
    return results, gathered if gather.keeps else None


def _exchanged(options: Options, gather: Gather, x: Array, others: list[Array]) -> list[Array]:
    """The results of the form in which x stays, and the rows of the other factor travel."""
    label, sizes, model, results = gather.label, options.sizes(), options.model(), []
    for product, other in zip(gather.products, others, strict=True):
        in_place = exchange.in_place_of(gather, product, other)
        if isinstance(in_place, Scatter):
            pair = x, exchange.swapped(options, other, product.other, label, in_place.label)
            by = replace(options, algorithm=auto.to_scatter(in_place, [pair], sizes, model))
            results.append(multiply_and_scatter(by, in_place, [pair]))
        elif in_place:
            by = replace(options, algorithm=auto.to_gather(in_place, other, [x], sizes, model)[0])
            (y,) = gather_and_multiply(by, in_place, other, [x])
            results.append(exchange.swapped(options, y, product.out, in_place.label, label))
    return results


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_and_scatter(
    options: Options, scatter: Scatter, pairs: list[tuple[Array, Array]]
) -> Array:
    """This rank's shard of the sum of einsum(a, b), over all pairs and all ranks.

    Args:
        options: see `Options`.
        scatter: see `Scatter`.
        pairs: the factors a and b of each product.
    """
    if options.algorithm == "auto":
        model, sizes = options.model(), options.sizes()
        if any(explicit_spec(x) is not None for pair in pairs for x in pair):
            # If the mesh has an explicit axis, JAX cannot lower lax.psum_scatter on any platform.
            algorithm = next(iter(auto.hiding_algorithms(sizes, model)))
            return multiply_and_scatter(replace(options, algorithm=algorithm), scatter, pairs)
        form = Form(auto.to_scatter(scatter, pairs, sizes, model))
        between = Form(auto_hosts.to_scatter(scatter, pairs, prod(sizes), jax.__version__))

        def run(form: Form, pairs: list[tuple[Array, Array]]) -> Array:
            return multiply_and_scatter(replace(options, algorithm=form.algorithm), scatter, pairs)

        return by_platform(options.axes, form, between, run, pairs)
    dim, dtype = scatter.out.index(scatter.label), scatter.dtype
    factors = [x for pair in pairs for x in pair]
    if options.algorithm == LAX:
        scatter_sum = partial(
            built_in.psum_scatter, axis_name=options.axes, scatter_dimension=dim, tiled=True
        )
        with named("einsum_reduce_scatter", LAX, "psum_scatter"):
            total = sum_of_products(options, scatter, factors)
            if 0 in total.shape:  # as for a gather
                shard = total.shape[dim] // prod(options.sizes())
                return lax.slice_in_dim(total, 0, shard, axis=dim).astype(dtype)
            return watched(scatter_sum, total, options.axes).astype(dtype)
    with named("einsum_reduce_scatter", options.algorithm, "psum_scatter"):
        mine = scatter_by_rounds(options, scatter, factors)
    return concatenated(mine, dim).astype(dtype)


def _multiply_and_scatter_forward(options, scatter, pairs):
    return multiply_and_scatter(options, replace(scatter, keeps=True), pairs), pairs


def _multiply_and_scatter_backward(options, scatter, pairs, ct):
    products, others = [], []
    for (a_labels, b_labels), (a, b) in zip(scatter.terms, pairs, strict=True):
        products += [
            Product(b_labels, a_labels, a.dtype, explicit_spec(a)),
            Product(a_labels, b_labels, b.dtype, explicit_spec(b)),
        ]
        others += [b, a]
    gather = Gather(scatter.label, scatter.out, tuple(products))
    back = gather_and_multiply(replace(options, saves=False), gather, ct, others)
    return ([(back[i], back[i + 1]) for i in range(0, len(back), 2)],)


multiply_and_scatter.defvjp(_multiply_and_scatter_forward, _multiply_and_scatter_backward)
