"""Plans of a collective together with matmuls, on TPUs: each form with its price.

The forms are the built-in collective, and every registered schedule whose messages go only to
neighbours. `ringcoll.costs.under_work` has the price.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from types import MappingProxyType

from ringcoll.choose.plan import Late, Plan
from ringcoll.costs.machines import DEVICES, KINDS
from ringcoll.costs.model import Model
from ringcoll.costs.slices import SIDES, rings
from ringcoll.costs.under_work import (
    RoundLoad,
    Work,
    built_in_seconds,
    in_rounds,
    overlapped_seconds,
    rounds,
    tour_rounds,
)
from ringcoll.schedules.registry import LAX, build, names
from ringcoll.schedules.schedule import Schedule, SizeError
from ringcoll.schedules.tour import cut, tour

#: Over several axes, rounds are not a loop: the program grows with them. So this many are the most.
MOST_ROUNDS = 32


def machine(device_kind: str | None, ranks: int = 1, of: int = 1) -> Model:
    """The model of a device. An unknown device gets v6e's: its compute is fast, its links are not.

    `of` is the number of devices in the mesh. If it is larger than `ranks`, the ranks are assumed
    to be a plane of a slice with three axes, unless its axes are closed: on v5p:2x2x4, 8 ranks of
    16 are 2 x 4. And other groups share the links of chips with several devices.
    """
    model = DEVICES[KINDS.get(device_kind or "", "v6e")]
    if ranks < of:
        model = replace(model, beta=model.beta * model.devices, devices=1)
    is_plane = ranks < of < SIDES[3] ** 3 and model.axes == 3
    return replace(model, axes=2) if is_plane else model


def hides(device_kind: str | None) -> bool:
    """Whether messages travel under work on these devices. Where not, "auto" is a built-in."""
    return device_kind in KINDS


def hides_early(device_kind: str | None) -> bool:
    """Whether a built-in collective that no work waits for travels under any other: sparse cores.

    Programs must be compiled with `overlap.OPTIONS["sparse cores"]`, which a trace cannot see.
    """
    return hides(device_kind) and machine(device_kind).sparse_cores


@lru_cache(maxsize=256)
def neighbours(sizes: tuple[int, ...]) -> Mapping[str, Schedule]:
    """The gathers on axes of these sizes whose messages go only to neighbours, by name."""
    found: dict[str, Schedule] = {}
    for name in names("all_gather"):
        try:
            schedule = build("all_gather", name, sizes)
        except SizeError:
            continue
        assert isinstance(schedule, Schedule)  # only all-reduces have stages
        is_long = len(sizes) > 1 and len(schedule.rounds) > MOST_ROUNDS
        if schedule.shape != sizes or schedule in found.values() or is_long:
            continue
        steps = [(m.shift, sizes[m.axis]) for moves in schedule.rounds for m in moves]
        if all(shift % n in (1, n - 1) for shift, n in steps):
            found[name] = schedule
    return MappingProxyType(found)


@lru_cache(maxsize=256)
def rounds_on(schedule: Schedule, axes: int) -> tuple[RoundLoad, ...]:
    """The rounds of a gather on a slice whose chips have links along this many axes.

    Several axes of ranks are assumed to be axes of the slice. If a chip has fewer, they share its
    links.
    """
    if len(schedule.shape) == 1:
        return rounds(schedule)
    sharing = max(1.0, len(schedule.shape) / axes)
    found = rounds(schedule, rings(axes, schedule.shape))
    return tuple(one._replace(load=sharing * one.load) for one in found)


def gather_plans(
    works: Sequence[Work],
    shard_bytes: float,
    sizes: tuple[int, ...],
    model: Model,
    ratio: float = 1.0,
    *,
    whole: bool = False,
) -> list[Plan]:
    """Plans of a gather with the matmuls of what it gathers; the built-in is the first.

    If some matmuls, but not all, sum over the gathered dimension, they may also be computed late,
    from the whole gathered operand: then they are not cut into pieces that each read and write the
    whole sum.

    Args:
        works: the work of each matmul.
        shard_bytes: the bytes of a rank's shard.
        sizes: the sizes of the axes.
        model: the rates of the machine.
        ratio: the bytes of messages over the bytes of their values.
        whole: whether shards must not be cut.
    """
    n = prod(sizes)
    plain = built_in_seconds(works, shard_bytes, n, model, gathers=True, ratio=ratio)
    sums = tuple(i for i, work in enumerate(works) if work.accumulated)
    plans = [Plan(LAX, plain)]
    for late in [(), sums] if 0 < len(sums) < len(works) else [()]:
        early = [work for i, work in enumerate(works) if i not in late]
        after = built_in_seconds([works[i] for i in late], 0.0, n, model, gathers=True)
        for name, schedule in neighbours(sizes).items():
            if whole and schedule.lanes > 1:
                continue  # it would run by one lane, as a different one does
            of_rounds = rounds_on(schedule, model.axes)
            hidden = overlapped_seconds(early, shard_bytes, model, of_rounds, ratio)
            form = Late(late) if late else None
            plans.append(Plan(name, hidden + after, form=form))
    return plans


def scatter_plans(
    work: Work, block_bytes: float, sizes: tuple[int, ...], model: Model
) -> list[Plan]:
    """Plans of a sum of matmuls, of which each rank keeps a block; the built-in is the first.

    Args:
        work: the work of all matmuls together.
        block_bytes: the bytes of a rank's block of the sum.
        sizes, model: as for `gather_plans`.
    """
    n = prod(sizes)
    whole = built_in_seconds([work], block_bytes, n, model, gathers=False)
    plans = [Plan(LAX, whole)]
    adding = (n - 1) * model.gamma * block_bytes
    for name, schedule in neighbours(sizes).items():
        of_rounds = rounds_on(schedule, model.axes)
        hidden = overlapped_seconds([work], block_bytes, model, of_rounds)
        plans.append(Plan(name, hidden + adding))
    return plans


def tour_plans(
    work: Work, shard_bytes: float, sum_bytes: float, sizes: tuple[int, ...], model: Model
) -> list[Plan]:
    """Plans of a gather with work, and of the sums of its results; the built-ins are the first.

    Args:
        work: all the work of the visits.
        shard_bytes: the bytes of a rank's shard.
        sum_bytes: the bytes of the sum for it.
        sizes, model: as for `gather_plans`.
    """
    n = prod(sizes)
    gathered = built_in_seconds([work], shard_bytes, n, model, gathers=True)
    scattered = built_in_seconds([], sum_bytes, n, model, gathers=False)
    plans = [Plan(LAX, gathered + scattered)]
    for name, schedule in neighbours(sizes).items() if n > 1 else ():
        own, *others, home = tour_rounds(tour(schedule), sum_bytes / max(shard_bytes, 1))
        # Half of a rank's own shard is visited under the first hop, half under the last one.
        of_rounds = own._replace(shards=0.5), *others, home._replace(shards=0.5)
        plans.append(Plan(name, overlapped_seconds([work], shard_bytes, model, of_rounds)))
    return plans


def visited_seconds(
    name: str,
    sizes: tuple[int, ...],
    needed: frozenset[int],
    visit: Callable[[Sequence[int]], float],
    shard_bytes: float,
    model: Model,
) -> float:
    """Seconds of a gather of the shards of some offsets, if shards take different times.

    Args:
        name: a gather whose messages go only to neighbours.
        needed: the offsets of the shards that are brought.
        visit: the seconds for whole shards of these offsets, on the busiest rank.
        sizes, shard_bytes, model: as for `gather_plans`.
    """
    schedule = build("all_gather", name, sizes)
    assert isinstance(schedule, Schedule)  # only all-reduces have stages
    schedule = cut(schedule, needed)
    visits = [[0] * schedule.lanes]
    visits += [[o for m in moves for o in schedule.arrivals(m)] for moves in schedule.rounds]
    products = (visit(offsets) / schedule.lanes for offsets in visits)
    loads = (one.load for one in rounds_on(schedule, model.axes)[1:])
    return in_rounds(products, (model.latency + model.beta * shard_bytes * load for load in loads))
