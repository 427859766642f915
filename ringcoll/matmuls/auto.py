"""Chooses "auto" for a matmul with a collective: the fastest form by `ringcoll.costs.matmul`.

Either the matmul is cut into pieces that hide the rounds of the collective, or the built-in
collective runs before or after the whole matmul. (For a collective without a matmul, "auto" reads
the measurements in `ringcoll.collectives.table`.)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from ringcoll.collectives.table import LAX
from ringcoll.costs import encoding, machines
from ringcoll.costs.counts import price
from ringcoll.costs.machines import DEVICES, KINDS, MACHINES, Device
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
from ringcoll.costs.prediction import predict
from ringcoll.costs.slices import SIDES, rings
from ringcoll.costs.wire import Wire
from ringcoll.io.strict_json import version
from ringcoll.matmuls.labels import Gather, Scatter
from ringcoll.schedules.registry import build
from ringcoll.schedules.schedule import Schedule, staggered

#: The algorithm that hides a collective: half of each shard travels in each direction.
HIDDEN = "bidirectional_ring"
#: The same over several axes, up to this many ranks: its rounds are written out, so programs grow.
HIDDEN_ON_SEVERAL_AXES, MOST_RANKS = "hamiltonian", 32
#: Another for a gather: whole shards travel in both directions, in half as many rounds. So the
#: factor that every piece reads is read half as often.
TWO_ENDED = "two_ended"
#: The columns of a tile of an array in a TPU's memory.
TILE = 128
#: By what factor a form must be faster than the one before it in `_SURE` to be taken; chosen, not
#: measured: about the median error of the price (`tests/costs/test_matmul_cost.py`). A tie goes to
#: the built-in collective, then to halves.
SURE = 1.02
#: What hides a collective on GPUs: their scheduler keeps one permute in flight, so a second
#: direction would be exposed.
HIDDEN_ON_GPUS = "ring"
#: What adds by the tree of `order="tree"`. Its rounds are hidden by products if it runs in lanes:
#: while the sums of one lane are on the wire, blocks of the next are multiplied.
IN_ORDER = "recursive_doubling"
#: How many lanes; the last one's last rounds are exposed. And how many if the factor that all
#: blocks read does not stay in the memory beside the core (compiled: more are slower then).
LANES, FEWER_LANES = 16, 8
#: The least rows of a product of a lane.
ROWS = 512
_SURE = {LAX: 1.0, TWO_ENDED: SURE**2} | dict.fromkeys(
    (HIDDEN, HIDDEN_ON_SEVERAL_AXES, HIDDEN_ON_GPUS), SURE
)
#: The GPU by whose measurements "auto" goes, if the device is another.
GPU = "h100"
#: Between hosts on CPU, whose runtime sends one message at a time.
BETWEEN_HOSTS = "ring"
#: How many times as long, at most, the ring takes there as a built-in that sends as many bytes.
LONGER = 1.05
#: Such hosts over gloo: measured, by `python -m benchmarks cluster`, but for the rate of the
#: links, which is an assumption (500 Mbit/s) and decides little: where a built-in collective
#: sends as much as the ring, both take as long on any wire.
GLOO = Model(alpha=1e-3, beta=1 / 62.5e6, gamma=3 / 10e9, delta=1 / 80e9, axes=0)


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
    if not _are_known(x, *others):
        return LAX, ()
    late = tuple(i for i, p in enumerate(gather.products) if gather.label not in p.out)
    choices = [
        (_SURE[algorithm] * seconds, algorithm, numbers if algorithm != LAX else ())
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

    Where products are added up, whole shards are no choice: compilers then copy what came. Nor are
    they with a wire: the decoding of two shards, which hides nothing, is twice as long. (Compiled,
    int8, 8192 x 8192 x 28672: halves 660 us on v6e:4x2, 2671 on v5e:4x2, 1202 on v5p:2x2x2; whole
    shards 735, 2830, 1176.) Where halves cut tiles, halves are none.
    """
    ranks, shard = prod(sizes), _bytes(x)
    works = _works(gather, x, others, ranks)
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


