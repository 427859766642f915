"""Products that are computed while shards are on the wire, and their gradients.

There are two functions. Each is the transpose of the other, by the same schedule:

- `gather_and_multiply`: every y = einsum(all shards of x, other): each shard is multiplied as it
  arrives, and no rank ever holds the gathered x;
- `multiply_and_scatter`: y = this rank's shard of the sum over ranks of einsum(a, b): each block is
  multiplied just before its partial sum is sent on.

The gradient of `gather_and_multiply` with respect to x is a `multiply_and_scatter`; with respect to
the other factor it is a `gather_and_multiply`. Both gradients of `multiply_and_scatter` are
products with one gather of its cotangent. So derivatives of every order overlap as the function
does.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.collectives import as_bytes
from ringcoll.collectives.all_gather import AllGather, PsumScatter
from ringcoll.collectives.by_schedule import named
from ringcoll.collectives.table import LAX
from ringcoll.matmuls import auto, auto_gpus, auto_hosts, exchange
from ringcoll.matmuls.forms import Form, by_platform
from ringcoll.matmuls.labels import Gather, Product, Scatter
from ringcoll.matmuls.options import Options
from ringcoll.runtime import built_in, engine, turns
from ringcoll.runtime.barriers import order_of_work
from ringcoll.runtime.contributions import Contributions, Shard, Slot
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.order import Order
from ringcoll.runtime.progress import marked
from ringcoll.runtime.slicing import (
    Shares,
    buffer_after,
    concatenated,
    end_to_end,
    placed,
    sliced_along,
)
from ringcoll.runtime.tree_sums import added, summed
from ringcoll.runtime.value_types import device_kind, empty, explicit_spec, varying, zeros


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
    results, gathered = _gather_and_multiply(options, gather, x, others, keep=True)
    return results, (None, gathered, others)


def _gather_and_multiply_backward(options, gather, residuals, cts):
    x, gathered, others = residuals
    label, moving, products = gather.label, gather.moving, gather.products
    terms = tuple((product.out, product.other) for product in products)
    wires = gather.gradient_wire, gather.gradient_wire
    like = x if gathered is None else gathered
    to_x = Scatter(label, moving, terms, like.dtype, explicit_spec(like), *wires, follows=True)
    ct_x = multiply_and_scatter(options, to_x, list(zip(cts, others, strict=True)))
    back = tuple(
        Product(p.out, p.other, other.dtype, explicit_spec(other))
        for p, other in zip(products, others, strict=True)
    )
    if gathered is None:
        ct_others = gather_and_multiply(options, replace(gather, products=back), x, cts)
    else:
        ct_others = [
            _multiplied(options, moving, p, gathered, ct) for p, ct in zip(back, cts, strict=True)
        ]
    return ct_x, ct_others


gather_and_multiply.defvjp(_gather_and_multiply_forward, _gather_and_multiply_backward)


def _gather_and_multiply(
    options: Options,
    gather: Gather,
    x: Array,
    others: list[Array],
    keep: bool = False,
    late: Sequence[int] = (),
) -> tuple[list[Array], Array | None]:
    """The results, and the gathered x if `keep`.

    The products with indices in `late` are computed from the gathered x, after its last shard came.
    """
    if options.algorithm == "auto":
        model, sizes = options.model(), options.sizes()
        if not keep and exchange.stays(options, gather, x, others):
            form = Form(exchange.EXCHANGED)
        else:
            form = Form(*auto.to_gather(gather, x, others, sizes, model))
        on_gpus = auto_gpus.to_gather(gather, x, others, prod(sizes), device_kind())
        gpus = Form(on_gpus)  # its price assumed that no product is computed late
        between = Form(auto_hosts.to_gather(gather, x, others, prod(sizes)))
        if options.of_whole():
            between = Form(LAX)

        def run(form: Form, x: Array, others: list[Array]) -> Any:
            if form.algorithm == exchange.EXCHANGED:
                return _exchanged(options, gather, x, others), None
            chosen = replace(options, algorithm=form.algorithm)
            return _gather_and_multiply(chosen, gather, x, others, keep, form.late)

        return by_platform(options.axes, form, gpus, between, run, x, others)
    dim = gather.moving.index(gather.label)

    def send(x: Array) -> Array:
        if gather.wire:
            return as_bytes.gathered(x, dim, Ranks.over(options.axes, None), gather.wire)
        return built_in.all_gather(x, options.axes, axis=dim, tiled=True)

    if options.of_whole():
        all_gather = AllGather(axes=options.axes, dims=(dim,), algorithm=options.algorithm)
        (gathered,) = all_gather(x)
    elif options.algorithm != LAX:
        if options.leaves is not None:  # as shards arrive, each rank would add in another order
            late = [i for i, p in enumerate(gather.products) if gather.label not in p.out]
        with named("all_gather_einsum", options.algorithm, "all_gather"):
            return _gather_and_multiply_by_rounds(options, gather, x, others, keep, late)
    elif 0 in x.shape:  # nothing to send, and lax's all_gather cannot be compiled for it
        gathered = empty(_times(x.shape, dim, prod(options.sizes())), x, options.axes)
    else:
        with named("all_gather_einsum", LAX, "all_gather"):
            gathered = marked(send, x, options.axes)
    results = [
        _multiplied(options, gather.moving, p, gathered, other)
        for p, other in zip(gather.products, others, strict=True)
    ]
    return results, gathered if keep else None


def _exchanged(options: Options, gather: Gather, x: Array, others: list[Array]) -> list[Array]:
    """The results, computed while x stays where it is and rows travel."""
    label, sizes, model, results = gather.label, options.sizes(), options.model(), []
    for product, other in zip(gather.products, others, strict=True):
        of = exchange.in_place_of(gather, product, other)
        if isinstance(of, Scatter):
            pair = x, exchange.swapped(options, other, product.other, label, of.label)
            chosen = replace(options, algorithm=auto.to_scatter(of, [pair], sizes, model))
            results.append(multiply_and_scatter(chosen, of, [pair]))
        elif of:
            chosen = replace(options, algorithm=auto.to_gather(of, other, [x], sizes, model)[0])
            (y,) = gather_and_multiply(chosen, of, other, [x])
            results.append(exchange.swapped(options, y, product.out, of.label, label))
    return results


def _gather_and_multiply_by_rounds(
    options: Options, gather: Gather, x: Array, others: list[Array], keep: bool, late: Sequence[int]
) -> tuple[list[Array], Array | None]:
    products, kind = gather.products, device_kind()
    dim = gather.moving.index(gather.label)
    schedule, ranks = options.schedule()
    shares = Shares(x.shape[dim], schedule.lanes)
    own = [lax.dynamic_slice_in_dim(x, *shares.of(lane), dim) for lane in range(schedule.lanes)]
    early = [i for i in range(len(products)) if i not in late]
    joining = auto.joining(gather, x, others, schedule, auto.machine(kind))
    pairs = not (keep or late) and auto.pairs_pay(gather, x, others, schedule, kind)
    sums = any(gather.label not in products[i].out for i in early)
    order = order_of_work(sums=sums, pairs=pairs)
    visitor = _Visitor(options, gather, others, early, shares, schedule.size, joining)
    gathered = empty(_times(x.shape, dim, schedule.size), x, ()) if keep or late else None
    results: list[Any] = [None if order.begins_with_work else visitor.begun(i, x) for i in early]
    state = results, gathered
    results, gathered = engine.gather(
        schedule, ranks, own, visitor.visit, state, order=order, wire=gather.wire
    )
    of_products = {i: y.astype(products[i].dtype) for i, y in zip(early, results, strict=True)}
    if gathered is not None:
        late_product = partial(_multiplied, options, gather.moving)
        of_products |= {i: late_product(products[i], gathered, others[i]) for i in late}
    return [of_products[i] for i in range(len(products))], gathered if keep else None


@dataclass(frozen=True)
class _Visitor:
    """Computes the products with indices in `early` as the shards of a gather arrive.

    There are `n` shards; lanes have `shares` of each. `joining` is the result of `auto.joining`.
    """

    options: Options
    gather: Gather
    others: list[Array]
    early: list[int]
    shares: Shares
    n: int
    joining: str

    def multiplied(self, i: int, piece: Array, places: list[tuple[Any, int]]) -> Array:
        """Product i of a piece of x, which is at these places."""
        p = self.gather.products[i]
        other = sliced_along(self.others[i], p.other, self.gather.label, places)
        moving = self.gather.moving
        spec, cut = p.spec(moving), p.cut(moving)
        return self.options.einsum(spec, piece, other, p.dtype, p.sharding, cut)

    def begun(self, i: int, x: Array) -> Array:
        """Before the first visit: the sum to which product i is added, or its result's buffer."""
        p, label = self.gather.products[i], self.gather.label
        program = jax.make_jaxpr(lambda: self.multiplied(i, x, [(0, self.shares.size)]))()
        (y,) = program.out_avals
        if label not in p.out:
            return zeros(y)
        shape = _times(y.shape, p.out.index(label), self.n)
        return varying(empty(shape, y.update(dtype=p.dtype), ()), jax.typeof(x).mat.varying)

    def visit(self, carry: tuple[list[Any], Array | None], shards: list[Shard]) -> Any:
        """Multiply the shards of a round; the first of them begins what has not begun."""
        (results, gathered), label = carry, self.gather.label
        dim = self.gather.moving.index(label)
        for together in [[shard] for shard in shards] if self.joining == "apart" else [shards]:
            places = self.shares.places(together)
            values = [shard.value for shard in together]
            # Decoded values are written to their place at once; a concatenation would copy them.
            joined = self.joining == "copied" and self.gather.wire is not None
            piece = (end_to_end if joined else concatenated)(values, dim)
            # If the gathered x is kept, the parts are already copied into it.
            if self.joining == "copied" and gathered is None and len(shards) > 1:
                piece = lax.optimization_barrier(piece)
            updated = []
            for i, result in zip(self.early, results, strict=True):
                y, p = self.multiplied(i, piece, places), self.gather.products[i]
                if label not in p.out:
                    updated.append(y if result is None else result + y)
                    continue
                out, y = p.out.index(label), y.astype(p.dtype)
                if result is None:
                    result = buffer_after(y, out, self.shares.size * self.n)
                updated.append(placed(result, y, out, places))
            results, gathered = (
                updated,
                gathered if gathered is None else placed(gathered, piece, dim, places),
            )
        return results, gathered


