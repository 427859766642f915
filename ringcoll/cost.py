"""What a collective costs and how exact it is, read off its schedule.

`price` counts rounds, bytes on the wire and additions; a `Model` turns the counts into
seconds; `fit` finds the model of a machine from what was measured on it. Nothing is
looked up by the name of an algorithm, so a new one is priced as soon as it is written.

Everything is counted in *shards*: 1/n of the full vector, which is the operand of
`all_gather`, the result of `psum_scatter`, and one block of `all_to_all`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from itertools import combinations
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ringcoll.algorithms import Algorithm, Stages, build
from ringcoll.schedule import Price, Schedule, product


def price(
    collective: str,
    algorithm: Algorithm,
    shape: Sequence[int],
    network: Sequence[int] | None = None,
) -> Price:
    """What one rank pays for a collective, in shards (1/n of the full vector).

    A psum (and pmean, pmax, pmin, pbroadcast) pays for a reduce-scatter and an
    all-gather, or for its stages: a stage over p ranks gathers whole vectors and adds
    p-1 of them to its own.

    Args:
        collective: one of `algorithms.COLLECTIVES`.
        algorithm: a name, schedule or function, as `algorithms.build` takes it.
        shape: the sizes of the axes, major first.
        network: the shape of a physical ring or torus; None is a switch, to which each
            rank has one port. Stages are routed along their digits of the ranks.

    Raises:
        ValueError: as `algorithms.build`; or the network is of another number of ranks.
    """
    made = build(collective, algorithm, tuple(shape))
    if isinstance(made, tuple):
        return _price_of_stages(made, network)
    backward = made.price(network)
    forward = replace(backward, raw=backward.sent, additions=Fraction(0))
    if collective == "psum_scatter":
        return backward
    if collective in ("all_gather", "all_to_all"):
        return forward
    return _in_turn(backward, forward)


def _price_of_stages(stages: Stages, network: Sequence[int] | None) -> Price:
    n = prod(stage.size for stage in stages)  # a whole vector is n shards
    prices = []
    for i in range(len(stages)):
        one = product(stages, [i]).price(network)  # along its digit of the ranks
        prices.append(
            replace(
                one,
                sent=n * one.sent,
                raw=n * one.sent if i == 0 else Fraction(0),  # later stages send sums
                link=n * one.link,
                additions=n * one.additions,
            )
        )
    return _in_turn(*prices)


def _in_turn(*prices: Price) -> Price:
    return Price(*(sum(column) for column in zip(*map(astuple, prices), strict=True)))


def wire_bytes(
    collective: str,
    algorithm: Algorithm,
    shape: Sequence[int],
    shard_elements: float,
    itemsize: int,
    accumulate_itemsize: int | None = None,
) -> float:
    """The bytes that leave one rank.

    With a wider `accumulate_dtype`, what has not been added to yet travels narrow, and a
    message with a partial sum in it wide; the gather after a reduce-scatter is narrow.

    Args:
        collective, algorithm, shape: as for `price`.
        shard_elements: elements in 1/n of the full vector.
        itemsize: bytes of an element of the operand.
        accumulate_itemsize: bytes of an element of a partial sum; as the operand's if None.

    Raises:
        ValueError: as `price`.
    """
    wide = itemsize if accumulate_itemsize is None else accumulate_itemsize
    paid = price(collective, algorithm, shape)
    return float((paid.raw * itemsize + (paid.sent - paid.raw) * wide) * shard_elements)


@dataclass(frozen=True, slots=True)
class Model:
    """Seconds a round (alpha), a byte on the busiest link (beta), a byte added (gamma)."""

    alpha: float
    beta: float
    gamma: float


def seconds(paid: Price, shard_bytes: float, model: Model, accumulate_ratio: float = 1) -> float:
    """The seconds that a price takes on a machine.

    Args:
        paid: what `price` counted.
        shard_bytes: bytes in 1/n of the full vector.
        model: of the machine.
        accumulate_ratio: the width of a partial sum over that of the operand. The busiest
            link is taken to carry sums in the proportion in which a rank sends them.
    """
    raw = float(paid.raw / paid.sent) if paid.sent else 1.0
    link_bytes = float(paid.link) * shard_bytes * (raw + (1 - raw) * accumulate_ratio)
    added_bytes = float(paid.additions) * shard_bytes * accumulate_ratio
    return model.alpha * paid.rounds + model.beta * link_bytes + model.gamma * added_bytes


class Sample(NamedTuple):
    """One measurement: what was paid, and the seconds that it took."""

    rounds: float
    link_bytes: float
    added_bytes: float
    seconds: float


def fit(samples: Iterable[Sample]) -> tuple[Model, float]:
    """The model nearest to what was measured, and its median relative error.

    Least squares of the *relative* error, so that small payloads count as much as large,
    with no negative coefficient. What the samples never pay (the additions of a gather)
    gets 0, and so does what they cannot tell from an earlier count.

    Raises:
        ValueError: no samples, or one that took no time.
    """
    rows = np.array([tuple(sample) for sample in samples], float)
    if rows.size == 0 or not (rows[:, 3] > 0).all():
        raise ValueError(f"fit needs samples of more than 0 seconds, got {rows.tolist()}")
    relative = rows[:, :3] / rows[:, 3:]
    size = np.linalg.norm(relative, axis=0)
    scaled = relative / np.where(size > 0, size, 1)  # rounds and bytes differ by 1e9
    # The best with signs is the best without on the coefficients that it leaves above 0;
    # of three, all such subsets can be tried.
    paid = np.flatnonzero(size)
    best, best_error = np.zeros(3), float("inf")
    for chosen in (list(c) for k in range(4) for c in combinations(paid, k)):
        x = np.zeros(3)
        x[chosen] = np.linalg.lstsq(scaled[:, chosen], np.ones(len(rows)), rcond=None)[0]
        error = float(np.linalg.norm(scaled @ x - 1))
        if (x >= 0).all() and error < best_error - 1e-12:  # more than rounding
            best, best_error = x, error
    alpha, beta, gamma = (best / np.where(size > 0, size, 1)).tolist()
    return Model(alpha, beta, gamma), float(np.median(abs(scaled @ best - 1)))


def _tpu(link_bytes_per_second: float, hbm_bytes_per_second: float) -> Model:
    # A byte added is three moved: two read, one written.
    return Model(1e-6, 1 / link_bytes_per_second, 3 / hbm_bytes_per_second)


#: Modelled, not measured: 1 us a round (an assumption, for a hop to the neighbour); a link
#: carries, each way, nine tenths of the rate published for a port (50 or 100 GB/s);
#: additions run at the rate of the memory. Published at docs.cloud.google.com/tpu/docs/v5e,
#: v5p, v6e, tpu7x, whose device is half a chip. Price with the `network` of the torus.
DEVICES: Mapping[str, Model] = MappingProxyType(
    {
        "v5e": _tpu(45e9, 810e9),
        "v5p": _tpu(90e9, 2760e9),
        "v6e": _tpu(90e9, 1640e9),
        "tpu7x": _tpu(90e9, 3690e9),
    }
)


def roundings(collective: str, algorithm: Algorithm, shape: Sequence[int]) -> int:
    """The most roundings that any one contribution goes through on its way into a sum.

    Read off the schedule run backward, whatever order the additions of one round are
    done in. 0 where nothing is rounded; the division of a pmean is one more.

    Raises:
        ValueError: as `price`.
    """
    made = build(collective, algorithm, tuple(shape))
    if collective not in ("psum_scatter", "psum", "pmean"):
        return 0
    # A stage adds up its ranks one after the other.
    added = sum(s.size - 1 for s in made) if isinstance(made, tuple) else _depth(made)
    return added + (collective == "pmean")


def _depth(schedule: Schedule) -> int:
    """The additions on the longest way into the shard that a rank keeps."""
    depth: defaultdict[tuple[int, int], int] = defaultdict(int)  # of lane and offset
    for moves in reversed(schedule.rounds):
        arriving = defaultdict(list)
        for move in moves:
            for offset, arrival in zip(move.offsets, schedule.arrivals(move), strict=True):
                arriving[move.lane, offset].append(depth[move.lane, arrival])
        for slot, came in arriving.items():
            depth[slot] = max(depth[slot], *came) + len(came)
    return max(depth[lane, 0] for lane in range(schedule.lanes))


def error_bound(
    collective: str,
    algorithm: Algorithm,
    shape: Sequence[int],
    eps: float,
    accumulate_eps: float | None = None,
) -> float:
    """The bound on the error of a sum, relative to the sum of the absolute values.

    Of k roundings to nearest, each with u = eps/2: gamma_k = k u / (1 - k u). Higham,
    "Accuracy and Stability of Numerical Algorithms", section 4.2. Sums kept in a wider
    dtype err by its own gamma_k, and are rounded once more at the end. (Overflow and
    underflow aside.)

    Args:
        collective, algorithm, shape: as for `price`.
        eps: the spacing above 1 of the operand's dtype, `finfo(dtype).eps`.
        accumulate_eps: that of the wider dtype that sums are kept in, if any.

    Raises:
        ValueError: as `price`; or k u >= 1, where nothing is known.
    """
    count = roundings(collective, algorithm, shape)
    # float(): a finfo's eps is of its own dtype, too coarse to compute a bound in.
    unit = float(eps if accumulate_eps is None else accumulate_eps) / 2
    if count * unit >= 1:
        raise ValueError(
            f"{collective}: no bound after {count} roundings of {unit:g}; "
            "accumulate in a wider dtype"
        )
    gamma = count * unit / (1 - count * unit)
    if count == 0 or accumulate_eps is None:
        return gamma
    return gamma + (1 + gamma) * float(eps) / 2
