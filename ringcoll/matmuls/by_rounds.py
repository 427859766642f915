"""Products that are computed round by round, while shards or partial sums are on the wire.

`gathered_products` multiplies each shard as it arrives, `scattered_sum` multiplies each block just
before its partial sum is sent on: recipes on `ringcoll.gather` and `ringcoll.reduce`, after the
choice of a plan. By "lax" there is one product, of the whole operands.
"""

import functools
from typing import Any

import jax
from jax import Array, lax

from ringcoll.choose.plan import Plan
from ringcoll.collectives.visits import Arrived, Rounds, Wanted
from ringcoll.costs.wire import Wire
from ringcoll.matmuls.labels import Gather, Product, Scatter
from ringcoll.matmuls.options import Options
from ringcoll.runtime.value_types import empty, zeros
from ringcoll.schedules.registry import LAX


def gathered_products(
    options: Options, gather: Gather, plan: Plan, x: Array, others: list[Array]
) -> tuple[list[Array], Array | None]:
    """Every einsum(all shards of x, other), and the gathered x if `gather.keeps`.

    Products that the plan computes late come from the gathered x, at the end. Other arguments: as
    for `overlapped.gather_and_multiply`.
    """
    products, label, is_plain = gather.products, gather.label, plan.algorithm == LAX
    dim = gather.moving.index(label)
    early = [i for i in range(len(products)) if i not in plan.late]
    rounds = _rounds("all_gather_einsum", options, plan, dim, gather.wire)

    def product(i: int, arrived: Arrived) -> Array:
        p, other = products[i], others[i]
        other = arrived.take(other, p.other.index(label)) if label in p.other else other
        dtype = p.dtype if is_plain or label in p.out else p.sums or p.dtype
        return options.einsum(p.spec(gather.moving), arrived.value, other, dtype, p.sharding)

    def visit(carry: tuple[list[Any], Any], arrived: Arrived) -> tuple[list[Any], Any]:
        results, gathered = list[Any](), arrived.value if is_plain else carry[1]
        for i, result in zip(early, carry[0], strict=True):
            y, out = product(i, arrived), products[i].out
            if not is_plain:
                y = arrived.place(result, y, out.index(label)) if label in out else result + y
            results.append(y)
        if not (is_plain or gathered is None):
            gathered = arrived.place(gathered, arrived.value, dim)
        return results, gathered

    def buffer(like: Any, dim: int) -> Array:
        """A buffer for n times as many rows."""
        n = rounds.ranks().size
        shape = [n * size if d == dim else size for d, size in enumerate(like.shape)]
        return empty(shape, like, jax.typeof(x).mat.varying)

    def start(i: int) -> Array:
        """The sum to which product i is added, or the buffer of its result."""
        program = jax.make_jaxpr(lambda: product(i, rounds.own(x)))()
        (y,), p = program.out_avals, products[i]
        return buffer(y.update(dtype=p.dtype), p.out.index(label)) if label in p.out else zeros(y)

    carry: Any = [None] * len(early), None
    if not is_plain:
        keeps = gather.keeps or plan.late
        carry = [start(i) for i in early], buffer(jax.typeof(x), dim) if keeps else None
    adds = any(label not in products[i].out for i in early)
    results, gathered = rounds.gather(x, visit, carry, adds=adds)
    found = {i: y.astype(products[i].dtype) for i, y in zip(early, results, strict=True)}
    for i in plan.late:
        found[i] = multiply(options, gather.moving, products[i], gathered, others[i])
    return [found[i] for i in range(len(products))], gathered if gather.keeps else None


def scattered_sum(
    options: Options, scatter: Scatter, plan: Plan, pairs: list[tuple[Array, Array]]
) -> Array:
    """This rank's shard of the sum, over all pairs and all ranks, of einsum(a, b), by a plan."""
    label, dim = scatter.label, scatter.out.index(scatter.label)
    rounds = _rounds("einsum_reduce_scatter", options, plan, dim)

    def produce(wanted: Wanted) -> Array:
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
    return rounds.reduce(produce, size, by_turns=plan.by_turns).astype(scatter.dtype)


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
