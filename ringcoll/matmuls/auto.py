"""Chooses "auto" for a matmul with a collective: the fastest form by `ringcoll.costs.matmul`.

Either the matmul is cut into pieces that hide the rounds of the collective, or the built-in
collective runs before or after the whole matmul. This file chooses for TPUs, and for devices that
nobody knows; `auto_gpus` chooses for GPUs, and `auto_hosts` between hosts on CPU. (For a collective
without a matmul, "auto" reads the measurements in `ringcoll.collectives.table`.)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from ringcoll.collectives.table import LAX
from ringcoll.costs.counts import price
from ringcoll.costs.machines import DEVICES, KINDS
from ringcoll.costs.matmul import (
    APART,
    COPIED,
    FUSED,
    Round,
    Work,
    bare_seconds,
    hidden_seconds,
    piece_seconds,
    rounds,
    rounds_of,
)
from ringcoll.costs.model import Model, links, scatter_links
from ringcoll.costs.slices import SIDES, rings
from ringcoll.matmuls.labels import Gather, Scatter
from ringcoll.matmuls.work import (
    SURE,
    TWO_ENDED,
    are_known,
    fastest,
    nbytes,
    ratio,
    summed,
    sure,
    works_of,
)
from ringcoll.schedules.registry import build
from ringcoll.schedules.schedule import Schedule, staggered

#: The algorithm that hides a collective: half of each shard travels in each direction.
HIDDEN = "bidirectional_ring"
#: The same over several axes, up to this many ranks: its rounds are written out, so programs grow.
HIDDEN_ON_SEVERAL_AXES, MOST_RANKS = "hamiltonian", 32
#: The columns of a tile of an array in a TPU's memory.
TILE = 128
#: What adds by the tree of `order="tree"`. Its rounds are hidden by products if it runs in lanes:
#: while the sums of one lane are on the wire, blocks of the next are multiplied.
IN_ORDER = "recursive_doubling"
#: How many lanes; the last one's last rounds are exposed. And how many if the factor that all
#: blocks read does not stay in the memory beside the core (compiled: more are slower then).
LANES, FEWER_LANES = 16, 8
#: The least rows of a product of a lane.
ROWS = 512


def machine(device_kind: str | None, ranks: int = 1, of: int = 1) -> Model:
    """The model of a device; for an unknown one v6e's, whose compute is fast beside its links.

    If there are more devices in the mesh than ranks (`of`), the ranks are taken for a plane of a
    slice with three axes, unless its axes are closed: on v5p:2x2x4, 8 ranks of 16 are 2 x 4. A
    gather for them takes the built-in 871 us as compiled, and 747 by a price for three axes.
    """
    model = DEVICES[KINDS.get(device_kind or "", "v6e")]
    is_plane = ranks < of < SIDES[3] ** 3 and model.axes == 3
    return replace(model, axes=2) if is_plane else model


@lru_cache(maxsize=256)
def hiding_algorithms(sizes: tuple[int, ...], model: Model) -> Mapping[str, tuple[Round, ...]]:
    """The algorithms that may hide a gather on axes of these sizes, and the rounds of each.

    The first may hide a scatter too. Several axes are taken for those of the slice; if there are
    more than a chip has, they share. On a line of more than two ranks, a message over two links
    holds both: half as much again, as compiled (v5e:4x4 as 4 x 4, [32768, 8192] x [8192, 28672]:
    8800 us).
    """
    ranks = prod(sizes)
    if len(sizes) < 2:
        return {name: rounds_of(name, ranks) for name in (HIDDEN, TWO_ENDED)}
    algorithm = HIDDEN if ranks > MOST_RANKS else HIDDEN_ON_SEVERAL_AXES
    closed = rings(model.axes, sizes)
    load = float(price("all_gather", algorithm, sizes, sizes, closed).link) / (ranks - 1)
    load *= max(1, len(sizes) / model.axes)
    if any(n > 2 and not ring for n, ring in zip(sizes, closed, strict=True)):
        load *= 1.5
    own = Round(2 * len(sizes), 1.0, 0.0)
    return {algorithm: (own, *[own._replace(load=load)] * (ranks - 1))}


def to_gather(
    gather: Gather, x: Any, others: Sequence[Any], sizes: tuple[int, ...], model: Model
) -> tuple[str, tuple[int, ...]]:
    """The algorithm that gathers x, and the numbers of the products that are computed late.

    A product that is added up reads and writes all of its result in every round. Where that
    takes longer than what it hides, it is made once, of the whole x: after the others, which
    then hide the wire alone, or, if there are none, after a built-in gather.
    """
    if not are_known(x, *others):
        return LAX, ()
    late = tuple(i for i, p in enumerate(gather.products) if gather.label not in p.out)
    choices = [
        (sure(algorithm) * seconds, algorithm, numbers if algorithm != LAX else ())
        for numbers in ((), late)
        for algorithm, seconds in gather_seconds(gather, x, others, sizes, model, numbers).items()
    ]
    _, algorithm, numbers = min(choices, key=lambda choice: choice[0])
    return algorithm, numbers


def gather_seconds(
    gather: Gather,
    x: Any,
    others: Sequence[Any],
    sizes: tuple[int, ...],
    model: Model,
    late: Sequence[int] = (),
) -> dict[str, float]:
    """Seconds by algorithm, on axes of these sizes; the products numbered in `late` are made late.

    Whole shards are left out where products are added up, because compilers then copy what arrived.
    They are left out with a wire too: to decode two shards takes twice as long, and hides nothing.
    (Compiled, int8, 8192 x 8192 x 28672: halves 660 us on v6e:4x2, 2671 on v5e:4x2, 1202 on
    v5p:2x2x2; whole shards 735, 2830, 1176.) Halves are left out where they would cut tiles.
    """
    ranks, shard = prod(sizes), nbytes(x)
    works = works_of(gather, x, others, ranks)
    early = [work for i, work in enumerate(works) if i not in late]
    after = sum(piece_seconds(works[i], 1, model, False) for i in late)
    sent, ways = ratio(gather.wire, x.dtype), links(ranks, model)
    found = {LAX: bare_seconds(works, shard, ranks, model, ways, gathers=True, ratio=sent)}
    known = dict(hiding_algorithms(sizes, model))
    if any(work.added for work in early) or gather.wire:
        known.pop(TWO_ENDED, None)
    elif TWO_ENDED in known and _halves_cut_tiles(gather, x):
        del known[HIDDEN]
    for algorithm, made in known.items():
        joinings = _by_joining(early, shard, ranks, model, made, sent)
        found[algorithm] = after + min(joinings.values())
    return found


def _halves_cut_tiles(gather: Gather, x: Any) -> bool:
    """Whether results are put side by side in columns of whole tiles, halves in cut ones.

    Compilers then turn the result round, and back: x: [4096, 4096], w: [4096, 896] on v5e:4x4 take
    3748 us in halves of 448 columns, 2584 whole.
    """
    columns = x.shape[gather.moving.index(gather.label)]
    ends = any(product.out.endswith(gather.label) for product in gather.products)
    return ends and columns % TILE == 0 and columns // 2 % TILE > 0


def _by_joining(
    works: Sequence[Work],
    shard_bytes: int,
    ranks: int,
    model: Model,
    made: Sequence[Round],
    sent: float,
) -> dict[str, float]:
    """Seconds of a gather under its products, by how they are joined; see `joining`."""
    # Apart, sums would be added to once for each part. Of three products it was slower than
    # its price: attention on v5e:4x2, 8192 x 8192 x 8192, compiled: 3380 us, fused 2943. So it is
    # of halves that travel for longer than their products take, if x is kept for the gradient:
    # 8192 x 8192 x 14336 with both gradients on v5e:4x2 takes 4874 us, fused 4336.
    first = made[:2][-1]  # of one rank there is its own shard alone
    hop = model.latency + model.beta * sent * shard_bytes * first.load
    products = sum(piece_seconds(w, first.shards / ranks, model, False) for w in works)
    is_late = first.parts > first.shards and hop > products
    may_be_apart = not is_late and len(works) < 3 and not any(work.added for work in works)
    return {
        how: hidden_seconds(works, shard_bytes, ranks, model, made, how, sent)
        for how in (FUSED, COPIED, *((APART,) if may_be_apart else ()))
    }


def joining(gather: Gather, x: Any, others: Sequence[Any], schedule: Schedule, model: Model) -> str:
    """How a round with several messages is multiplied: "apart", "fused" or "copied".

    Apart: each matmul reads the other factors, which counts where the memory is the limit, and
    compilers may start a hop before the last of them only. Fused: parts are put together within
    the matmul, which reads them once more. Copied: they are put together before. If they are
    joined, each part of the result is put in its place by itself, under which compilers may start
    the hop. By `hidden_seconds`, whichever is quickest.
    """
    if not are_known(x, *others):
        return FUSED
    works = works_of(gather, x, others, schedule.size)
    sent = ratio(gather.wire, x.dtype)
    costs = _by_joining(works, nbytes(x), schedule.size, model, rounds(schedule), sent)
    return min(costs, key=lambda how: costs[how] * (1 if how == FUSED else SURE))


def pairs_pay(
    gather: Gather, x: Any, others: Sequence[Any], schedule: Schedule, device_kind: str | None
) -> bool:
    """Whether rounds that only forward are a loop of two rounds a turn: a smaller program.

    Only on TPUs, and where a hop is shorter than the products of a round: there is one hop more.
    (Not where the gathered factor is kept as well: with both gradients, 8192 x 8192 x 28672 would
    take 8337 us on v5e:4x2 instead of 8078, and 4516 us on v5p:2x2x2 instead of 3762.) Nor if the
    memory beside the core holds the other factor, but not two shards beside it: then every turn
    reads it again (w: [14336, 4096] on v5e:4x2, compiled apart: 3154 us, written out 2764).
    """
    if device_kind not in KINDS or not are_known(x, *others):
        return False
    model, n = machine(device_kind), schedule.size
    works = works_of(gather, x, others, n)
    hop = model.latency + model.beta * ratio(gather.wire, x.dtype) * nbytes(x) / schedule.lanes
    again = sum(work.again for work in works)
    is_near = model.holds(again)
    if is_near and not model.holds(again + 2 * nbytes(x)):
        return False
    return hop < sum(piece_seconds(work, 1 / n, model, is_near) for work in works)


def to_scatter(
    scatter: Scatter,
    pairs: Sequence[tuple[Any, Any]],
    sizes: tuple[int, ...],
    model: Model,
) -> str:
    """The algorithm that scatters a sum of products.

    With a wire that is the built-in exchange: it encodes every contribution once. Rings hide more,
    but encode each partial sum at every hop, so they run only if the caller names one.
    """
    if scatter.wire or not are_known(*(x for pair in pairs for x in pair)):
        return LAX
    return fastest(scatter_seconds(scatter, pairs, sizes, model))


def to_scatter_in_order(
    scatter: Scatter, pairs: Sequence[tuple[Any, Any]], ranks: int, model: Model
) -> Callable[..., Schedule]:
    """What scatters a sum of products by the tree of `order="tree"` on TPUs, and hides it."""
    work, _ = summed(scatter, pairs, ranks)
    (a, b), (x, y) = scatter.terms[0], pairs[0]
    rows = dict(zip(a + b, (*x.shape, *y.shape), strict=True))[scatter.label]
    lanes = LANES if model.holds(work.again) else FEWER_LANES
    return _in_lanes(max(min(lanes, rows // ROWS), 1))


@lru_cache
def _in_lanes(lanes: int) -> Callable[..., Schedule]:
    def recursive_doubling(*shape: int) -> Schedule:
        made = build("all_gather", IN_ORDER, shape)
        assert isinstance(made, Schedule)  # a gather has no stages
        return staggered(made, lanes)

    return recursive_doubling


def scatter_seconds(
    scatter: Scatter, pairs: Sequence[tuple[Any, Any]], sizes: tuple[int, ...], model: Model
) -> dict[str, float]:
    """Seconds by algorithm. (Whole shards either way begin with two products, not one.)"""
    ranks = prod(sizes)
    whole, block = summed(scatter, pairs, ranks)
    cut = whole.once - ranks * block
    work = replace(whole, once=whole.once - cut, cut=cut, joined=block)
    if len(sizes) == 1 and _turns_are_quicker(work, block, ranks, model):
        work = replace(work, joined=0.0)  # matmuls add by turns: that saves more than joining takes
    algorithm, made = next(iter(hiding_algorithms(sizes, model).items()))
    ways, follows = scatter_links(ranks, model), scatter.follows
    return {
        LAX: bare_seconds([work], block, ranks, model, ways, follows=follows),
        algorithm: hidden_seconds([work], block, ranks, model, made, follows=follows),
    }


def turns_pay(
    scatter: Scatter, factors: Sequence[Any], ranks: int, device_kind: str | None
) -> bool:
    """Whether to make a sum of products of halves, by turns (see `ringcoll.runtime.turns`).

    Only on TPUs (under turns the scheduler for GPUs hides nothing), and only where the wire is
    longer than the products of a round: by turns, the first product, which hides nothing, is half
    as long. Twice as many matmuls then read the factors that are not cut, so the products must
    also take longer than that reading.
    """
    if device_kind not in KINDS or not are_known(*factors) or scatter.wire:
        return False  # by turns nothing is encoded
    model = machine(device_kind)
    pairs = list(zip(factors[::2], factors[1::2], strict=True))
    work, block = summed(scatter, pairs, ranks)
    return _turns_are_quicker(work, block, ranks, model)


def _turns_are_quicker(work: Work, block: int, ranks: int, model: Model) -> bool:
    """As `turns_pay`; `work.again` is the bytes of factors that are not cut."""
    hop = model.latency + model.beta * block / 2
    return hop > work.flops * model.delta / ranks > work.again * model.memory
