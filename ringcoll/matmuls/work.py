"""The work of the products of a matmul with a collective, and the fastest form by seconds."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ringcoll.collectives.table import LAX
from ringcoll.costs import encoding
from ringcoll.costs.matmul import Work
from ringcoll.costs.wire import Wire
from ringcoll.matmuls.labels import Gather, Scatter

#: Another algorithm for a gather: whole shards travel in both directions, in half as many rounds.
#: So the operand that every piece reads is read half as often.
TWO_ENDED = "two_ended"
#: The factor by which one form must be faster than another to be chosen. It was not measured: it is
#: about the median error of the price (`tests/costs/test_matmul_cost.py`).
SURE = 1.02


def sure(algorithm: str, is_added: bool = False) -> float:
    """The factor for an algorithm's seconds: in a tie, the built-in comes first.

    Then come halves, unless the results are added up: with whole shards there are fewer additions.
    """
    if algorithm == LAX:
        return 1.0
    return SURE**2 if algorithm == TWO_ENDED and not is_added else SURE


def fastest(seconds: Mapping[str, float]) -> str:
    """The algorithm with the least seconds, each multiplied by its factor `sure`."""
    return min(seconds, key=lambda algorithm: sure(algorithm) * seconds[algorithm])


def works_of(gather: Gather, x: Any, others: Sequence[Any], ranks: int) -> list[Work]:
    """The work of each product."""
    full_sizes = dict(zip(gather.moving, x.shape, strict=True))
    full_sizes[gather.label] *= ranks
    works = []
    for p, other in zip(gather.products, others, strict=True):
        sizes = full_sizes | dict(zip(p.other, other.shape, strict=True))
        result = prod(sizes[of] for of in p.out) * p.dtype.itemsize
        is_placed, is_sliced = gather.label in p.out, gather.label in p.other
        works.append(
            Work(
                flops=2 * prod(sizes.values()),
                # The matmul reads and writes the sum; it hides about half of that.
                added=0 if is_placed else result,
                once=ranks * nbytes(x) + is_placed * result,
                again=0 if is_sliced else nbytes(other),
                sliced=nbytes(other) if is_sliced else 0,
                placed=result if is_placed else 0,
            )
        )
    return works


def summed(scatter: Scatter, pairs: Sequence[tuple[Any, Any]], ranks: int) -> tuple[Work, int]:
    """The work of a sum of products, and the bytes of a rank's block of it."""
    flops, block, once, again = 0, 0, 0, 0
    for (a, b), pair in zip(scatter.terms, pairs, strict=True):
        sizes: dict[str, int] = {}
        for labels, x in zip((a, b), pair, strict=True):
            sizes |= zip(labels, x.shape, strict=True)
            is_sliced = scatter.label in labels
            once, again = once + is_sliced * nbytes(x), again + (not is_sliced) * nbytes(x)
        flops += 2 * prod(sizes.values())
        block = prod(sizes[of] for of in scatter.out) * scatter.dtype.itemsize // ranks
    # The received block and the product are read, and their sum is written.
    return Work(flops, 3 * block, once + ranks * block, again, written=ranks * block), block


def nbytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def ratio(wire: Wire | None, dtype: Any) -> float:
    """The bytes of messages over the bytes of their values; 1 without a wire."""
    return encoding.ratio(wire, dtype.itemsize) if wire else 1.0


def are_known(*arrays: Any) -> bool:
    """Whether all sizes are numbers (with `jax.export` they may be symbols)."""
    return all(isinstance(size, int) for x in arrays for size in x.shape)
