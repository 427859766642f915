"""Products that are computed while their shards are on the wire, and their gradients.

Two functions, each the other's transpose, by one schedule:

- `gather_and_multiply`: every y = einsum(all shards of x, other): each shard is multiplied as it
  arrives, and the gathered x is never held;
- `multiply_and_scatter`: y = this rank's shard of the sum over ranks of einsum(a, b): each block is
  multiplied just before its partial sum is sent on.

The gradient of `gather_and_multiply` with respect to x is a `multiply_and_scatter`; with respect to
the other factor it is a `gather_and_multiply`. Both gradients of `multiply_and_scatter` are
products of one gather of its cotangent. So derivatives of every order overlap as the function does.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.collectives.by_schedule import named
from ringcoll.collectives.table import LAX
from ringcoll.matmuls import auto
from ringcoll.matmuls.forms import Form, by_platform
from ringcoll.matmuls.labels import Gather, Product, Scatter
from ringcoll.matmuls.options import Options
from ringcoll.runtime import built_in, engine, turns
from ringcoll.runtime.barriers import order_of_work
from ringcoll.runtime.contributions import Contributions, Shard, Slot
from ringcoll.runtime.progress import marked
from ringcoll.runtime.slicing import Shares, buffer_after, concatenated, placed, sliced_along
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
        others: the other factors, one for each product, whole.
    """
    return _gather_and_multiply(options, gather, x, others)[0]


def _gather_and_multiply_forward(options, gather, x, others):
    if not options.saves:
        return gather_and_multiply(options, gather, x, others), (x, others)
    results, whole = _gather_and_multiply(options, gather, x, others, keep=True)
    return results, (whole, others)


def _gather_and_multiply_backward(options, gather, residuals, cts):
    x, others = residuals
    label, moving, products = gather.label, gather.moving, gather.products
    terms = tuple((product.out, product.other) for product in products)
    to_x = Scatter(label, moving, terms, x.dtype, explicit_spec(x))
    ct_x = multiply_and_scatter(options, to_x, list(zip(cts, others, strict=True)))
    back = tuple(
        Product(p.out, p.other, other.dtype, explicit_spec(other))
        for p, other in zip(products, others, strict=True)
    )
    if options.saves:
        ct_others = [
            _multiplied(options, f"{moving},{p.other}->{p.out}", p, x, ct)
            for p, ct in zip(back, cts, strict=True)
        ]
    else:
        ct_others = gather_and_multiply(options, replace(gather, products=back), x, cts)
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
    """The results, and the whole x if it is kept.

    The products numbered in `late` are computed from the whole x, once all of it has arrived.
    """
    if options.algorithm == "auto":
        model = auto.machine(device_kind())
        sizes = options.sizes()
        form = Form(*auto.to_gather(gather, x, others, sizes, model))
        on_gpus = auto.to_gather_on_gpus(gather, x, others, prod(sizes), device_kind())
        gpus = form._replace(algorithm=on_gpus)
        between = Form(auto.to_gather_between(gather, x, others, prod(sizes)))

        def run(form: Form, x: Array, others: list[Array]) -> Any:
            chosen = replace(options, algorithm=form.algorithm)
            return _gather_and_multiply(chosen, gather, x, others, keep, form.late)

        return by_platform(options.axes, form, gpus, between, run, x, others)
    if options.algorithm != LAX:
        with named("all_gather_einsum", options.algorithm, "all_gather"):
            return _gather_and_multiply_by_rounds(options, gather, x, others, keep, late)
    dim = gather.moving.index(gather.label)
    with named("all_gather_einsum", LAX, "all_gather"):
        whole = marked(
            lambda x: built_in.all_gather(x, options.axes, axis=dim, tiled=True), x, options.axes
        )
    results = [
        _multiplied(options, f"{gather.moving},{p.other}->{p.out}", p, whole, other)
        for p, other in zip(gather.products, others, strict=True)
    ]
    return results, whole if keep else None


