"""How exact a sum is: how often it is rounded, and the bound on its error.

Both are computed from the schedule, as the price is. So an algorithm has its bound as soon as it
is written.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import prod

from ringcoll.costs.wire import Wire
from ringcoll.schedules.phases import Carries, phases
from ringcoll.schedules.registry import EXCHANGES, LAX, ScheduleLike, Stages, build
from ringcoll.schedules.schedule import Schedule

#: The distance from 1 to the next float32.
_SINGLE = 2.0**-23


def roundings(collective: str, algorithm: ScheduleLike, shape: Sequence[int]) -> int:
    """The largest number of roundings that a contribution goes through on its way into a sum.

    It is computed from the schedule run backward, and is true for any order of the additions of a
    round. It is 0 if nothing is rounded. The division of a pmean is one more. The built-ins
    ("lax") may add in any order: n-1 roundings, as "direct".

    Raises:
        ValueError: as `algorithms.build`.

    >>> [costs.roundings("psum", name, (8,)) for name in ("ring", "two_ended", "bruck")]
    [7, 5, 3]
    """
    built = _schedule(collective, algorithm, shape)
    if collective not in ("psum_scatter", "psum", "pmean"):
        return 0
    # A stage adds the vectors of its ranks one after the other.
    added = (
        sum(s.size - 1 for s in built) if isinstance(built, tuple) else _longest(built, _additions)
    )
    return added + (collective == "pmean")


def _schedule(collective: str, algorithm: ScheduleLike, shape: Sequence[int]) -> Schedule | Stages:
    """`build`, also for a built-in: the schedule that rounds and encodes as often.

    A built-in sends over several axes as over one.
    """
    if algorithm == LAX:
        name = "pairwise" if collective in EXCHANGES else "direct"
        return build(collective, name, (prod(shape),))
    return build(collective, algorithm, tuple(shape))


def _longest(schedule: Schedule, grow: Callable[[int, list[int]], int]) -> int:
    """The largest count of a contribution on its way into the shard that a rank keeps.

    `grow` makes a slot's new count from its own, and from those that arrive there in a round.
    """
    count: defaultdict[tuple[int, int], int] = defaultdict(int)  # of lane and offset
    for moves in reversed(schedule.rounds):
        arriving = defaultdict(list)
        for move in moves:
            for offset, arrival in zip(move.offsets, schedule.arrivals(move), strict=True):
                arriving[move.lane, offset].append(count[move.lane, arrival])
        for slot, arrived in arriving.items():
            count[slot] = grow(count[slot], arrived)
    return max(count[lane, 0] for lane in range(schedule.lanes))


def _additions(own: int, arrived: list[int]) -> int:
    return max(own, *arrived) + len(arrived)


def _hops(own: int, arrived: list[int]) -> int:
    return max(own, max(arrived) + 1)


def encodings(collective: str, algorithm: ScheduleLike, shape: Sequence[int]) -> int:
    """The largest number of times that a value is encoded on its way, if messages have a wire.

    A gather and an exchange encode a value once, at its source. A sum encodes at each hop;
    "direct" has one hop. An all-reduce encodes the finished sum once more; with stages, each stage
    encodes once. A single rank sends nothing, so it encodes nothing. The built-ins ("lax") encode
    as often as "direct".

    Raises:
        ValueError: as `algorithms.build`.

    >>> [costs.encodings("psum", name, (8,)) for name in ("direct", "bruck", "ring")]
    [2, 4, 8]
    """
    run = phases(collective, _schedule(collective, algorithm, shape))
    counts = [
        _longest(phase.schedule, _hops) if phase.carries is Carries.SUMS else 1
        for phase in run
        if phase.schedule.rounds
    ]
    return sum(counts)


def error_bound(
    collective: str,
    algorithm: ScheduleLike,
    shape: Sequence[int],
    eps: float,
    accumulate_eps: float | None = None,
    wire: Wire | str | None = None,
) -> float:
    """The bound on the error of a sum, relative to the sum of the absolute values.

    For k roundings to nearest, each with u = eps/2, it is gamma_k = k u / (1 - k u): Higham,
    "Accuracy and Stability of Numerical Algorithms", section 4.2. Sums in a wider dtype have the
    gamma_k of that dtype, and are rounded once more at the end. Overflow and underflow are left
    out.

    With a wire, every collective has a bound. It is relative to a larger number: take, for each
    rank that contributes to a result, the largest magnitude in the blocks that hold its
    contribution, and add these. Each encoding errs by at most `wire.error` of that. The result is
    rounded to the operand's dtype when a shard is decoded and when a sum is finished. Platforms may
    flush values of magnitude below 2**-126 to zero; the bound leaves this out. A block with an inf
    or a NaN has no bound: see `Wire`.

    Args:
        collective, algorithm, shape: as for `algorithms.build`; "lax" is the built-in.
        eps: the spacing above 1 of the operand's dtype, `finfo(dtype).eps`.
        accumulate_eps: the same for the dtype in which sums are kept, if it is wider. None: sums
            are kept in the operand's dtype; with a wire, in float32.
        wire: what messages hold.

    Raises:
        ValueError: as `algorithms.build`; or k u >= 1: then there is no bound.

    >>> eps = jnp.finfo(jnp.bfloat16).eps
    >>> print(f"{costs.error_bound('psum_scatter', 'ring', (8,), eps):.4f}")
    0.0281
    >>> wide = costs.error_bound("psum_scatter", "ring", (8,), eps, jnp.finfo(jnp.float32).eps)
    >>> print(f"{wide:.4f}")
    0.0039
    >>> int8 = ringcoll.Wire("int8")
    >>> bound = costs.error_bound("psum", "direct", (8,), eps, wire=int8)
    >>> print(f"{bound:.4f}")
    0.0199
    """
    wire = Wire(wire) if isinstance(wire, str) else wire
    if wire is not None and accumulate_eps is None:
        accumulate_eps = _SINGLE
    count = roundings(collective, algorithm, shape)
    # float(): the eps of a finfo has its own dtype, which is too coarse to compute a bound in.
    unit = float(eps if accumulate_eps is None else accumulate_eps) / 2
    if count * unit >= 1:
        raise ValueError(
            f"{collective}: no bound after {count} roundings of {unit:g}; "
            "accumulate in a wider dtype"
        )
    gamma = count * unit / (1 - count * unit)
    if wire is not None:
        encoded = encodings(collective, algorithm, shape)
        narrow = encoded + 1 + (collective == "pmean") if encoded else 0
        rounded = (1 + float(eps) / 2) ** narrow
        return (1 + wire.error) ** encoded * (1 + gamma * (encoded > 0)) * rounded - 1
    if count == 0 or accumulate_eps is None:
        return gamma
    return gamma + (1 + gamma) * float(eps) / 2
