"""Choose for "auto" how a matmul with a collective runs: the fastest by `ringcoll.costs.matmul`.

Either the matmul is cut into pieces that hide the rounds of the collective, or the built-in
collective runs before or after the whole matmul. This file chooses for TPUs and for unknown
devices, and `auto_hosts` between hosts on CPU. (For a collective without a matmul, "auto" reads the
measurements in `ringcoll.collectives.table`.)
"""

from collections.abc import Mapping, Sequence
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
from ringcoll.schedules.schedule import Schedule

#: The algorithm that hides a collective: half of each shard travels in each direction.
HIDDEN = "bidirectional_ring"
#: Whole shards travel in one direction, so no parts are joined.
ONE_WAY = "ring"
#: The same over several axes. It is used up to this many ranks: its rounds are not a loop, so the
#: program grows with the ranks.
HIDDEN_ON_SEVERAL_AXES, MOST_RANKS = "hamiltonian", 32
#: The columns of a tile of an array in a TPU's memory.
TILE = 128


def machine(device_kind: str | None, ranks: int = 1, of: int = 1) -> Model:
    """The model of a device. An unknown device gets v6e's: its compute is fast, its links are not.

    `of` is the number of devices in the mesh. If it is larger than `ranks`, the ranks are assumed
    to be a plane of a slice with three axes, unless its axes are closed: on v5p:2x2x4, 8 ranks of
    16 are 2 x 4. (The built-in gather of these takes 871 us as compiled; with the price for three
    axes it would take 747.)
    """
    model = DEVICES[KINDS.get(device_kind or "", "v6e")]
    is_plane = ranks < of < SIDES[3] ** 3 and model.axes == 3
    return replace(model, axes=2) if is_plane else model


@lru_cache(maxsize=256)
def hiding_algorithms(sizes: tuple[int, ...], model: Model) -> Mapping[str, tuple[Round, ...]]:
    """The algorithms that can hide a gather on axes of these sizes, and the rounds of each.

    All but `ONE_WAY` can hide a scatter too. Several axes are assumed to be the axes of the slice;
    if there are more axes than a chip has, they share links. On a line of more than two ranks, a
    message over two links occupies both, which adds half of the time, as compiled (v5e:4x4 as
    4 x 4, [32768, 8192] x [8192, 28672]: 8800 us).
    """
    ranks = prod(sizes)
    if len(sizes) < 2:
        return {name: rounds_of(name, ranks) for name in (HIDDEN, TWO_ENDED, ONE_WAY)}
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
    """The algorithm that gathers x, and the indices of the matmuls that are computed late.

    A matmul that sums over the gathered dimension reads and writes all of its result in every
    round. If that takes longer than the wire that it hides, it is computed once, from the whole x:
    after the other matmuls, which then hide the wire. If there are no others, this is the built-in
    form.
    """
    if not are_known(x, *others):
        return LAX, ()
    added = tuple(i for i, p in enumerate(gather.products) if gather.label not in p.out)
    are_all = len(added) == len(gather.products)
    choices = [
        (sure(algorithm, are_all) * seconds, algorithm, late if algorithm != LAX else ())
        for late in ([(), added] if added and not are_all else [()])
        for algorithm, seconds in gather_seconds(gather, x, others, sizes, model, late).items()
    ]
    _, algorithm, late = min(choices, key=lambda choice: choice[0])
    return algorithm, late


def gather_seconds(
    gather: Gather,
    x: Any,
    others: Sequence[Any],
    sizes: tuple[int, ...],
    model: Model,
    late: Sequence[int] = (),
) -> dict[str, float]:
    """Seconds by algorithm, on axes of these sizes; the matmuls with indices in `late` run late."""
    ranks, shard = prod(sizes), nbytes(x)
    works = works_of(gather, x, others, ranks)
    early = [work for i, work in enumerate(works) if i not in late]
    after = sum(piece_seconds(works[i], 1, model, False) for i in late)
    sent, ways = ratio(gather.wire, x.dtype), links(ranks, model)
    found = {LAX: bare_seconds(works, shard, ranks, model, ways, gathers=True, ratio=sent)}
    left_out = _left_out(gather, x, early, ranks, model) if len(sizes) == 1 else ()
    for algorithm, of_rounds in hiding_algorithms(sizes, model).items():
        if algorithm not in left_out:
            joinings = _by_joining(early, shard, ranks, model, of_rounds, sent)
            if late:  # the parts are copied into the gathered x, but matmuls join them again
                del joinings[COPIED]
            found[algorithm] = after + min(joinings.values())
    return found