def _gather_and_multiply_by_rounds(
    options: Options, gather: Gather, x: Array, others: list[Array], keep: bool, late: Sequence[int]
) -> tuple[list[Array], Array | None]:
    label, products = gather.label, gather.products
    dim = gather.moving.index(label)
    specs = [f"{gather.moving},{p.other}->{p.out}" for p in products]
    schedule, ranks = options.schedule()
    shares = Shares(x.shape[dim], schedule.lanes)
    own = [lax.dynamic_slice_in_dim(x, *shares.of(lane), dim) for lane in range(schedule.lanes)]
    early = [i for i in range(len(products)) if i not in late]
    typed = jax.typeof(x).mat.varying
    kind = device_kind()
    joining = auto.joining(gather, x, others, schedule, auto.machine(kind))
    pairs = not (keep or late) and auto.pairs_pay(gather, x, others, schedule, kind)
    order = order_of_work(sums=any(label not in products[i].out for i in early), pairs=pairs)

    def multiplied(piece: Array, places: list[tuple[Any, int]], i: int) -> Array:
        p, other = products[i], others[i]
        other = sliced_along(other, p.other, label, places)
        return options.einsum(specs[i], piece, other, p.dtype, p.sharding)

    def visit(carry: tuple[list[Any], Array | None], shards: list[Shard]) -> Any:
        results, whole = carry
        for together in [[shard] for shard in shards] if joining == "apart" else [shards]:
            places = shares.places(together)
            piece = concatenated([shard.value for shard in together], dim)
            if joining == "copied" and whole is None and len(shards) > 1:  # else copied there
                piece = lax.optimization_barrier(piece)
            made = []
            for i, result in zip(early, results, strict=True):
                y, p = multiplied(piece, places, i), products[i]
                if label not in p.out:
                    made.append(y if result is None else result + y)
                    continue
                out, y = p.out.index(label), y.astype(p.dtype)
                buffer = (
                    buffer_after(y, out, shares.size * ranks.size) if result is None else result
                )
                made.append(placed(buffer, y, out, places))
            results, whole = made, whole if whole is None else placed(whole, piece, dim, places)
        return results, whole

    def begun(i: int) -> Any:
        if order.begins_with_work:
            return None
        p = products[i]
        y = jax.make_jaxpr(lambda: multiplied(x, [(0, shares.size)], i))().out_avals[0]
        if label not in p.out:
            return zeros(y)
        shape = _times(y.shape, p.out.index(label), ranks.size)
        buffer = empty(shape, y.update(dtype=p.dtype), ())
        return varying(buffer, typed)

    whole = empty(_times(x.shape, dim, ranks.size), x, ()) if keep or late else None
    state = [begun(i) for i in early], whole
    results, whole = engine.gather(schedule, ranks, own, visit, state, order=order)
    made = {i: y.astype(products[i].dtype) for i, y in zip(early, results, strict=True)}
    if whole is not None:
        made |= {i: _multiplied(options, specs[i], products[i], whole, others[i]) for i in late}
    return [made[i] for i in range(len(products))], whole if keep else None


def _times(shape: Sequence[int], dim: int, n: int) -> tuple[int, ...]:
    """A shape that is n times as long along one dimension."""
    return tuple(s * n if d == dim else s for d, s in enumerate(shape))


