"""Products that are computed round by round, while shards or partial sums are on the wire.

`gather_by_rounds` multiplies each shard as it arrives. `scatter_by_rounds` multiplies each block
just before its partial sum is sent on. `multiply` and `sum_of_products` compute the same products
from whole operands.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.choose.plan import Plan
from ringcoll.matmuls.labels import Gather, Product, Scatter
from ringcoll.matmuls.options import Options
from ringcoll.runtime import engine, turns
from ringcoll.runtime.barriers import order_of_work
from ringcoll.runtime.contributions import Contributions, Shard, Slot
from ringcoll.runtime.order import Order
from ringcoll.runtime.slicing import (
    Shares,
    buffer_after,
    concatenated,
    dynamic_slice_in_dim,
    end_to_end,
    placed,
    sliced_along,
)
from ringcoll.runtime.value_types import empty, varying, zeros


def gather_by_rounds(
    options: Options, gather: Gather, plan: Plan, x: Array, others: list[Array]
) -> tuple[list[Array], Array | None]:
    """Every einsum(all shards of x, other), and the gathered x if `gather.keeps`.

    The algorithm of the plan is a schedule. Products that it computes late come from the gathered
    x, at the end. Other arguments: as for `gather_and_multiply`.
    """
    products, late = gather.products, plan.late
    dim = gather.moving.index(gather.label)
    schedule, ranks = options.schedule(plan.algorithm)
    shares = Shares(x.shape[dim], schedule.lanes, schedule.size)
    own = [dynamic_slice_in_dim(x, *shares.of(lane), dim) for lane in range(schedule.lanes)]
    early = [i for i in range(len(products)) if i not in late]
    order = order_of_work(sums=any(gather.label not in products[i].out for i in early))
    visitor = _Visitor(options, gather, others, early, shares)
    gathered = (
        empty(times_as_long(x.shape, dim, schedule.size), x, ()) if gather.keeps or late else None
    )
    results: list[Any] = [None if order.begins_with_work else visitor.start(i, x) for i in early]
    state = results, gathered
    results, gathered = engine.gather(
        schedule, ranks, own, visitor.visit, state, order=order, wire=gather.wire
    )
    of_products = {i: y.astype(products[i].dtype) for i, y in zip(early, results, strict=True)}
    if gathered is not None:
        late_product = partial(multiply, options, gather.moving)
        of_products |= {i: late_product(products[i], gathered, others[i]) for i in late}
    return [of_products[i] for i in range(len(products))], gathered if gather.keeps else None


@dataclass(frozen=True)
class _Visitor:
    """Computes the products with indices in `early` as the shards of a gather arrive.

    Lanes have `shares` of each shard.
    """

    options: Options
    gather: Gather
    others: list[Array]
    early: list[int]
    shares: Shares

    def multiply(self, i: int, piece: Array, places: list[tuple[Any, int]]) -> Array:
        """Product i of a piece of x, which is at these places."""
        p = self.gather.products[i]
        other = sliced_along(self.others[i], p.other, self.gather.label, places)
        return self.options.einsum(p.spec(self.gather.moving), piece, other, p.dtype, p.sharding)

    def start(self, i: int, x: Array) -> Array:
        """Before the first visit: the sum to which product i is added, or its result's buffer."""
        p, label = self.gather.products[i], self.gather.label
        program = jax.make_jaxpr(lambda: self.multiply(i, x, [(0, self.shares.size)]))()
        (y,) = program.out_avals
        if label not in p.out:
            return zeros(y)
        shape = times_as_long(y.shape, p.out.index(label), self.shares.n)
        return varying(empty(shape, y.update(dtype=p.dtype), ()), jax.typeof(x).mat.varying)

    def visit(self, carry: tuple[list[Any], Array | None], shards: list[Shard]) -> Any:
        """Multiply the shards of a round. The first visit makes the results that are still None."""
        (results, gathered), label = carry, self.gather.label
        dim, places = self.gather.moving.index(label), self.shares.places(shards)
        # Decoded values are written to their place at once; a concatenation would copy them.
        join = end_to_end if self.gather.wire else concatenated
        piece = join([shard.value for shard in shards], dim)
        updated = []
        for i, result in zip(self.early, results, strict=True):
            y, p = self.multiply(i, piece, places), self.gather.products[i]
            if label not in p.out:
                updated.append(y if result is None else result + y)
                continue
            out, y = p.out.index(label), y.astype(p.dtype)
            if result is None:
                result = buffer_after(y, out, self.shares.size * self.shares.n)
            updated.append(placed(result, y, out, places))
        return updated, gathered if gathered is None else placed(gathered, piece, dim, places)


