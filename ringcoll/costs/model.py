"""What a collective costs in seconds: a model of the machine, and its fit.

`seconds` multiplies the counts of `ringcoll.costs` by a `Model`. `fastest` finds the algorithm that
takes least time at each size. `fit` finds the model of a machine from measurements.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import isqrt
from typing import NamedTuple

import numpy as np

from ringcoll.costs.counts import Price
from ringcoll.costs.curves import Curve
from ringcoll.costs.routes import Load, UnevenRounds
from ringcoll.costs.slices import SIDES


@dataclass(frozen=True, slots=True)
class Model:
    """Rates of a machine: seconds per message (alpha), byte sent (beta) and byte added (gamma).

    alpha is the start of a message. It counts for each of the `startups` of a price: messages that
    leave through different ports at the same time share one. hop counts for each link that a
    message passes. So a message of b bytes to a neighbour takes alpha + hop + b beta. axes is the
    number of axes of the torus or grid that the links make; a switch has none, and no hop. From
    all_reduces ranks on, the built-in reduce-scatter is an all-reduce; 0 means never. built_in is
    the share of the links' rate that a built-in collective reaches, and built_in_sum that of an
    all-reduce; 1 if nobody measured less. devices: how many share the links of a chip.
    sparse_cores: whether built-in collectives can run there, beside any work.

    For matmuls, delta is seconds per floating-point operation, and start is what a matmul takes
    besides its operations. hbm_seconds: to read a byte of the main memory. vmem_seconds: to read
    one of the memory next to the core, which holds vmem_bytes.

    wire is the measured seconds of a message as a function of its bytes, if there are
    measurements. Then it replaces alpha and beta. alpha is infinite on a machine whose messages
    nobody measured.
    """

    alpha: float
    beta: float
    gamma: float
    delta: float = 0.0
    hop: float = 0.0
    axes: int = 1
    start: float = 0.0
    hbm_seconds: float = 0.0
    vmem_seconds: float = 0.0
    vmem_bytes: float = 0.0
    all_reduces: int = 0
    built_in: float = 1.0
    built_in_sum: float = 1.0
    devices: int = 1
    sparse_cores: bool = False
    wire: Curve | None = None

    @property
    def latency(self) -> float:
        """The seconds of a message to a neighbour after its start, not counting its bytes.

        A matmul waits only for this and for the bytes: it is assumed, not measured, that a message
        that is started early has its start under the compute. Without hops, this is alpha.
        """
        return self.hop or self.alpha

    @property
    def memory(self) -> float:
        """Seconds per byte read or written. To add a byte, two are read and one is written."""
        return self.gamma / 3

    def holds(self, size: float) -> bool:
        """Whether this many bytes fit in the memory next to the core."""
        return size <= self.vmem_bytes


def seconds(paid: Price, shard_bytes: float, model: Model) -> float:
    """The seconds that a price takes on a machine.

    Args:
        paid: what `costs.price` counted.
        shard_bytes: bytes in 1/n of the full vector.
        model: the rates of the machine.

    >>> paid = costs.price("all_gather", "ring", (8,), network=(8,))
    >>> print(f"{costs.seconds(paid, 2**20, costs.DEVICES['v5e']):.1e}")
    1.8e-04
    """
    load = Load(paid.startups, paid.hops, paid.link, paid.uneven)
    added_bytes = float(paid.additions) * shard_bytes
    return _message_seconds(load, shard_bytes, model) + model.gamma * added_bytes


def _message_seconds(load: Load, shard_bytes: float, model: Model) -> float:
    """The seconds of messages. With a measured wire, this assumes that all have the same size."""
    link_bytes = float(load.link) * shard_bytes
    if model.wire and load.startups:
        return load.startups * model.wire(link_bytes / load.startups)
    in_turn = model.alpha * load.startups + model.hop * load.hops + model.beta * link_bytes
    return in_turn - sum(_overlap_seconds(kind, shard_bytes, model) for kind in load.uneven)


def _overlap_seconds(rounds: UnevenRounds, shard_bytes: float, model: Model) -> float:
    """The seconds in which bytes of near messages travel while far messages pass their links.

    A round is done when, for every distance, messages that go as far have passed that many links,
    and the busiest link has carried them.
    """
    (_, shards), (farthest, _) = rounds.reach[0], rounds.reach[-1]
    in_turn = model.hop * farthest + model.beta * shard_bytes * float(shards)
    least = max(
        model.hop * links + model.beta * shard_bytes * float(load) for links, load in rounds.reach
    )
    return rounds.times * (in_turn - least)


class Range(NamedTuple):
    """A range of bytes in which one algorithm is the fastest; both ends are included."""

    name: str
    least: int
    most: int


def fastest(times: Mapping[str, Callable[[int], float]], least: int, most: int) -> list[Range]:
    """The fastest of several algorithms at every size, to the byte.

    It bisects the intervals between powers of two. (If time is a line in the size, as that of
    `seconds` is except for uneven rounds, then the fastest at both ends of an interval is the
    fastest inside it.)

    Args:
        times: the seconds of each as a function of bytes; if several tie, the first one counts.
        least, most: the smallest and the largest size.

    >>> costs.fastest({"few": lambda size: 3 + size, "long": lambda size: 9 + size / 2}, 1, 100)
    [Range(name='few', least=1, most=12), Range(name='long', least=13, most=100)]
    """

    def best(size: int) -> str:
        taken = {name: seconds_of(size) for name, seconds_of in times.items()}
        quickest = min(taken.values())
        return next(name for name, t in taken.items() if t <= quickest * (1 + 1e-12))

    def changes(low: int, high: int) -> Iterator[Range]:
        if best(low) == best(high):
            yield Range(best(low), low, high)
        elif high - low == 1:
            yield from (Range(best(size), size, size) for size in (low, high))
        else:
            middle = (low + high) // 2
            yield from (*changes(low, middle), *changes(middle, high))

    powers = [2**k for k in range(most.bit_length()) if least < 2**k < most]
    found: list[Range] = []
    for low, high in pairwise([least, *powers, most]):
        for one in changes(low, high):  # each begins at the end of the one before
            start = found.pop().least if found and found[-1].name == one.name else one.least
            found.append(one._replace(least=start))
    return found


class Sample(NamedTuple):
    """One measurement: its counts, and the seconds that it took."""

    startups: float
    link_bytes: float
    added_bytes: float
    seconds: float


def fit(samples: Iterable[Sample]) -> tuple[Model, float]:
    """The model nearest to the measurements, and its median relative error.

    It is the least squares of the *relative* error, so small payloads count as much as large ones.
    No coefficient is negative. A coefficient is 0 if no sample has it (the additions of a gather),
    or if the samples cannot distinguish it from an earlier one.

    Raises:
        ValueError: there are no samples, or a sample took no time.

    >>> model, error = costs.fit([costs.Sample(1, 100, 0, 3.0), costs.Sample(2, 100, 0, 5.0)])
    >>> print(f"{model.alpha:.2f} {model.beta:.2f} {error:.2f}")
    2.00 0.01 0.00
    """
    rows = np.array([tuple(sample) for sample in samples], float)
    if rows.size == 0 or not (rows[:, 3] > 0).all():
        raise ValueError(f"fit needs samples of more than 0 seconds, got {rows.tolist()}")
    relative = rows[:, :3] / rows[:, 3:]
    size = np.linalg.norm(relative, axis=0)
    scaled = relative / np.where(size > 0, size, 1)  # messages and bytes differ by 1e9
    # The best fit without negative coefficients is an ordinary least-squares fit of those that it
    # leaves above 0. There are three coefficients, so try all subsets.
    paid = np.flatnonzero(size)
    best, best_error = np.zeros(3), float("inf")
    for chosen in (list(c) for k in range(4) for c in combinations(paid, k)):
        x = np.zeros(3)
        x[chosen] = np.linalg.lstsq(scaled[:, chosen], np.ones(len(rows)), rcond=None)[0]
        error = float(np.linalg.norm(scaled @ x - 1))
        if (x >= 0).all() and error < best_error - 1e-12:  # better by more than rounding
            best, best_error = x, error
    alpha, beta, gamma = (best / np.where(size > 0, size, 1)).tolist()
    return Model(alpha, beta, gamma), float(np.median(abs(scaled @ best - 1)))


def links(ranks: int, model: Model) -> int:
    """The number of links over which every device of a slice can receive at the same time.

    It is two for each axis of a torus. It is one for each axis of a grid, because a corner has no
    more; 4 chips have two axes. A slice with at least as many chips as a torus of `slices.SIDES` is
    assumed to be a torus; a single axis is a ring.

    >>> v5e = costs.DEVICES["v5e"]
    >>> costs.links(8, v5e), costs.links(256, v5e)  # a grid, a torus
    (2, 4)
    """
    chips = max(ranks // model.devices, 2)
    return min(model.axes, chips.bit_length() - 1) * (1 + _is_torus(ranks, model))


def _is_torus(ranks: int, model: Model) -> bool:
    return ranks // model.devices >= SIDES.get(model.axes, 1) ** model.axes


def gather_links(ranks: int, model: Model) -> float:
    """The number of links whose whole rate a built-in all-gather reaches."""
    return links(ranks, model) * model.built_in


def scatter_links(ranks: int, model: Model) -> float:
    """`gather_links` of a built-in reduce-scatter. As an all-reduce it sends twice as much.

    XLA makes it one from `Model.all_reduces` ranks on, with two axes only if they are equally long.
    """
    is_square = model.axes != 2 or isqrt(ranks) ** 2 == ranks
    is_sum = is_square and 0 < model.all_reduces <= ranks
    share = model.built_in_sum / 2 if is_sum else model.built_in
    return links(ranks, model) * share


def built_in_start(ranks: int, model: Model) -> float:
    """Seconds that a built-in collective starts: a message for each link to the farthest rank.

    The sides of the slice are assumed to be equal. (`overlap` knows them.)
    """
    side = ranks ** (1 / model.axes)
    farthest = min(side - 1, side / 2) if _is_torus(ranks, model) else side - 1
    return (model.alpha + model.hop) * model.axes * farthest