def _multiplied(options: Options, spec: str, product: Product, x: Array, other: Array) -> Array:
    """One whole product, in the dtype of its result."""
    return options.einsum(spec, x, other, product.dtype, product.sharding).astype(product.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_and_scatter(
    options: Options, scatter: Scatter, pairs: list[tuple[Array, Array]]
) -> Array:
    """This rank's shard of the sum over ranks of the sum of einsum(a, b).

    Args:
        options: see `Options`.
        scatter: see `Scatter`.
        pairs: each a and b.
    """
    if options.algorithm == "auto":
        model, sizes = auto.machine(device_kind()), options.sizes()
        if any(explicit_spec(x) is not None for pair in pairs for x in pair):
            # Beside an explicit axis JAX cannot lower lax.psum_scatter, on any platform.
            algorithm = next(iter(auto.hiding_algorithms(sizes, model)))
            return multiply_and_scatter(replace(options, algorithm=algorithm), scatter, pairs)
        form = Form(auto.to_scatter(scatter, pairs, sizes, model))
        gpus = Form(auto.to_scatter_on_gpus(scatter, pairs, prod(sizes), device_kind()))
        between = Form(auto.to_scatter_between(scatter, pairs, prod(sizes), jax.__version__))

        def run(form: Form, pairs: list[tuple[Array, Array]]) -> Array:
            return multiply_and_scatter(replace(options, algorithm=form.algorithm), scatter, pairs)

        return by_platform(options.axes, form, gpus, between, run, pairs)
    dim, dtype = scatter.out.index(scatter.label), scatter.dtype
    specs = [f"{a},{b}->{scatter.out}" for a, b in scatter.terms]
    factors = [x for pair in pairs for x in pair]

    def summed(factors: Sequence[Array]) -> Array:
        of_terms = zip(specs, factors[::2], factors[1::2], strict=True)
        made = [options.einsum(spec, a, b, dtype, scatter.sharding) for spec, a, b in of_terms]
        return functools.reduce(lax.add, made)

    if options.algorithm == LAX:
        scatter_sum = partial(
            built_in.psum_scatter, axis_name=options.axes, scatter_dimension=dim, tiled=True
        )
        with named("einsum_reduce_scatter", LAX, "psum_scatter"):
            return marked(scatter_sum, summed(factors), options.axes).astype(dtype)
    with named("einsum_reduce_scatter", options.algorithm, "psum_scatter"):
        mine = _multiply_and_scatter_by_rounds(options, scatter, factors, summed)
    return concatenated(mine, dim).astype(dtype)


def _multiply_and_scatter_by_rounds(
    options: Options,
    scatter: Scatter,
    factors: list[Array],
    summed: Callable[[Sequence[Array]], Array],
) -> list[Array]:
    label, dim = scatter.label, scatter.out.index(scatter.label)
    schedule, ranks = options.schedule()
    labels = [labels for term in scatter.terms for labels in term]
    sliced = [label in own for own in labels]
    some = sliced.index(True)
    size = factors[some].shape[labels[some].index(label)] // ranks.size
    order = order_of_work()
    # Not the sliced ones: a slice that waits for a barrier is a copy.
    whole = [x for x, is_sliced in zip(factors, sliced, strict=True) if not is_sliced]

    def parts_of(places: list[tuple[Any, int]], whole: list[Array]) -> list[Array]:
        rest = iter(whole)
        return [
            order.apart(sliced_along(x, own, label, places)) if is_sliced else next(rest)
            for x, own, is_sliced in zip(factors, labels, sliced, strict=True)
        ]

    def cut(y: Array, places: list[tuple[Any, int]]) -> list[Array]:
        return jnp.split(y, np.cumsum([width for _, width in places])[:-1], dim)

    pays = order.takes_turns and auto.turns_pay(scatter, factors, whole, ranks.size, device_kind())
    if pays and turns.are_possible(schedule):
        halves = Shares(size, 2 * schedule.lanes)

        def add(slots: Sequence[Slot], received: Sequence[Array]) -> list[Array]:
            places = halves.places(slots)
            return cut(
                lax.add(concatenated(received, dim), summed(parts_of(places, whole))), places
            )

        def start(slot: Slot) -> Array:
            places = halves.places([slot])
            return zeros(jax.make_jaxpr(lambda: summed(parts_of(places, whole)))().out_avals[0])

        return turns.reduce(schedule, ranks, add, start)
    shares = Shares(size, schedule.lanes)

    def produce(whole: list[Array], slots: list[Slot]) -> Contributions:
        places = shares.places(slots)
        parts = parts_of(places, whole)
        return Contributions(cut(summed(parts), places), list(compress(parts, sliced)))

    return engine.reduce(schedule, ranks, produce, lax.add, whole, order=order)


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
    gather = Gather(scatter.label, scatter.out, tuple(products))
    back = gather_and_multiply(replace(options, saves=False), gather, ct, others)
    return ([(back[i], back[i + 1]) for i in range(0, len(back), 2)],)


multiply_and_scatter.defvjp(_multiply_and_scatter_forward, _multiply_and_scatter_backward)
