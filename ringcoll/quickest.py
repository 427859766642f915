"""What "auto" is for a matmul with a collective: the form that `ringcoll.cost` has quickest.

Either the collective runs under the products, in as many rounds as ranks, or it runs beside
them as the built-in does.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

from ringcoll.cost import DEVICES, KINDS, Model, Work, bare_seconds, hidden_seconds
from ringcoll.labels import Gather, Scatter
from ringcoll.table import LAX

#: By which a collective is hidden: half of each shard goes round either way.
HIDDEN = "bidirectional_ring"
#: What is better there. The devices of a CPU share what they compute with. The scheduler for
#: GPUs keeps one permute in flight: of two directions, one would be bare.
BY_PLATFORM: Mapping[str, str] = MappingProxyType({"cpu": LAX, "cuda": "ring", "rocm": "ring"})


def machine(device_kind: str | None) -> Model:
    """That of a device; of one that is not known, v6e's, whose compute is quick beside its wire."""
    return DEVICES[KINDS.get(device_kind or "", "v6e")]


def to_gather(
    gather: Gather, x: Any, others: Sequence[Any], ranks: int, model: Model
) -> tuple[str, tuple[int, ...]]:
    """By which algorithm x is gathered, and the numbers of the products that are made late.

    A product that is added up reads and writes all of its result in every round. Where that
    takes longer than what it hides, it is made once, of the whole x: after the others, which
    then hide the wire alone, or, if there are none, after a built-in gather.
    """
    if not _are_known(x, *others):
        return LAX, ()
    products = gather.products
    whole = dict(zip(gather.moving, x.shape, strict=True))
    whole[gather.label] *= ranks

    def work(i: int) -> Work:
        p = products[i]
        sizes = whole | dict(zip(p.other, others[i].shape, strict=True))
        added = 0 if gather.label in p.out else prod(sizes[of] for of in p.out) * p.dtype.itemsize
        return Work(2 * prod(sizes.values()), 2 * added)  # the sum is read and written

    def seconds(of: Callable[..., float], early: Sequence[int]) -> float:
        works = [work(i) for i in early]
        together = Work(sum(w.flops for w in works), sum(w.bytes_a_round for w in works))
        late = sum(work(i).flops for i in every if i not in early)
        return of(together, x.size * x.dtype.itemsize, ranks, model) + late * model.delta

    every = range(len(products))
    placed = [i for i in every if gather.label in products[i].out]
    _, algorithm, early = min(
        (seconds(bare_seconds, every), LAX, every),
        (seconds(hidden_seconds, every), HIDDEN, every),
        (seconds(hidden_seconds, placed), HIDDEN, placed),
        key=lambda choice: choice[0],
    )
    return algorithm, tuple(i for i in every if i not in early)


def to_scatter(scatter: Scatter, pairs: Sequence[tuple[Any, Any]], ranks: int, model: Model) -> str:
    """By which algorithm a sum of products is scattered."""
    if not _are_known(*(x for pair in pairs for x in pair)):
        return LAX
    sizes = {
        of: size
        for term, pair in zip(scatter.terms, pairs, strict=True)
        for labels, x in zip(term, pair, strict=True)
        for of, size in zip(labels, x.shape, strict=True)
    }
    flops = sum(2 * prod(sizes[of] for of in {*a, *b}) for a, b in scatter.terms)
    block = prod(sizes[of] for of in scatter.out) * scatter.dtype.itemsize // ranks
    # What came and what was made of it are read, and their sum is written.
    work = Work(flops, 3 * block)
    hidden, bare = (of(work, block, ranks, model) for of in (hidden_seconds, bare_seconds))
    return HIDDEN if hidden < bare else LAX


def _are_known(*arrays: Any) -> bool:
    """Whether all sizes are numbers (those of `jax.export` may be symbols)."""
    return all(isinstance(size, int) for x in arrays for size in x.shape)