def to_gather_on_gpus(
    gather: Gather, x: Any, others: Sequence[Any], ranks: int, device_kind: str | None
) -> str:
    """The algorithm that gathers x on GPUs, if the devices may be some."""
    if _is_no_gpu(device_kind) or not _are_known(x, *others):
        return LAX
    works = _works(gather, x, others, ranks)
    sent = ratio(gather.wire, x.dtype)
    return _fastest(on_gpus("all_gather", works, x, _bytes(x), ranks, device_kind, sent))


def to_scatter_on_gpus(
    scatter: Scatter, pairs: Sequence[tuple[Any, Any]], ranks: int, device_kind: str | None
) -> str:
    """The algorithm that scatters a sum of products on GPUs, if the devices may be some."""
    if _is_no_gpu(device_kind) or not _are_known(*(x for pair in pairs for x in pair)):
        return LAX
    if scatter.wire:
        return LAX
    work, block = _summed(scatter, pairs, ranks)
    return _fastest(on_gpus("psum_scatter", [work], pairs[0][0], block, ranks, device_kind))


def on_gpus(
    collective: str,
    works: Sequence[Work],
    factor: Any,
    shard_bytes: int,
    ranks: int,
    device_kind: str | None,
    sent: float = 1.0,
) -> dict[str, float]:
    """Seconds on GPUs of matmuls with a built-in collective, and of the ring under them.

    By measured collectives, permutes and matmuls of the dtype of a factor
    (`ringcoll.costs.machines`). A permute is far slower a byte than a built-in collective, so the
    ring is faster only where a permute is shorter than the products of a round. Every product of
    the ring is put in its place in the result: read and written once more. `sent` is the ratio of
    the bytes of messages to those of their values.
    """
    device = gpu(device_kind)
    hop = predict("ppermute", sent * shard_bytes, ranks, device)
    rate, memory = device.matmul(factor.dtype.itemsize), device.model.memory
    model = replace(
        device.model, alpha=hop, beta=0.0, start=rate.start, delta=rate.delta, far=memory
    )
    bare = predict(collective, sent * ranks * shard_bytes, ranks, device)
    placing = 2 * memory * sum(work.placed for work in works)
    return {
        LAX: bare + sum(piece_seconds(work, 1, model, False) for work in works),
        HIDDEN_ON_GPUS: placing
        + hidden_seconds(works, shard_bytes, ranks, model, rounds_of(HIDDEN_ON_GPUS, ranks)),
    }


def _is_no_gpu(device_kind: str | None) -> bool:
    return device_kind == "cpu" or device_kind in KINDS


def gpu(device_kind: str | None) -> Device:
    """The machine of a GPU; `GPU` if nobody measured it."""
    try:
        found = machines.find(device_kind or GPU)
    except ValueError:
        return MACHINES[GPU]
    return found if found.curves else MACHINES[found.like or GPU]


def to_gather_between(gather: Gather, x: Any, others: Sequence[Any], ranks: int) -> str:
    """The algorithm that gathers x between hosts on CPU."""
    if not _are_known(x, *others):
        return LAX
    if ranks == 2 and _widened(x.dtype) == 1:
        return LAX  # measured: the ring takes 1.2 to 1.5 times as long, for two hops of one way
    sends = ratio(gather.wire, x.dtype) if gather.wire else _widened(x.dtype)
    return _between(_works(gather, x, others, ranks), _bytes(x), sends, ranks)


