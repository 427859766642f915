"""Products that are computed while their shards are on the wire, and their gradients.

Two functions, each the transpose of the other, by one schedule:

- `gathered`: every y = einsum(all shards of x, other): each shard is multiplied as it comes
  by, and the gathered x is never held;
- `scattered`: y = this rank's shard of the sum over ranks of einsum(a, b): each block is
  multiplied just before its partial sum is sent on.

The gradient of a gathered product by x is a scattered product, that by the other factor a
gathered one again; the gradients of a scattered product by both factors are two products of
one gather of its cotangent. So derivatives of every order overlap as the function does.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll import algorithms, engine, quickest
from ringcoll.cost import DEVICES, KINDS, Model
from ringcoll.labels import Product
from ringcoll.manual import device_kind, empty, explicit_spec, varying
from ringcoll.pieces import Shares, joined, placed, sliced_along
from ringcoll.schedule import Schedule
from ringcoll.scheduled import ranks_of
from ringcoll.table import LAX, Algorithm
from ringcoll.wire import Ranks


@dataclass(frozen=True)
class How:
    """By which ranks, in which order, and how exactly."""

    axes: tuple[Hashable, ...]
    algorithm: Algorithm
    precision: Any = None
    accumulate_dtype: np.dtype | None = None
    saves: bool = False  # whether what was gathered is kept for the gradient

    def ranks(self) -> int:
        """How many they are."""
        return ranks_of(LAX, self.axes, None).size

    def schedule(self) -> tuple[Schedule, Ranks]:
        ranks = ranks_of(self.algorithm, self.axes, None)
        made = algorithms.build("all_gather", self.algorithm, ranks.shape)
        assert isinstance(made, Schedule)  # stages are for all-reduces
        return made, ranks.cut(made.shape)

    def einsum(self, spec: str, a: Array, b: Array, dtype: Any, sharding: Any = None) -> Array:
        """In the dtype of accumulation, if `dtype` is one of the kind it is for."""
        wide = (self.accumulate_dtype if jnp.issubdtype(dtype, jnp.inexact) else None) or dtype
        how = {"precision": self.precision, "preferred_element_type": wide}
        return jnp.einsum(spec, a, b, out_sharding=sharding, **how)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def gathered(
    how: How, label: str, moving: str, products: tuple[Product, ...], x: Array, others: list[Array]
) -> list[Array]:
    """Every einsum(all shards of x, other).

    Args:
        how: see `How`.
        label: that of the dimension along which the shards of x are put together.
        moving: the labels of x.
        products: what is made of it.
        x: this rank's shard.
        others: the other factors, one for each product, whole.
    """
    return _gathered(how, label, moving, products, x, others)[0]


def _gathered_forward(how, label, moving, products, x, others):
    if not how.saves:
        return gathered(how, label, moving, products, x, others), (x, others)
    results, whole = _gathered(how, label, moving, products, x, others, keep=True)
    return results, (whole, others)


def _gathered_backward(how, label, moving, products, residuals, cts):
    x, others = residuals
    terms = tuple((product.out, product.other) for product in products)
    pairs = list(zip(cts, others, strict=True))
    ct_x = scattered(how, label, moving, terms, x.dtype, explicit_spec(x), pairs)
    back = tuple(
        Product(p.out, p.other, other.dtype, explicit_spec(other))
        for p, other in zip(products, others, strict=True)
    )
    if how.saves:
        ct_others = [
            how.einsum(f"{moving},{p.other}->{p.out}", x, ct, p.dtype, p.sharding).astype(p.dtype)
            for p, ct in zip(back, cts, strict=True)
        ]
    else:
        ct_others = gathered(how, label, moving, back, x, cts)
    return ct_x, ct_others


gathered.defvjp(_gathered_forward, _gathered_backward)


def _gathered(how, label, moving, products, x, others, keep=False, late=()):
    """The results, and the whole x if it is kept.

    The products numbered in `late` are made of the whole x, once all of it has come.
    """
    if how.algorithm == "auto":
        algorithm, late = quickest.gathered(
            _machine(), how.ranks(), label, moving, products, x, others
        )
        by = lambda how: partial(_gathered, how, label, moving, products, keep=keep, late=late)  # noqa: E731
        return _by_platform(how, by, x, others, by_default=algorithm)
    dim = moving.index(label)
    specs = [f"{moving},{p.other}->{p.out}" for p in products]

    def of_whole(whole: Array, i: int) -> Array:
        p = products[i]
        return how.einsum(specs[i], whole, others[i], p.dtype, p.sharding).astype(p.dtype)

    if how.algorithm == LAX:
        whole = lax.all_gather(x, how.axes, axis=dim, tiled=True)
        return [of_whole(whole, i) for i in range(len(products))], whole if keep else None
    schedule, ranks = how.schedule()
    shares = Shares(x.shape[dim], schedule.lanes)
    own = [lax.dynamic_slice_in_dim(x, *shares.of(lane), dim) for lane in range(schedule.lanes)]
    early = [i for i in range(len(products)) if i not in late]

    def multiplied(piece: Array, places: list[tuple[Any, int]], i: int) -> Array:
        p, other = products[i], others[i]
        other = sliced_along(other, p.other, label, places)
        return how.einsum(specs[i], piece, other, p.dtype, p.sharding)

    def visit(carry: tuple[list[Array], Array | None], shards: list[engine.Shard]) -> Any:
        results, whole = carry
        places = shares.places(shards)
        piece = joined([shard.value for shard in shards], dim)
        made = []
        for i, result in zip(early, results, strict=True):
            y = multiplied(piece, places, i)
            out = products[i].out
            made.append(
                placed(result, y.astype(result.dtype), out.index(label), places)
                if label in out
                else result + y
            )
        return made, whole if whole is None else placed(whole, piece, dim, places)

    def of_all(shape: Sequence[int], dim: int) -> tuple[int, ...]:
        return tuple(s * ranks.size if d == dim else s for d, s in enumerate(shape))

    def buffer(i: int) -> Array:
        p = products[i]
        made = jax.make_jaxpr(lambda: multiplied(x, [(0, shares.size)], i))
        y = made().out_avals[0]
        if label not in p.out:
            return jnp.zeros(y.shape, y.dtype)
        return empty(of_all(y.shape, p.out.index(label)), y.update(dtype=p.dtype), ())

    whole = empty(of_all(x.shape, dim), x, ()) if keep or late else None
    typed = jax.typeof(x).mat.varying
    buffers = [varying(buffer(i), typed) for i in early]
    results, whole = engine.gather(schedule, ranks, own, visit, (buffers, whole), works=True)
    made = dict(zip(early, results, strict=True))
    if whole is not None:
        made |= {i: of_whole(whole, i) for i in late}
    return [made[i].astype(p.dtype) for i, p in enumerate(products)], whole if keep else None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4, 5))
def scattered(
    how: How,
    label: str,
    out: str,
    terms: tuple[tuple[str, str], ...],
    dtype: np.dtype,
    sharding: Any,
    pairs: list[tuple[Array, Array]],
) -> Array:
    """This rank's shard, along `label`, of the sum over ranks of the sum of einsum(a, b).

    Args:
        how: see `How`.
        label: of the dimension of the result that is scattered.
        out: the labels of the result.
        terms: the labels of each a and b.
        dtype: of the result.
        sharding: of the result, as that of a `Product`.
        pairs: each a and b.
    """
    if how.algorithm == "auto":
        algorithm = quickest.scattered(_machine(), how.ranks(), out, terms, dtype, pairs)
        by = lambda how: partial(scattered, how, label, out, terms, dtype, sharding)  # noqa: E731
        return _by_platform(how, by, pairs, by_default=algorithm)
    specs = [f"{a},{b}->{out}" for a, b in terms]
    factors = [x for pair in pairs for x in pair]

    def summed(factors: Sequence[Array]) -> Array:
        of_terms = zip(specs, factors[::2], factors[1::2], strict=True)
        made = [how.einsum(spec, a, b, dtype, sharding) for spec, a, b in of_terms]
        return functools.reduce(lax.add, made)

    if how.algorithm == LAX:
        return lax.psum_scatter(
            summed(factors), how.axes, scatter_dimension=out.index(label), tiled=True
        ).astype(dtype)
    schedule, ranks = how.schedule()
    labels = [labels for term in terms for labels in term]
    sliced = [label in own for own in labels]
    some = sliced.index(True)
    size = factors[some].shape[labels[some].index(label)] // ranks.size
    shares, dim = Shares(size, schedule.lanes), out.index(label)

    def produce(whole: list[Array], slots: list[engine.Slot]) -> list[Array]:
        places, rest = shares.places(slots), iter(whole)
        parts = [
            sliced_along(x, own, label, places) if is_sliced else next(rest)
            for x, own, is_sliced in zip(factors, labels, sliced, strict=True)
        ]
        y = summed(parts)
        return jnp.split(y, np.cumsum([width for _, width in places])[:-1], dim)

    # Not the sliced ones: a slice that waits for a barrier is a copy.
    whole = [x for x, is_sliced in zip(factors, sliced, strict=True) if not is_sliced]
    mine = engine.reduce(schedule, ranks, produce, lax.add, whole)
    return joined(mine, dim).astype(dtype)


def _scattered_forward(how, label, out, terms, dtype, sharding, pairs):
    return scattered(how, label, out, terms, dtype, sharding, pairs), pairs


def _scattered_backward(how, label, out, terms, dtype, sharding, pairs, ct):
    products, others = [], []
    for (a_labels, b_labels), (a, b) in zip(terms, pairs, strict=True):
        products += [
            Product(b_labels, a_labels, a.dtype, explicit_spec(a)),
            Product(a_labels, b_labels, b.dtype, explicit_spec(b)),
        ]
        others += [b, a]
    back = gathered(replace(how, saves=False), label, out, tuple(products), ct, others)
    return ([(back[i], back[i + 1]) for i in range(0, len(back), 2)],)


scattered.defvjp(_scattered_forward, _scattered_backward)


def _machine() -> Model:
    """That of the mesh; if it is not known, the one with the slowest wire beside its matmuls."""
    return DEVICES[KINDS.get(device_kind() or "", "v6e")]


def _by_platform(
    how: How, by: Callable[[How], Callable[..., Any]], *operands: Any, by_default: str
) -> Any:
    """What "auto" is, where it is known: when the program is lowered."""
    plain = by(replace(how, algorithm=LAX))
    if by_default == LAX:
        return plain(*operands)
    # XLA's scheduler for GPUs keeps one permute in flight: of two directions, one would be bare.
    on_gpu = by(replace(how, algorithm="ring"))
    return lax.platform_dependent(
        *operands,
        cpu=plain,
        cuda=on_gpu,
        rocm=on_gpu,
        default=by(replace(how, algorithm=by_default)),
    )
