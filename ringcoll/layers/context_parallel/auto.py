"""Choose for "auto" how attention over ranks runs: by the time of its tiles and its messages.

The ranks wait for each other in every round of a gather, so a round takes as long as the rank with
the most tiles. Built-in collectives run before and after all compute.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from ringcoll.choose.table import LAX
from ringcoll.costs.machines import DEVICES, KINDS
from ringcoll.costs.places import place_of
from ringcoll.costs.prediction import predict
from ringcoll.layers.context_parallel.tiles import Mask, plan
from ringcoll.schedules.registry import build
from ringcoll.schedules.schedule import Schedule
from ringcoll.schedules.tour import cut

#: The algorithm that exchanges positions for heads.
ULYSSES = "ulysses"
#: The gathers that hide under the scores. One direction is the first: its products are larger.
GATHERS = ("ring", "bidirectional_ring")
#: Seconds for each score of a head: exponentials and sums take longer than the matmuls. As compiled
#: for v5e and v6e (5.4e-12 and 4.6e-12; jax 0.12.0.1, libtpu 0.0.52, `benchmarks context`).
OF_SCORE = 5e-12
#: The factor by which another form must be faster than the first gather.
SURE = 1.01


@dataclass(frozen=True)
class AttentionShape:
    """The shapes of the operands on one rank.

    Attributes:
        batch, length, heads, groups: the sizes of the operands; groups are the heads of keys.
        width, value_width: the width of a head of keys, and of a head of values.
        itemsize: bytes of an element.
    """

    batch: int
    length: int
    heads: int
    groups: int
    width: int
    value_width: int
    itemsize: int


def fastest(
    shape: AttentionShape,
    mask: Mask,
    layout: str,
    sizes: tuple[int, ...],
    device_kind: str | None,
) -> tuple[str, ...]:
    """The algorithm of each axis that is fastest by the model.

    Args:
        shape: the operands on a rank.
        mask: which keys a query sees.
        layout: see `LAYOUTS`.
        sizes: the sizes of the axes.
        device_kind: the kind of the devices; unknown ones are priced as v6e.
    """
    found = seconds(shape, mask, layout, sizes, device_kind)
    first = (GATHERS[0],) * len(sizes)
    return min(found, key=lambda names: found[names] * (1 if names == first else SURE))


def seconds(
    shape: AttentionShape,
    mask: Mask,
    layout: str,
    sizes: tuple[int, ...],
    device_kind: str | None,
) -> Mapping[tuple[str, ...], float]:
    """The seconds of attention, forward, for each choice of an algorithm for every axis."""
    axes, found = range(len(sizes)), {}
    for exchanged in [(), *([(axis,) for axis in axes] if len(sizes) > 1 else []), tuple(axes)]:
        ranks = prod(sizes[axis] for axis in exchanged)
        if shape.heads % ranks or shape.groups % ranks:
            continue
        exchanges_all = len(exchanged) == len(sizes)
        for gather in (ULYSSES,) if exchanges_all else (*GATHERS, LAX):
            names = tuple(ULYSSES if axis in exchanged else gather for axis in axes)
            found[names] = _seconds(shape, mask, layout, sizes, exchanged, gather, device_kind)
    return found


def _seconds(
    shape: AttentionShape,
    mask: Mask,
    layout: str,
    sizes: tuple[int, ...],
    exchanged: tuple[int, ...],
    gather: str,
    device_kind: str | None,
) -> float:
    device = KINDS.get(device_kind or "", "v6e")
    together = prod(sizes[axis] for axis in exchanged)
    others = tuple(n for axis, n in enumerate(sizes) if axis not in exchanged)
    heads, n = shape.heads // together, prod(others)
    tiles = plan(
        *(mask, layout, shape.length, sizes, exchanged, shape.heads // shape.groups, others or (1,))
    )
    scores = shape.batch * heads * tiles.tile**2
    flops = 2 * scores * (shape.width + shape.value_width)
    of_tile = max(scores * OF_SCORE, flops * DEVICES[device].delta)
    rows = shape.batch * shape.length * shape.itemsize
    of_keys = rows * shape.groups * (shape.width + shape.value_width)
    of_queries = rows * shape.heads * (shape.width + shape.value_width)  # queries and result
    exchange = 0.0
    if together > 1:
        place = place_of(together, device)
        exchange = sum(predict("all_to_all", x, place) for x in (of_keys, of_queries))
    needed = tiles.needed()
    if n == 1 or gather == LAX:
        counts = [tiles.counted(offset) for offset in (0, *needed)]
        wire = predict("all_gather", n * of_keys, place_of(n, device)) if n > 1 else 0.0
        return exchange + wire + of_tile * float(np.sum(counts, 0).max())
    # Over several axes, a schedule is assumed to send as much as one over all ranks in a row.
    offsets = needed if len(others) == 1 else None
    wire = predict("all_gather", n * of_keys, place_of(n, device), gather, offsets=offsets)
    schedule = cut(_gather(gather, others), needed)
    visits = [[0] * schedule.lanes]
    visits += [[o for m in moves for o in schedule.arrivals(m)] for moves in schedule.rounds]
    counted = [np.sum([tiles.counted(offset) for offset in visit], 0) for visit in visits]
    rounds = [of_tile / schedule.lanes * float(count.max()) for count in counted]
    hop = wire / max(len(schedule.rounds), 1)
    return exchange + sum(max(hop, computing) for computing in rounds[:-1]) + rounds[-1]


def _gather(name: str, shape: tuple[int, ...]) -> Schedule:
    schedule = build("all_gather", name, shape)
    assert isinstance(schedule, Schedule)  # only all-reduces have stages
    return schedule