def times_as_long(shape: Sequence[int], dim: int, n: int) -> tuple[int, ...]:
    """A shape that is n times as long along one dimension."""
    return tuple(s * n if d == dim else s for d, s in enumerate(shape))


def multiply(options: Options, moving: str, product: Product, x: Array, other: Array) -> Array:
    """One whole product, in the dtype of its result."""
    y = options.einsum(product.spec(moving), x, other, product.dtype, product.sharding)
    return y.astype(product.dtype)


def sum_of_products(options: Options, scatter: Scatter, factors: Sequence[Array]) -> Array:
    """The sum of the products of all terms; `factors` has both factors of each term in turn."""
    specs = [f"{a},{b}->{scatter.out}" for a, b in scatter.terms]
    of_terms, typed = zip(specs, factors[::2], factors[1::2], strict=True), scatter.sharding
    products = [options.einsum(spec, a, b, scatter.dtype, typed) for spec, a, b in of_terms]
    return functools.reduce(lax.add, products)


def scatter_by_rounds(
    options: Options, scatter: Scatter, plan: Plan, factors: list[Array]
) -> list[Array]:
    """This rank's shard of the sum over ranks, a share for each lane.

    The algorithm of the plan is a schedule. `factors` has both factors of each term in turn.
    """
    schedule, ranks = options.schedule(plan.algorithm)
    labels = [labels for term in scatter.terms for labels in term]
    of_factors = zip(factors, labels, strict=True)
    sizes = [x.shape[own.index(scatter.label)] for x, own in of_factors if scatter.label in own]
    size, order = sizes[0] // schedule.size, order_of_work()
    shares = Shares(size, schedule.lanes, schedule.size)
    blocks = _Blocks(options, scatter, factors, labels, shares, order)
    unsliced = blocks.unsliced()
    if plan.by_turns and order.takes_turns:
        halves = replace(blocks, shares=replace(shares, lanes=2 * schedule.lanes))
        return turns.reduce(schedule, ranks, halves.add, halves.start)
    return engine.reduce(schedule, ranks, blocks.produce, lax.add, unsliced, order=order)


@dataclass(frozen=True)
class _Blocks:
    """Computes the sum of a scatter block by block, from slices of the factors with its label.

    `factors` are the factors of all terms, with their `labels`; lanes have `shares` of each block.
    """

    options: Options
    scatter: Scatter
    factors: list[Array]
    labels: list[str]
    shares: Shares
    order: Order

    def unsliced(self) -> list[Array]:
        """The factors that are not sliced. (With a barrier, a slice would become a copy.)"""
        of_factors = zip(self.factors, self.labels, strict=True)
        return [x for x, own in of_factors if self.scatter.label not in own]

    def produce(
        self, unsliced: list[Array], slots: Sequence[Slot], received: Sequence[Array] = ()
    ) -> Contributions:
        """This rank's contributions; with `received` partial sums (by turns), added to these."""
        label, out, rest = self.scatter.label, self.scatter.out, iter(unsliced)
        places = self.shares.places(slots)
        sums = [concatenated(received, out.index(label))] if received else []
        parts = [
            self.order.apart(sliced_along(x, own, label, places)) if label in own else next(rest)
            for x, own in zip(self.factors, self.labels, strict=True)
        ]
        y = functools.reduce(lax.add, [*sums, sum_of_products(self.options, self.scatter, parts)])
        ends = np.cumsum([width for _, width in places])[:-1]
        sliced = [x for x, own in zip(parts, self.labels, strict=True) if label in own]
        return Contributions(jnp.split(y, ends, out.index(label)), sliced)

    def add(self, slots: Sequence[Slot], received: Sequence[Array]) -> Sequence[Array]:
        """See `turns.Add`."""
        return self.produce(self.unsliced(), slots, received).values

    def start(self, slot: Slot) -> Array:
        """Zeros for a slot: the first contribution is added to them."""
        program = jax.make_jaxpr(lambda: self.produce(self.unsliced(), [slot]).values)
        return zeros(program().out_avals[0])