def to_scatter_between(
    scatter: Scatter, pairs: Sequence[tuple[Any, Any]], ranks: int, jax: str
) -> str:
    """The algorithm that scatters a sum of products between hosts on CPU.

    Args:
        scatter, pairs: as for `to_scatter`.
        ranks: n.
        jax: the version of JAX. Before 0.11 lax's own psum_scatter is sometimes silently wrong
            there (github.com/jax-ml/jax/issues/40830): it is not taken.
    """
    if not _are_known(*(x for pair in pairs for x in pair)):
        return LAX
    if scatter.wire:
        return LAX
    if version(jax) < (0, 11):
        return BETWEEN_HOSTS
    work, block = _summed(scatter, pairs, ranks)
    return _between([work], block, 2 * _widened(scatter.dtype), ranks)  # gloo swaps halves


def _between(works: Sequence[Work], shard_bytes: int, sends: float, ranks: int) -> str:
    """The ring or the built-in, which sends `sends` times the bytes of the ring.

    If that is below 1, messages are encoded, and both send as much.
    """
    swaps = 2 if ranks == 2 else 1  # by gloo, one way after the other
    one_way = 2 * swaps * (sends if sends < 1 else 1) * shard_bytes  # no half either way
    hidden = hidden_seconds(works, LONGER * one_way, ranks, GLOO, rounds_of(HIDDEN, ranks))
    bare = bare_seconds(works, sends * shard_bytes, ranks, GLOO, 1)
    return BETWEEN_HOSTS if hidden < bare else LAX


def ratio(wire: Wire | None, dtype: Any) -> float:
    """The bytes of messages over those of values of a dtype."""
    return encoding.ratio(wire, dtype.itemsize) if wire else 1.0


def _widened(dtype: Any) -> int:
    """How many times its bytes the built-in collectives of XLA:CPU send of a dtype."""
    return 2 if dtype.kind in "fV" and dtype.itemsize < 4 else 1  # NumPy's bfloat16 is of kind V


def joining(gather: Gather, x: Any, others: Sequence[Any], schedule: Schedule, model: Model) -> str:
    """How a round with several messages is multiplied: "apart", "fused" or "copied".

    Apart: each matmul reads the other factors, which counts where the memory is the limit, and
    compilers may start a hop before the last of them only. Fused: parts are put together within
    the matmul, which reads them once more. Copied: they are put together before. If they are
    joined, each part of the result is put in its place by itself, under which compilers may start
    the hop. By `hidden_seconds`, whichever is quickest.
    """
    if not _are_known(x, *others):
        return FUSED
    works = _works(gather, x, others, schedule.size)
    sent = ratio(gather.wire, x.dtype)
    costs = _by_joining(works, _bytes(x), schedule.size, model, rounds(schedule), sent)
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
    if device_kind not in KINDS or not _are_known(x, *others):
        return False
    model, n = machine(device_kind), schedule.size
    works = _works(gather, x, others, n)
    hop = model.latency + model.beta * ratio(gather.wire, x.dtype) * _bytes(x) / schedule.lanes
    again = sum(work.again for work in works)
    is_near = model.holds(again)
    if is_near and not model.holds(again + 2 * _bytes(x)):
        return False
    return hop < sum(piece_seconds(work, 1 / n, model, is_near) for work in works)


def _works(gather: Gather, x: Any, others: Sequence[Any], ranks: int) -> list[Work]:
    """The work of each product."""
    whole = dict(zip(gather.moving, x.shape, strict=True))
    whole[gather.label] *= ranks
    works = []
    for p, other in zip(gather.products, others, strict=True):
        sizes = whole | dict(zip(p.other, other.shape, strict=True))
        result = prod(sizes[of] for of in p.out) * p.dtype.itemsize
        is_placed, is_sliced = gather.label in p.out, gather.label in p.other
        works.append(
            Work(
                flops=2 * prod(sizes.values()),
                # The matmul reads and writes the sum; compilers hide about half of that under it.
                added=0 if is_placed else result,
                once=ranks * _bytes(x) + is_placed * result,
                again=0 if is_sliced else _bytes(other),
                sliced=_bytes(other) if is_sliced else 0,
                placed=result if is_placed else 0,
            )
        )
    return works