def _left_out(
    gather: Gather, x: Any, early: Sequence[Work], ranks: int, model: Model
) -> tuple[str, ...]:
    """The algorithms of a gather on one axis that have no price.

    With a wire, whole shards are left out: to decode two shards takes twice as long, and hides
    nothing. (Compiled, int8, 8192 x 8192 x 28672: halves 660 us on v6e:4x2, 2671 on v5e:4x2, 1202
    on v5p:2x2x2; whole shards 735, 2830, 1176.)

    A matmul that sums over the gathered dimension takes a slice of the other operand for each part
    of a round, and adds to its result in each round. With whole shards there are fewer of these.
    But compilers copy what arrived if other matmuls read it too, or if the memory next to the core
    does not hold it next to the sum; and they copy slices that are not whole rows. (Compiled,
    halves and whole shards, gathered along the contraction: 512 x 8192 x 28672 on v5e:4x4 201 and
    155 us, 8192 x 8192 x 28672 on v6e:4x2 887 and 1095; one way on v5e:2x2 476 and 401, 6384 and
    5101. A step with FSDP that gathers columns of w again, on v5e:4x4: 170 ms, with one way 179.
    With both gradients, for which the gathered operand is kept, 8192 x 8192 x 28672 on v5e:2x2:
    18161 us, one way 19784.)

    Whole shards are left out too if other matmuls run late and that memory does not hold the
    operand that is read again: hops then start after the matmuls. (2048 x 8192 x 28672 with both
    gradients on v5p:2x2x2: 1204 us, with the built-in gather of the gradient 1059.)

    If results are placed, one way is left out. Halves are left out if they would cut tiles.
    """
    if gather.wire:
        return TWO_ENDED, ONE_WAY
    added, sliced, again = (
        sum(getattr(work, name) for work in early) for name in ("added", "sliced", "again")
    )
    if len(early) < len(gather.products) and not model.holds(again):
        return TWO_ENDED, ONE_WAY
    if not added:
        return (HIDDEN, ONE_WAY) if _halves_cut_tiles(gather, x) else (ONE_WAY,)
    is_alone = len(gather.products) == 1 and gather.products[0].other.startswith(gather.label)
    kept = ranks * nbytes(x) if gather.keeps else 0
    if not is_alone or not model.holds(added + kept):
        return TWO_ENDED, ONE_WAY
    return () if model.holds(added + 4 * nbytes(x) + 2 * sliced / ranks) else (TWO_ENDED,)


def _halves_cut_tiles(gather: Gather, x: Any) -> bool:
    """Whether a whole shard fills whole tiles of the result's columns, but half a shard does not.

    With halves, compilers then transpose the result and transpose it back: x: [4096, 4096], w:
    [4096, 896] on v5e:4x4 take 3748 us in halves of 448 columns, and 2584 us whole.
    """
    columns = x.shape[gather.moving.index(gather.label)]
    ends = any(product.out.endswith(gather.label) for product in gather.products)
    return ends and columns % TILE == 0 and columns // 2 % TILE > 0


def _by_joining(
    works: Sequence[Work],
    shard_bytes: int,
    ranks: int,
    model: Model,
    of_rounds: Sequence[Round],
    sent: float,
) -> dict[str, float]:
    """Seconds of a gather under its matmuls, by how its parts are joined; see `joining`."""
    # "apart" is not offered in three cases. Sums would be added to once for each part. Three
    # matmuls took longer than their price: attention on v5e:4x2, 8192 x 8192 x 8192, compiled: 3380
    # us, fused 2943. So did halves that travel for longer than their matmuls take, if x is kept for
    # the gradient: 8192 x 8192 x 14336 with both gradients on v5e:4x2 takes 4874 us, fused 4336.
    first = of_rounds[:2][-1]  # with one rank there is only its own shard
    hop = model.latency + model.beta * sent * shard_bytes * first.load
    products = sum(piece_seconds(w, first.shards / ranks, model, False) for w in works)
    is_late = first.parts > first.shards and hop > products
    may_be_apart = not is_late and len(works) < 3 and not any(work.added for work in works)
    return {
        joined: hidden_seconds(works, shard_bytes, ranks, model, of_rounds, joined, sent)
        for joined in (FUSED, COPIED, *((APART,) if may_be_apart else ()))
    }


def joining(gather: Gather, x: Any, others: Sequence[Any], schedule: Schedule, model: Model) -> str:
    """How a round with several messages is multiplied: "apart", "fused" or "copied".

    Apart: each part has a matmul, and each matmul reads the other operand. That takes time if the
    memory is the limit, and compilers can start a hop only before the last matmul. Fused: the
    matmul joins the parts itself, and reads them once more. Copied: the parts are joined before the
    matmul. If parts are joined, each part of the result is put in its place by a separate
    operation, and compilers may start the hop before these. The fastest by `hidden_seconds` is
    taken.
    """
    if not are_known(x, *others):
        return FUSED
    works = works_of(gather, x, others, schedule.size)
    sent = ratio(gather.wire, x.dtype)
    costs = _by_joining(works, nbytes(x), schedule.size, model, rounds(schedule), sent)
    return min(costs, key=lambda joined: costs[joined] * (1 if joined == FUSED else SURE))


