"""Plans of matmuls with a collective on TPUs, from labels and shapes; nothing here knows an array.

Arguments named x, others and pairs are those of `overlapped`; only their types are read.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from ringcoll.choose.plan import Plan
from ringcoll.choose.under_work import gather_plans, scatter_plans
from ringcoll.costs.model import Model
from ringcoll.costs.under_work import Work, nbytes
from ringcoll.matmuls.labels import Gather, Scatter


def of_gather(
    gather: Gather, x: Any, others: Sequence[Any], sizes: tuple[int, ...], model: Model
) -> list[Plan]:
    """The plans of a gather with its products, with their prices; the built-in is the first."""
    n = prod(sizes)
    full_sizes = dict(zip(gather.moving, x.shape, strict=True))
    full_sizes[gather.label] *= n
    works = []
    for p, other in zip(gather.products, others, strict=True):
        of_labels = full_sizes | dict(zip(p.other, other.shape, strict=True))
        elements = prod(of_labels[of] for of in p.out)
        is_placed, is_sliced = gather.label in p.out, gather.label in p.other
        works.append(
            Work(
                flops=2 * prod(of_labels.values()),
                read_once=n * nbytes(x) + is_placed * elements * p.dtype.itemsize,
                reread=0 if is_sliced else nbytes(other),
                slice_reads=nbytes(other) if is_sliced else 0,
                accumulated=0 if is_placed else elements * (p.sums or p.dtype).itemsize,
            )
        )
    sent = gather.wire.ratio(x.dtype.itemsize) if gather.wire else 1.0
    return gather_plans(works, nbytes(x), sizes, model, sent)


def of_scatter(
    scatter: Scatter, pairs: Sequence[tuple[Any, Any]], sizes: tuple[int, ...], model: Model
) -> list[Plan]:
    """The plans of a scattered sum of products, with their prices; the built-in is the first."""
    n = prod(sizes)
    flops, block, slice_reads, reread = 0, 0, 0, 0
    for terms, pair in zip(scatter.terms, pairs, strict=True):
        of_labels: dict[str, int] = {}
        for labels, x in zip(terms, pair, strict=True):
            of_labels |= zip(labels, x.shape, strict=True)
            is_sliced = scatter.label in labels
            slice_reads += is_sliced * nbytes(x)
            reread += (not is_sliced) * nbytes(x)
        flops += 2 * prod(of_labels.values())
        block = prod(of_labels[of] for of in scatter.out) * scatter.dtype.itemsize // n
    work = Work(flops, read_once=n * block, reread=reread, slice_reads=slice_reads)
    return scatter_plans(work, block, sizes, model)