def _times(shape: Sequence[int], dim: int, n: int) -> tuple[int, ...]:
    """A shape that is n times as long along one dimension."""
    return tuple(s * n if d == dim else s for d, s in enumerate(shape))


def _multiplied(options: Options, moving: str, product: Product, x: Array, other: Array) -> Array:
    """One whole product, in the dtype of its result."""
    spec, cut = product.spec(moving), product.cut(moving)
    y = options.einsum(spec, x, other, product.dtype, product.sharding, cut)
    return y.astype(product.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_and_scatter(
    options: Options, scatter: Scatter, pairs: list[tuple[Array, Array]]
) -> Array:
    """This rank's shard of the sum over ranks of the sum of einsum(a, b).

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
            if options.leaves is not None:
                algorithm = auto.IN_ORDER
            return multiply_and_scatter(replace(options, algorithm=algorithm), scatter, pairs)
        form = Form(auto.to_scatter(scatter, pairs, sizes, model))
        gpus = Form(auto_gpus.to_scatter(scatter, pairs, prod(sizes), device_kind()))
        between = Form(auto_hosts.to_scatter(scatter, pairs, prod(sizes), jax.__version__))
        if options.leaves is not None:  # the ring would add in another order
            if form.algorithm != LAX:
                form = Form(auto.to_scatter_in_order(scatter, pairs, prod(sizes), model))
            if gpus.algorithm != LAX:
                gpus = Form(auto.IN_ORDER)
            between = Form(LAX)

        def run(form: Form, pairs: list[tuple[Array, Array]]) -> Array:
            return multiply_and_scatter(replace(options, algorithm=form.algorithm), scatter, pairs)

        return by_platform(options.axes, form, gpus, between, run, pairs)
    dim, dtype = scatter.out.index(scatter.label), scatter.dtype
    factors = [x for pair in pairs for x in pair]
    if scatter.wire:  # values that a wire rounded are added in float32 or wider
        wide = options.accumulate_dtype or jnp.promote_types(dtype, jnp.float32)
        options = replace(options, accumulate_dtype=wide)
    if options.leaves is not None and (options.of_whole() or options.algorithm == LAX):
        tree_options: dict[str, Any] = {"algorithm": options.algorithm, "leaves": options.leaves}
        with named("einsum_reduce_scatter", options.algorithm, "psum_scatter"):
            total = _summed(options, scatter, factors)
            (own,) = PsumScatter(axes=options.axes, dims=(dim,), **tree_options)(total)
            return own.astype(dtype)
    if options.algorithm == LAX:
        scatter_sum = partial(
            built_in.psum_scatter, axis_name=options.axes, scatter_dimension=dim, tiled=True
        )
        if scatter.wire:
            scatter_sum = partial(
                as_bytes.scattered,
                dim=dim,
                ranks=Ranks.over(options.axes, None),
                wire=scatter.wire,
                widen=partial(lax.convert_element_type, new_dtype=wide),
            )
        with named("einsum_reduce_scatter", LAX, "psum_scatter"):
            total = _summed(options, scatter, factors)
            if 0 in total.shape:  # as for a gather
                shard = total.shape[dim] // prod(options.sizes())
                return lax.slice_in_dim(total, 0, shard, axis=dim).astype(dtype)
            return marked(scatter_sum, total, options.axes).astype(dtype)
    with named("einsum_reduce_scatter", options.algorithm, "psum_scatter"):
        mine = _multiply_and_scatter_by_rounds(options, scatter, factors)
    return concatenated(mine, dim).astype(dtype)


def _summed(options: Options, scatter: Scatter, factors: Sequence[Array]) -> Array:
    """The sum of the products of all terms; `factors` has both factors of each term in turn."""
    specs = [f"{a},{b}->{scatter.out}" for a, b in scatter.terms]
    if options.leaves is not None and jnp.issubdtype(scatter.dtype, jnp.inexact):
        return _summed_in_order(options, scatter, specs, factors)
    of_terms, typed = zip(specs, factors[::2], factors[1::2], strict=True), scatter.sharding
    products = [options.einsum(spec, a, b, scatter.dtype, typed) for spec, a, b in of_terms]
    return functools.reduce(lax.add, products)


def _summed_in_order(
    options: Options, scatter: Scatter, specs: Sequence[str], factors: Sequence[Array]
) -> Array:
    """The same sum: first all terms of a leaf, then the leaves by the tree."""
    one = replace(options, leaves=prod(options.sizes()))  # with these, a rank has a single leaf
    of_terms = [
        zip(*options.in_blocks(spec, a, b, scatter.cut(term)), strict=True)
        for spec, term, a, b in zip(specs, scatter.terms, factors[::2], factors[1::2], strict=True)
    ]
    leaves = [
        [
            one.einsum(spec, a, b, scatter.dtype, scatter.sharding)
            for spec, (a, b) in zip(specs, of_leaf, strict=True)
        ]
        for of_leaf in zip(*of_terms, strict=True)
    ]
    return summed([functools.reduce(added, products) for products in leaves])


def _multiply_and_scatter_by_rounds(
    options: Options, scatter: Scatter, factors: list[Array]
) -> list[Array]:
    schedule, ranks = options.schedule()
    labels = [labels for term in scatter.terms for labels in term]
    of_factors = zip(factors, labels, strict=True)
    sizes = [x.shape[own.index(scatter.label)] for x, own in of_factors if scatter.label in own]
    size, order = sizes[0] // schedule.size, order_of_work()
    blocks = _Blocks(options, scatter, factors, labels, Shares(size, schedule.lanes), order)
    unsliced = blocks.unsliced()
    pays = (
        order.takes_turns
        and options.leaves is None
        and auto.turns_pay(scatter, factors, schedule.size, device_kind())
    )
    if pays and turns.are_possible(schedule):
        halves = replace(blocks, shares=Shares(size, 2 * schedule.lanes))
        return turns.reduce(schedule, ranks, halves.add, halves.start)
    add = lax.add if options.leaves is None else added
    return engine.reduce(
        schedule, ranks, blocks.produce, add, unsliced, order=order, wire=scatter.wire
    )


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
        """This rank's contributions; by turns, added to what was received for them."""
        label, out, rest = self.scatter.label, self.scatter.out, iter(unsliced)
        places = self.shares.places(slots)
        sums = [concatenated(received, out.index(label))] if received else []
        parts = [
            self.order.apart(sliced_along(x, own, label, places)) if label in own else next(rest)
            for x, own in zip(self.factors, self.labels, strict=True)
        ]
        y = functools.reduce(lax.add, [*sums, _summed(self.options, self.scatter, parts)])
        ends = np.cumsum([width for _, width in places])[:-1]
        sliced = [x for x, own in zip(parts, self.labels, strict=True) if label in own]
        return Contributions(jnp.split(y, ends, out.index(label)), sliced)

    def add(self, slots: Sequence[Slot], received: Sequence[Array]) -> Sequence[Array]:
        """See `turns.Add`."""
        return self.produce(self.unsliced(), slots, received).values

    def start(self, slot: Slot) -> Array:
        """Zeros, to which the first contribution to a slot is added."""
        program = jax.make_jaxpr(lambda: self.produce(self.unsliced(), [slot]).values)
        return zeros(program().out_avals[0])


def _multiply_and_scatter_forward(options, scatter, pairs):
    return multiply_and_scatter(options, scatter, pairs), pairs


def _multiply_and_scatter_backward(options, scatter, pairs, ct):
    products, others = [], []
    for (a_labels, b_labels), (a, b) in zip(scatter.terms, pairs, strict=True):
        products += [
            Product(b_labels, a_labels, a.dtype, explicit_spec(a)),
            Product(a_labels, b_labels, b.dtype, explicit_spec(b)),
        ]
        others += [b, a]
    wires = scatter.gradient_wire, scatter.gradient_wire
    gather = Gather(scatter.label, scatter.out, tuple(products), *wires)
    back = gather_and_multiply(replace(options, saves=False), gather, ct, others)
    return ([(back[i], back[i + 1]) for i in range(0, len(back), 2)],)


multiply_and_scatter.defvjp(_multiply_and_scatter_forward, _multiply_and_scatter_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def multiply_in_blocks(
    options: Options, spec: str, cut: str, dtype: np.dtype, x: Array, w: Array
) -> Array:
    """An einsum of this rank's own factors, in its blocks of the label `cut`; nothing is sent."""
    return options.einsum(spec, x, w, dtype, cut=cut).astype(dtype)


def _multiply_in_blocks_backward(
    options: Options, spec: str, cut: str, _: Any, factors: tuple[Array, Array], ct: Array
) -> tuple[Array, Array]:
    (x, w), (labels, out) = factors, spec.split("->")
    x_labels, w_labels = labels.split(",")
    to_x, to_w = f"{out},{w_labels}->{x_labels}", f"{x_labels},{out}->{w_labels}"
    # Ranks add cotangents of x that they have rounded. So round each of a rank's own sums too.
    added_by_ranks = options if cut in x_labels else replace(options, accumulate_dtype=None)
    ct_x = multiply_in_blocks(added_by_ranks, to_x, cut, x.dtype, ct, w)
    return ct_x, multiply_in_blocks(options, to_w, cut, w.dtype, x, ct)


multiply_in_blocks.defvjp(
    lambda options, spec, cut, dtype, x, w: (
        multiply_in_blocks(options, spec, cut, dtype, x, w),
        (x, w),
    ),
    _multiply_in_blocks_backward,
)
