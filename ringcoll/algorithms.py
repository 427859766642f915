"""The library of schedules: each algorithm is one function that returns its list.

An algorithm takes the sizes of the axes it runs over, major first: `ring(8)`,
`ring(4, 2)`. Most are written for one axis and serve several by `product`: gather along
the first, then everything held along the next. To add one, write the function under the
decorator of its kind; it is then executed, proved, priced, drawn, explained, tested and
benchmarked. Its docstring has a first line, `When:`, and `Source:` if it was published.

`n` is the size of an axis; all shifts and offsets are modulo `n`.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from ringcoll.listing import (
    ALL_TO_ALLS,
    GATHERS,
    STAGED,
    Algorithm,
    Stages,
    along_each_axis,
    listed,
)
from ringcoll.schedule import AllToAllSchedule, Move, Schedule, ScheduleError, in_lanes, product


@listed(GATHERS)
@along_each_axis
def ring(n: int, *, direction: int = 1) -> Schedule:
    """Pass on to the neighbour what came last: n-1 rounds of one shard.

    The bandwidth optimum with nearest-neighbour messages only; all traffic one way round.

    When: large payloads, neighbours only.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", J. Parallel Distrib. Comput. 69 (2009).
    """
    rounds = ((Move(direction, (direction * t % n,)),) for t in range(n - 1))
    return Schedule((n,), tuple(rounds))


@listed(GATHERS)
@along_each_axis
def bidirectional_ring(n: int) -> Schedule:
    """Half of each shard goes round either way: n-1 rounds of half a shard a direction.

    Both directions of every link work all the time.

    When: large payloads, half of the bytes each way.
    """
    return in_lanes(ring(n), ring(n, direction=-1))


@listed(GATHERS)
@along_each_axis
def two_ended(n: int) -> Schedule:
    """Whole shards go round both ways and meet: ceil((n-1)/2) rounds.

    The rounds of a bidirectional ring cut in half, each of twice the bytes.

    When: a physical ring: half the rounds.
    """
    ahead = [Move(1, (t,)) for t in range(n // 2)]
    back = [Move(-1, (-t % n,)) for t in range((n - 1) // 2)]
    rounds = (tuple(m[t] for m in (ahead, back) if t < len(m)) for t in range(n // 2))
    return Schedule((n,), tuple(rounds))


@listed(GATHERS)
@along_each_axis
def bruck(n: int) -> Schedule:
    """Double what is held in every round: ceil(log2 n) rounds, for any n.

    When: small payloads, any n, a switch.

    Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
    communications in multiport message-passing systems", IEEE TPDS 8 (1997).
    """
    steps = [2**k for k in range((n - 1).bit_length())]
    return Schedule((n,), tuple((Move(s, tuple(range(min(s, n - s)))),) for s in steps))


@listed(GATHERS)
@along_each_axis
def recursive_doubling(n: int) -> Schedule:
    """Swap all that is held with the partner n/2, ..., 2, 1 away: log2 n rounds.

    The farthest partner comes first, while there is least to send. Backward it is
    recursive halving; both make Rabenseifner's all-reduce.

    When: small payloads, a switch, n a power of two.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005).

    Raises:
        ScheduleError: n is not a power of two.
    """
    if n & (n - 1):
        raise ScheduleError(
            f"recursive_doubling needs a power of two, got {n} ranks; "
            "use algorithm='bruck', which takes as few rounds for any number"
        )
    return product([ring(2)] * (n.bit_length() - 1) or [ring(1)])


@listed(GATHERS)
@along_each_axis
def direct(n: int) -> Schedule:
    """Everybody to everybody at once: one round of n-1 messages.

    Backward every contribution travels as it is and is added only where it belongs:
    with a wide `accumulate_dtype` the bytes on the wire stay narrow and the sum is
    rounded once.

    When: wide sums of narrow messages.
    """
    everybody = tuple(Move(s, (0,)) for s in range(1, n))
    return Schedule((n,), (everybody,) if everybody else ())


@listed(GATHERS)
def torus(*shape: int) -> Schedule:
    """Every axis and both directions at once: two lanes an axis, each in its own order.

    Lane i starts along axis i, its twin the other way round, so that on a square torus
    no link is idle. On one axis it is the bidirectional ring.

    When: large payloads, several axes: all links, both ways.

    Source: Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on
    torus interconnects", Int. Conf. on Supercomputing (2010).
    """
    axes = range(len(shape))
    orders = [[*axes[first:], *axes[:first]] for first in axes]
    lanes = [(order, direction) for order in orders for direction in (1, -1)]
    return in_lanes(*(product([ring(n, direction=d) for n in shape], o) for o, d in lanes))


@listed(GATHERS)
def hamiltonian(*shape: int) -> Schedule:
    """Pass on what came last, on a path through all axes: n-1 rounds of one shard.

    Each lane sends as much in every round: it goes round one axis, takes a step along the next,
    and goes round again. On a square torus no link is idle; on one axis it is a bidirectional ring.

    When: a matmul hides it, several axes: all links, both ways.
    """
    lanes, step = [], Schedule(shape, ()).step
    of_twos = len(shape) > 1 and max(shape) == 2  # both ways round two ranks are one link
    for first in range(len(shape)):
        path: tuple[int, ...] = ()  # along which axis each round goes
        for axis in (*range(first, len(shape)), *range(first)):
            path = ((*path, axis) * shape[axis])[:-1]
        for way in (1,) if of_twos else (1, -1):
            offset, rounds = 0, list[tuple[Move]]()
            for axis in path:
                rounds.append((Move(way, (offset,), axis),))
                offset = step(offset, axis, way)
            lanes.append(Schedule(shape, tuple(rounds)))
    return in_lanes(*lanes)


@listed(STAGED)
def exchange(*shape: int) -> Stages:
    """Swap whole vectors and add, along each factor 2 of n and then its odd part.

    ceil(log2 n) rounds for any n, at k + m - 1 vectors of bytes for n = 2^k m with m odd.
    Every stage adds in the order of the ranks, so that all hold the same bits.

    When: a few kilobytes, where only the rounds count.
    """
    twos = [(n & -n).bit_length() - 1 for n in shape]
    return tuple(
        stage
        for n, k in zip(shape, twos, strict=True)
        for stage in [ring(2)] * k + ([bruck(n >> k)] if n >> k > 1 else [])
    )


@listed(STAGED)
def one_shot(*shape: int) -> Stages:
    """Gather every whole vector, then add once: ceil(log2 n) rounds, n-1 vectors of bytes.

    The rounding error of a single sum, whatever n is.

    When: small payloads, the error of one sum.
    """
    return tuple(bruck(n) for n in shape if n > 1)


@listed(ALL_TO_ALLS)
@along_each_axis
def pairwise(n: int) -> AllToAllSchedule:
    """Each block straight to its rank: n-1 rounds of one block.

    When: large blocks.
    """
    return AllToAllSchedule((n,), tuple((Move(s, (s,)),) for s in range(1, n)))


@listed(ALL_TO_ALLS, "bruck")
@along_each_axis
def bruck_all_to_all(n: int) -> AllToAllSchedule:
    """A block for r + d travels by the binary digits of d: ceil(log2 n) rounds.

    About n/2 blocks a round: fewer messages, more bytes.

    When: small blocks.

    Source: Bruck et al., as for the all-gather (1997).
    """
    steps = [2**k for k in range((n - 1).bit_length())]
    rounds = ((Move(s, tuple(d for d in range(n) if d & s)),) for s in steps)
    return AllToAllSchedule((n,), tuple(rounds))


ALL_REDUCES = ("psum", "pmean", "pmax", "pmin", "pbroadcast")
_KINDS: Mapping[str, tuple[Mapping[str, Callable[..., Schedule | Stages]], ...]] = {
    "all_gather": (GATHERS,),
    "psum_scatter": (GATHERS,),
    **dict.fromkeys(ALL_REDUCES, (GATHERS, STAGED)),
    "all_to_all": (ALL_TO_ALLS,),
}
#: The collectives that schedules serve.
COLLECTIVES = tuple(_KINDS)
#: The literature's names of collectives that are called otherwise in `jax.lax`.
ALIASES: Mapping[str, str] = {"all_reduce": "psum", "reduce_scatter": "psum_scatter"}


def in_lax(collective: str) -> str:
    """The name that `jax.lax` has for a collective."""
    return ALIASES.get(collective, collective)


def names(collective: str) -> tuple[str, ...]:
    """The names of the algorithms that a collective can run by.

    Raises:
        ValueError: no such collective.
    """
    if collective not in _KINDS:
        raise ValueError(f"no collective {collective!r}; there are {', '.join(_KINDS)}")
    return tuple(name for kind in _KINDS[collective] for name in kind)


@lru_cache(maxsize=1024)
def build(collective: str, algorithm: Algorithm, shape: tuple[int, ...]) -> Schedule | Stages:
    """The checked schedule (or stages) of a collective on axes of `shape`, major first.

    Args:
        collective: one of `COLLECTIVES`.
        algorithm: one of `names(collective)`, a `Schedule`, a tuple of stages, or a
            function that makes one when called as `algorithm(*shape)`; hashable.
        shape: the sizes of the axes; a schedule may cut them into finer digits.

    Raises:
        ValueError: no such collective or algorithm, a size below 1, or a schedule of
            another kind or another number of ranks.
        ScheduleError: (a ValueError) the schedule is wrong, or there is none of this shape.
        TypeError, ScheduleError: the function that makes it raises what is chained to this.
    """
    choices = names(collective)
    if isinstance(algorithm, str) and algorithm not in choices:
        raise ValueError(
            f"{collective}: no algorithm {algorithm!r}; choose from {', '.join(choices)}"
        )
    if not shape or min(shape) < 1:
        raise ValueError(f"{collective}: axes of sizes {shape}; give one or more, each at least 1")
    if isinstance(algorithm, str):
        algorithm = next(kind[algorithm] for kind in _KINDS[collective] if algorithm in kind)
    made = _called(algorithm, shape) if callable(algorithm) else algorithm
    stages: Any = made if isinstance(made, tuple) and collective in ALL_REDUCES else (made,)
    kind = AllToAllSchedule if collective == "all_to_all" else Schedule
    for stage in stages:
        if type(stage) is not kind:
            raise ValueError(f"{collective}: takes an instance of {kind.__name__}, got {stage!r}")
        if stage.lanes > 1 and kind is AllToAllSchedule:
            raise ValueError(f"{collective}: takes a schedule of one lane, got {stage.lanes}")
        stage.check()
    if prod(stage.size for stage in stages) != prod(shape):
        sizes = " x ".join(str(stage.size) for stage in stages) or "no"
        raise ValueError(f"{collective}: a schedule of {sizes} ranks on axes of sizes {shape}")
    return made


def _called(algorithm: Callable[..., Any], shape: tuple[int, ...]) -> Any:
    """What an algorithm makes; what it raises says whose it is."""
    try:
        return algorithm(*shape)
    except ScheduleError:  # says all
        raise
    except Exception as error:
        call = f"{getattr(algorithm, '__name__', algorithm)}({', '.join(map(str, shape))})"
        kind = TypeError if isinstance(error, TypeError) else ScheduleError
        raise kind(f"{call} raised {type(error).__name__}: {error}") from error