def pairs_pay(
    gather: Gather, x: Any, others: Sequence[Any], schedule: Schedule, device_kind: str | None
) -> bool:
    """Whether to run rounds that only forward as a loop of two rounds a turn: a smaller program.

    It is used only on TPUs, and only if a hop is shorter than the matmuls of a round: the loop
    has one hop more. It is not used if the gathered operand is kept too. (With both gradients, 8192
    x 8192 x 28672 would take 8337 us on v5e:4x2 instead of 8078, and 4516 us on v5p:2x2x2 instead
    of 3762.) It is not used if the memory next to the core holds the other operand, but not two
    shards with it: then every turn reads the operand again (w: [14336, 4096] on v5e:4x2, compiled
    apart: 3154 us with the loop, 2764 without).
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
    """The algorithm that scatters a sum of matmuls.

    After other work the ring comes first in a tie: of eleven such programs, compiled, it was the
    quicker one in ten, by up to 21 %, and 4 % slower in one.
    """
    if not are_known(*(x for pair in pairs for x in pair)):
        return LAX
    seconds = scatter_seconds(scatter, pairs, sizes, model)
    if scatter.follows:
        return min(seconds, key=lambda one: seconds[one] * (SURE**2 if one == LAX else sure(one)))
    return fastest(seconds)


def scatter_seconds(
    scatter: Scatter, pairs: Sequence[tuple[Any, Any]], sizes: tuple[int, ...], model: Model
) -> dict[str, float]:
    """Seconds by algorithm.

    Whole blocks in both directions are left out if several matmuls are summed, and after other
    work if the memory next to the core does not hold what is read again. (Compiled with both
    gradients, whole and in halves: attention, 128 x 8192 x 8192 on v5e:4x4, 297 and 273 us; a
    gather of rows, 2048 x 8192 x 28672 on v5p:2x2x2, 1234 and 1065.)

    If this follows other work, and factors are kept for gradients, then the work before it is
    assumed to keep a factor of the same size, as in a gated MLP. It takes half of the memory next
    to the core. If both do not fit there, the ring displaces one of them, which is read again.
    (Compiled with both gradients, plain and ring: 512 x 8192 x 14336 on v5e:2x2 2150 and 2254 us,
    on v5p:2x2x2 563 and 664; both fit on v5e:4x2, 1240 and 1088.)
    """
    ranks = prod(sizes)
    uncut, block = summed(scatter, pairs, ranks)
    cut = uncut.once - ranks * block
    work = replace(uncut, once=uncut.once - cut, cut=cut, joined=block)
    if len(sizes) == 1 and _turns_are_quicker(work, block, ranks, model):
        work = replace(work, joined=0.0)  # by turns, matmuls add, which saves more than joining
    ways, follows = scatter_links(ranks, model), scatter.follows
    bare = bare_seconds([work], block, ranks, model, ways, follows=follows)
    displaced = 0.0
    if follows and scatter.keeps:
        if not model.holds(2 * work.again + work.cut):
            displaced = work.again * model.memory
        model = replace(model, near_bytes=model.near_bytes / 2)
    found = {LAX: bare}
    may_be_whole = len(pairs) == 1 and (model.holds(work.again) or not follows)
    left_out = (ONE_WAY,) if may_be_whole else (ONE_WAY, TWO_ENDED)
    for algorithm, of_rounds in hiding_algorithms(sizes, model).items():
        if algorithm not in left_out:
            hidden = hidden_seconds([work], block, ranks, model, of_rounds, follows=follows)
            found[algorithm] = hidden + displaced
    return found


def turns_pay(
    scatter: Scatter, factors: Sequence[Any], ranks: int, device_kind: str | None
) -> bool:
    """Whether to compute a sum of matmuls in halves, by turns (see `ringcoll.runtime.turns`).

    It is used only on TPUs (by turns the scheduler for GPUs hides nothing), and only if the wire
    takes longer than the matmuls of a round. By turns, the first matmul, which hides nothing, is
    half as long. But twice as many matmuls read the operands that are not cut, so the matmuls must
    also take longer than that reading.
    """
    if device_kind not in KINDS or not are_known(*factors):
        return False
    model = machine(device_kind)
    pairs = list(zip(factors[::2], factors[1::2], strict=True))
    work, block = summed(scatter, pairs, ranks)
    return _turns_are_quicker(work, block, ranks, model)


def _turns_are_quicker(work: Work, block: int, ranks: int, model: Model) -> bool:
    """As `turns_pay`; `work.again` is the bytes of the operands that are not cut."""
    hop = model.latency + model.beta * block / 2
    return hop > work.flops * model.delta / ranks > work.again * model.memory
