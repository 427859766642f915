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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringcoll.choose.plan import EARLY, Plan
from ringcoll.choose.under_work import hides_early
from ringcoll.collectives.choice import PlansOn, plan_under_work
from ringcoll.matmuls import plans
from ringcoll.matmuls.by_rounds import gathered_products, multiply, scattered_sum
from ringcoll.matmuls.labels import Gather, Product, Scatter
from ringcoll.matmuls.options import Options
from ringcoll.runtime.scopes import record_plan_at_lowering
from ringcoll.runtime.value_types import device_kind, explicit_spec


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
    return _planned_gather(options, gather, x, others, keeps=False)[0]


def _gather_and_multiply_forward(options, gather, x, others):
    if not options.saves:
        return gather_and_multiply(options, gather, x, others), (x, None, others)
    results, gathered = _planned_gather(options, gather, x, others, keeps=True)
    return results, (None, gathered, others)


def _gather_and_multiply_backward(options, gather, residuals, cts):
    x, gathered, others = residuals
    label, moving, products = gather.label, gather.moving, gather.products
    terms = tuple((product.out, product.other) for product in products)
    like = x if gathered is None else gathered
    to_x = Scatter(label, moving, terms, like.dtype, explicit_spec(like))
    ct_x = multiply_and_scatter(options, to_x, list(zip(cts, others, strict=True)))
    back = tuple(
        Product(p.out, p.other, *_types(other)) for p, other in zip(products, others, strict=True)
    )
    if gathered is None:
        ct_others = gather_and_multiply(options, replace(gather, products=back), x, cts)
    else:
        ct_others = [
            multiply(options, moving, p, gathered, ct) for p, ct in zip(back, cts, strict=True)
        ]
    return ct_x, ct_others


gather_and_multiply.defvjp(_gather_and_multiply_forward, _gather_and_multiply_backward)


def _types(x: Array) -> tuple[np.dtype, Any, np.dtype | None]:
    """Of a gradient of x: the dtype, the sharding, and the dtype of sums: they are rounded once."""
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.dtype, explicit_spec(x), np.dtype(np.float32) if is_narrow else None


def _planned_gather(
    options: Options, gather: Gather, x: Array, others: list[Array], *, keeps: bool
) -> tuple[list[Array], Array | None]:
    """The results; and the gathered x, if it is kept for the gradient."""
    plan = plan_of_gather(options, gather, x, others)
    x, others = record_plan_at_lowering("all_gather_einsum", options.axes, (x, others), plan)
    return gathered_products(options, gather, plan, x, others, keeps=keeps)


def plan_of_gather(options: Options, gather: Gather, x: Any, others: Sequence[Any]) -> Plan:
    """How `gather_and_multiply` runs, for arrays or their types."""
    return _plan(options, (x, others), partial(plans.of_gather, gather, x, others))


def plan_of_scatter(options: Options, scatter: Scatter, pairs: Sequence[tuple[Any, Any]]) -> Plan:
    """How `multiply_and_scatter` runs, for arrays or their types."""
    return _plan(options, pairs, partial(plans.of_scatter, scatter, pairs))


def _plan(options: Options, arrays: Any, plans_on: PlansOn) -> Plan:
    """How a call runs. A weight is gathered early, and its gradient is not waited for."""
    why = EARLY if options.early and hides_early(device_kind()) else ""
    return plan_under_work(options.algorithm, options.axes, arrays, plans_on, why)


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
    plan = plan_of_scatter(options, scatter, pairs)
    pairs = record_plan_at_lowering("einsum_reduce_scatter", options.axes, pairs, plan)
    return scattered_sum(options, scatter, plan, pairs)


def _multiply_and_scatter_forward(options, scatter, pairs):
    return multiply_and_scatter(options, scatter, pairs), pairs


def _multiply_and_scatter_backward(options, scatter, pairs, ct):
    products, others = [], []
    for (a_labels, b_labels), (a, b) in zip(scatter.terms, pairs, strict=True):
        products += [
            Product(b_labels, a_labels, *_types(a)),
            Product(a_labels, b_labels, *_types(b)),
        ]
        others += [b, a]
    gather = Gather(scatter.label, scatter.out, tuple(products))
    back = gather_and_multiply(replace(options, saves=False), gather, ct, others)
    return ([(back[i], back[i + 1]) for i in range(0, len(back), 2)],)


multiply_and_scatter.defvjp(_multiply_and_scatter_forward, _multiply_and_scatter_backward)
