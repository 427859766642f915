"""The work of a matmul with a collective, read off labels and shapes."""

from collections.abc import Sequence
from math import prod
from typing import Any

from ringcoll.costs.under_work import Work, nbytes
from ringcoll.costs.wire import Wire
from ringcoll.matmuls.labels import Gather, Scatter


def works_of(gather: Gather, x: Any, others: Sequence[Any], ranks: int) -> list[Work]:
    """The work of each product of a gathered x."""
    full_sizes = dict(zip(gather.moving, x.shape, strict=True))
    full_sizes[gather.label] *= ranks
    works = []
    for p, other in zip(gather.products, others, strict=True):
        sizes = full_sizes | dict(zip(p.other, other.shape, strict=True))
        elements = prod(sizes[of] for of in p.out)
        is_placed, is_sliced = gather.label in p.out, gather.label in p.other
        works.append(
            Work(
                flops=2 * prod(sizes.values()),
                read_once=ranks * nbytes(x) + is_placed * elements * p.dtype.itemsize,
                reread=0 if is_sliced else nbytes(other),
                slice_reads=nbytes(other) if is_sliced else 0,
                accumulated=0 if is_placed else elements * (p.sums or p.dtype).itemsize,
            )
        )
    return works


def summed(scatter: Scatter, pairs: Sequence[tuple[Any, Any]], ranks: int) -> tuple[Work, int]:
    """The work of a sum of products, and the bytes of a rank's block of it."""
    flops, block, slice_reads, reread = 0, 0, 0, 0
    for (a, b), pair in zip(scatter.terms, pairs, strict=True):
        sizes: dict[str, int] = {}
        for labels, x in zip((a, b), pair, strict=True):
            sizes |= zip(labels, x.shape, strict=True)
            is_sliced = scatter.label in labels
            slice_reads += is_sliced * nbytes(x)
            reread += (not is_sliced) * nbytes(x)
        flops += 2 * prod(sizes.values())
        block = prod(sizes[of] for of in scatter.out) * scatter.dtype.itemsize // ranks
    return Work(flops, read_once=ranks * block, reread=reread, slice_reads=slice_reads), block


def ratio(wire: Wire | None, dtype: Any) -> float:
    """The bytes of messages over the bytes of their values; 1 without a wire."""
    return wire.ratio(dtype.itemsize) if wire else 1.0


def are_known(*arrays: Any) -> bool:
    """Whether all sizes are numbers (with `jax.export` they may be symbols)."""
    return all(isinstance(size, int) for x in arrays for size in x.shape)
