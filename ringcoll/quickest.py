"""What "auto" is for a matmul with a collective: the form that `ringcoll.cost` has quickest.

Either the collective runs under the products, in as many rounds as ranks, or it runs beside
them as the built-in does.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from ringcoll.cost import Model, Work, bare_seconds, hidden_seconds
from ringcoll.labels import Product
from ringcoll.table import LAX

#: By which a collective is hidden: half of each shard goes round either way.
HIDDEN = "bidirectional_ring"


def gathered(
    machine: Model,
    ranks: int,
    label: str,
    moving: str,
    products: Sequence[Product],
    x: Any,
    others: Sequence[Any],
) -> tuple[str, tuple[int, ...]]:
    """By which algorithm x is gathered, and the numbers of the products that are made late.

    A product that is added up reads and writes all of its result in every round. Where that
    takes longer than what it hides, it is made once, of the whole x: after the others, which
    then hide the wire alone, or, if there are none, after a built-in gather.
    """
    whole = {
        of: size * (ranks if of == label else 1) for of, size in zip(moving, x.shape, strict=True)
    }

    def work(i: int) -> Work:
        p = products[i]
        sizes = whole | dict(zip(p.other, others[i].shape, strict=True))
        added = 0 if label in p.out else prod(sizes[of] for of in p.out) * p.dtype.itemsize
        return Work(2 * prod(sizes.values()), 2 * added)

    def seconds(of: Callable[..., float], early: Sequence[int]) -> float:
        works = [work(i) for i in early]
        together = Work(sum(w.flops for w in works), sum(w.bytes_a_round for w in works))
        late = sum(work(i).flops for i in every if i not in early)
        return of(together, x.size * x.dtype.itemsize, ranks, machine) + late * machine.delta

    every = range(len(products))
    placed = [i for i in every if label in products[i].out]
    _, algorithm, early = min(
        (seconds(hidden_seconds, every), HIDDEN, every),
        (seconds(hidden_seconds, placed), HIDDEN, placed),
        (seconds(bare_seconds, every), LAX, every),
        key=lambda choice: choice[0],
    )
    return algorithm, tuple(i for i in every if i not in early)


def scattered(
    machine: Model,
    ranks: int,
    out: str,
    terms: Sequence[tuple[str, str]],
    dtype: np.dtype,
    pairs: Sequence[tuple[Any, Any]],
) -> str:
    """By which algorithm a sum of products is scattered."""
    sizes = {
        of: size
        for term, pair in zip(terms, pairs, strict=True)
        for labels, x in zip(term, pair, strict=True)
        for of, size in zip(labels, x.shape, strict=True)
    }
    block = prod(sizes[of] for of in out) * dtype.itemsize // ranks
    # A round adds one block: two read, one written.
    work = Work(sum(2 * prod(sizes[of] for of in {*a, *b}) for a, b in terms), 3 * block)
    hidden, bare = (of(work, block, ranks, machine) for of in (hidden_seconds, bare_seconds))
    return HIDDEN if hidden <= bare else LAX