def _bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def to_scatter(
    scatter: Scatter,
    pairs: Sequence[tuple[Any, Any]],
    sizes: tuple[int, ...],
    model: Model,
) -> str:
    """The algorithm that scatters a sum of products.

    With a wire that is the built-in exchange: it encodes every contribution once. Rings, which hide
    more, encode each partial sum at every hop: they are only for who asks for them.
    """
    if scatter.wire or not _are_known(*(x for pair in pairs for x in pair)):
        return LAX
    return _fastest(scatter_seconds(scatter, pairs, sizes, model))


def to_scatter_in_order(
    scatter: Scatter, pairs: Sequence[tuple[Any, Any]], ranks: int, model: Model
) -> Callable[..., Schedule]:
    """What scatters a sum of products by the tree of `order="tree"` on TPUs, and hides it."""
    work, _ = _summed(scatter, pairs, ranks)
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


def _fastest(seconds: Mapping[str, float]) -> str:
    """The algorithm of the least seconds, if by as much as `_SURE` asks."""
    return min(seconds, key=lambda algorithm: _SURE[algorithm] * seconds[algorithm])


def scatter_seconds(
    scatter: Scatter, pairs: Sequence[tuple[Any, Any]], sizes: tuple[int, ...], model: Model
) -> dict[str, float]:
    """Seconds by algorithm. (Whole shards either way begin with two products, not one.)"""
    ranks = prod(sizes)
    work, block = _summed(scatter, pairs, ranks)
    algorithm, made = next(iter(hiding_algorithms(sizes, model).items()))
    return {
        LAX: bare_seconds([work], block, ranks, model, scatter_links(ranks, model)),
        algorithm: hidden_seconds([work], block, ranks, model, made),
    }


def turns_pay(
    scatter: Scatter,
    factors: Sequence[Any],
    whole: Sequence[Any],
    ranks: int,
    device_kind: str | None,
) -> bool:
    """Whether to make a sum of products of halves, by turns (see `ringcoll.runtime.turns`).

    Only on TPUs (under turns the scheduler for GPUs hides nothing), and only where the wire is
    longer than the products of a round: by turns, the first product, which hides nothing, is half
    as long. Twice as many matmuls then read the factors that are not cut, so the products must
    also take longer than that reading.
    """
    if device_kind not in KINDS or not _are_known(*factors) or scatter.wire:
        return False  # by turns nothing is encoded
    model = machine(device_kind)
    pairs = list(zip(factors[::2], factors[1::2], strict=True))
    work, block = _summed(scatter, pairs, ranks)
    hop = model.latency + model.beta * block / 2
    return hop > work.flops * model.delta / ranks > sum(map(_bytes, whole)) * model.memory


def _summed(scatter: Scatter, pairs: Sequence[tuple[Any, Any]], ranks: int) -> tuple[Work, int]:
    """The work of a sum of products, and the bytes of a rank's block of it."""
    flops, block, once, again = 0, 0, 0, 0
    for (a, b), pair in zip(scatter.terms, pairs, strict=True):
        sizes: dict[str, int] = {}
        for labels, x in zip((a, b), pair, strict=True):
            sizes |= zip(labels, x.shape, strict=True)
            is_sliced = scatter.label in labels
            once, again = once + is_sliced * _bytes(x), again + (not is_sliced) * _bytes(x)
        flops += 2 * prod(sizes.values())
        block = prod(sizes[of] for of in scatter.out) * scatter.dtype.itemsize // ranks
    # The received block and the product are read, and their sum is written.
    return Work(flops, 3 * block, once + ranks * block, again), block


def _are_known(*arrays: Any) -> bool:
    """Whether all sizes are numbers (those of `jax.export` may be symbols)."""
    return all(isinstance(size, int) for x in arrays for size in x.shape)
