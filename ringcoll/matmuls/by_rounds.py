"""Products that are computed round by round, while shards or partial sums are on the wire.

`gathered_products` multiplies each shard as it arrives, `scattered_sum` multiplies each block just
before its partial sum is sent on: recipes on `ringcoll.gather` and `ringcoll.reduce`, after the
choice of a plan. By "lax" there is one product, of the whole operands.
"""

import functools
from typing import Any

import jax
from jax import Array, lax

from ringcoll.choose.plan import Late, Plan
from ringcoll.collectives.visits import Rounds, Rows, own_rows
from ringcoll.costs.wire import Wire
from ringcoll.matmuls.labels import Gather, Product, Scatter
from ringcoll.matmuls.options import Options
from ringcoll.runtime.value_types import zeros
from ringcoll.schedules.registry import LAX


def gathered_products(
    options: Options, gather: Gather, plan: Plan, x: Array, others: list[Array], *, keeps: bool
) -> tuple[list[Array], Array | None]:
    """Every einsum(all shards of x, other), and the gathered x if `keeps`.

    Products that the plan computes late come from the gathered x, at the end. Other arguments: as
    for `overlapped.gather_and_multiply`.
    """
    products, label, is_plain = gather.products, gather.label, plan.algorithm == LAX
    late = plan.form.products if isinstance(plan.form, Late) else ()
    dim, places_x = gather.moving.index(label), bool(keeps or late)
    early = [i for i in range(len(products)) if i not in late]
    placed = [i for i in early if label in products[i].out]
    summed = [i for i in early if label not in products[i].out]
    rounds = _rounds("all_gather_einsum", options, plan, dim, gather.wire)

    def product(i: int, arrived: Rows) -> Array:
        p, other = products[i], others[i]
        other = arrived.take(other, p.other.index(label)) if label in p.other else other
        dtype = p.dtype if is_plain or label in p.out else p.sums or p.dtype
        return options.einsum(p.spec(gather.moving), arrived.value, other, dtype, p.sharding)

    def visit(sums: list[Array], arrived: Rows) -> tuple[list[Array], list[Array]]:
        rows = [product(i, arrived).astype(products[i].dtype) for i in placed]
        terms = [product(i, arrived) for i in summed]
        sums = terms if is_plain else list(map(lax.add, sums, terms))
        return sums, [*rows, arrived.value] if places_x else rows

    sums, rows, dims = list[Array](), list[Any](), [products[i].out.index(label) for i in placed]
    if not is_plain:
        own = own_rows(x, rounds.ranks(), dim)
        types = {i: jax.make_jaxpr(product, static_argnums=0)(i, own).out_avals[0] for i in early}
        sums = [zeros(types[i]) for i in summed]
        rows = [types[i].update(dtype=products[i].dtype) for i in placed]
    if places_x:
        rows, dims = [*rows, jax.typeof(x)], [*dims, dim]
    sums, rows = rounds.gather(x, visit, sums, rows, dims, adds=bool(summed))
    found = dict(zip([*summed, *placed], [*sums, *rows], strict=False))
    for i in late:
        found[i] = multiply(options, gather.moving, products[i], rows[-1], others[i])
    results = [found[i].astype(products[i].dtype) for i in range(len(products))]
    return results, rows[-1] if keeps else None


def scattered_sum(
    options: Options, scatter: Scatter, plan: Plan, pairs: list[tuple[Array, Array]]
) -> Array:
    """This rank's shard of the sum, over all pairs and all ranks, of einsum(a, b), by a plan."""
    label, dim = scatter.label, scatter.out.index(scatter.label)
    rounds = _rounds("einsum_reduce_scatter", options, plan, dim)

    def produce(wanted: Rows) -> Array:
        products = []
        for labels, factors in zip(scatter.terms, pairs, strict=True):
            a, b = (
                wanted.take(x, own.index(label)) if label in own else x
                for own, x in zip(labels, factors, strict=True)
            )
            spec = f"{labels[0]},{labels[1]}->{scatter.out}"
            products.append(options.einsum(spec, a, b, scatter.dtype, scatter.sharding))
        return functools.reduce(lax.add, products)

    of_first = zip(scatter.terms[0], pairs[0], strict=True)
    size, *_ = (x.shape[own.index(label)] for own, x in of_first if label in own)
    size //= rounds.ranks().size
    return rounds.reduce(produce, size).astype(scatter.dtype)


def multiply(options: Options, moving: str, product: Product, x: Array, other: Array) -> Array:
    """One whole product, in the dtype of its result."""
    y = options.einsum(product.spec(moving), x, other, product.dtype, product.sharding)
    return y.astype(product.dtype)


def _rounds(name: str, options: Options, plan: Plan, dim: int, wire: Wire | None = None) -> Rounds:
    """The rounds of a plan. In the plain form the collective is "auto", unless "lax" was named."""
    return Rounds(
        name=name,
        axes=options.axes,
        algorithm=plan.algorithm,
        collective=options.algorithm,
        dim=dim,
        wire=wire,
    )
