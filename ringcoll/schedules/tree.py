"""The tree of additions that a schedule makes, and the one tree that does not depend on n.

a + b has the same bits as b + a, but (a + b) + c may differ from a + (b + c). So the bits of a sum
depend on its tree of additions. If ranks hold consecutive leaves of one balanced binary tree, each
rank adds the lower levels by itself, and a schedule adds the upper levels:

    ((0, 1), (2, 3))    four ranks        ring, n = 4, for rank 0:    (0, (1, (2, 3)))
       (0, 1)           two, each with two leaves

The tree of a schedule is found by running the schedule on symbols.
"""

from functools import lru_cache
from math import prod
from typing import Any

from ringcoll.schedules.registry import AS_ALL_REDUCE, GATHERS, STAGED, ScheduleLike, Stages, build
from ringcoll.schedules.schedule import Schedule, ScheduleError, digits

#: A tree of additions: a rank, or a sum of two trees. The one with the lowest rank is the first.
Additions = int | tuple[Any, Any]


def balanced(ranks: int, first: int = 0) -> Additions:
    """The balanced tree over consecutive ranks.

    Raises:
        ValueError: the number of ranks is not a power of two.

    >>> balanced(4)
    ((0, 1), (2, 3))
    """
    if ranks < 1 or ranks & (ranks - 1):
        raise ValueError(f"balanced: {ranks} ranks are not a power of two")
    if ranks == 1:
        return first
    half = ranks // 2
    return balanced(half, first), balanced(ranks - half, first + half)


def tree(schedule: Schedule | Stages, rank: int = 0, lane: int = 0) -> Additions:
    """The additions of a reduce-scatter by a schedule, or an all-reduce by stages.

    Args:
        schedule: a gather, which runs backward; or stages, each of which adds the vectors that
            it gathered by a balanced tree.
        rank: the rank whose sum it is.
        lane: the lane of the schedule.

    Returns:
        Nested pairs of ranks.

    Raises:
        ValueError: there is no such rank or lane.

    >>> costs.tree(algorithms.ring(4))
    (0, (1, (2, 3)))
    >>> costs.tree(algorithms.recursive_doubling(4))
    ((0, 1), (2, 3))
    """
    size, lanes = _extent(schedule)
    if not (0 <= rank < size and 0 <= lane < lanes):
        raise ValueError(f"tree: rank {rank}, lane {lane} of {size} ranks and {lanes} lanes")
    if isinstance(schedule, Schedule):
        return _backward(schedule, rank, lane)
    sums: list[Additions] = list(range(size))
    inner = size
    for stage in schedule:
        inner //= stage.size
        sums = [_of_stage(sums, r, stage.size, inner) for r in range(len(sums))]
    return sums[rank]


def check_balanced(schedule: Schedule | Stages) -> Schedule | Stages:
    """Prove that every rank's sum, in every lane, is the balanced tree, or say which is not.

    Then 1, 2, 4 and 8 ranks, which hold 8, 4, 2 and 1 leaves each, add 8 leaves by the same tree.

    Raises:
        ScheduleError: the tree of a rank differs, and the message shows it; or the number of ranks
            is not a power of two.

    >>> costs.check_balanced(algorithms.recursive_doubling(8)).size
    8
    """
    size, lanes = _extent(schedule)
    if size & (size - 1):
        raise ScheduleError(f"{size} ranks are not a power of two, so they have no balanced tree")
    wanted = balanced(size)
    for lane in range(lanes):
        for rank in range(size):
            if (own_tree := tree(schedule, rank, lane)) != wanted:
                raise ScheduleError(f"the sum of rank {rank} is {own_tree}, not {wanted}")
    return schedule


def _extent(schedule: Schedule | Stages) -> tuple[int, int]:
    """The numbers of ranks and of lanes."""
    if isinstance(schedule, Schedule):
        return schedule.size, schedule.lanes
    return _size(schedule), 1


@lru_cache(maxsize=1024)
def is_balanced(collective: str, algorithm: ScheduleLike, shape: tuple[int, ...]) -> bool:
    """Whether a collective by this algorithm adds by the balanced tree.

    Raises:
        ValueError: as `build`; if the algorithm has no schedule for the size, it returns False.
    """
    try:
        check_balanced(build(collective, algorithm, shape))
    except ScheduleError:
        return False
    return True


def balanced_algorithms(collective: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The names of the algorithms that add by the balanced tree on axes of `shape`."""
    staged = () if collective == "psum_scatter" else tuple(STAGED)
    names = [AS_ALL_REDUCE.get(name, name) if staged else name for name in GATHERS]
    return tuple(name for name in (*names, *staged) if is_balanced(collective, name, shape))


def _backward(schedule: Schedule, rank: int, lane: int) -> Additions:
    """Run the schedule backward on symbols: `sums[o]` is the partial sum at rank + o."""
    sums: dict[int, Additions] = {o: _further(schedule, rank, o) for o in range(schedule.size)}
    for moves in reversed(schedule.rounds):
        before = dict(sums)
        for move in moves:
            if move.lane == lane:
                for kept, sent in zip(move.offsets, schedule.arrivals(move), strict=True):
                    sums[kept] = _added(sums[kept], before[sent])
    return sums[0]


def _further(schedule: Schedule, rank: int, offset: int) -> int:
    """The rank at this offset from `rank`, digit by digit."""
    for axis, digit in enumerate(digits(offset, schedule.shape)):
        rank = schedule.step(rank, axis, digit)
    return rank


def _of_stage(sums: list[Additions], rank: int, size: int, inner: int) -> Additions:
    """The sum over the ranks that differ from this one only in the digit of this stage."""
    first = rank - rank // inner % size * inner
    return _in_pairs([sums[first + i * inner] for i in range(size)])


def _in_pairs(trees: list[Additions]) -> Additions:
    while len(trees) > 1:
        odd = trees[len(trees) // 2 * 2 :]
        trees = [_added(a, b) for a, b in zip(trees[::2], trees[1::2], strict=False)] + odd
    return trees[0]


def _added(a: Additions, b: Additions) -> Additions:
    return (a, b) if _lowest(a) < _lowest(b) else (b, a)


def _lowest(subtree: Additions) -> int:
    while isinstance(subtree, tuple):
        subtree = subtree[0]
    return subtree


def _size(stages: Stages) -> int:
    return prod(stage.size for stage in stages)
