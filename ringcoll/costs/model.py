"""What a collective costs in seconds: a model of the machine, and its fit.

`seconds` multiplies the counts of `ringcoll.pricing` by a `Model`, and `seconds_on_hosts` by two.
`fastest` says which of several algorithms takes least time at which size. `fit` finds the model
of a machine from measurements.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import isqrt
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ringcoll.costs.counts import HostsPrice, Price
from ringcoll.costs.routes import Load
from ringcoll.costs.slices import SIDES

__all__ = [
    "DEVICES",
    "KINDS",
    "SWITCHES",
    "Model",
    "Range",
    "Sample",
    "fastest",
    "fit",
    "links",
    "scatter_links",
    "seconds",
    "seconds_on_hosts",
]


@dataclass(frozen=True, slots=True)
class Model:
    """Rates of a machine: alpha, seconds a message; beta, a byte on a link; gamma, a byte added.

    alpha is paid for each of the `startups` of a price. Messages that leave by different ports at
    once share one alpha; a message that goes far pays one for every link. axes are the axes of
    the torus or grid that the links make; a switch has none. From all_reduces ranks on, the
    built-in reduce-scatter is an all-reduce; 0 means never.

    For matmuls, delta is seconds a floating-point operation, and start is seconds that a matmul
    takes besides its operations. far is seconds a byte read from the main memory. near is the
    same for the memory beside the core, which holds near_bytes. Compilers reckon
    reckoned_alpha and reckoned_beta a byte for a hop, and start it early or late by that.
    """

    alpha: float
    beta: float
    gamma: float
    delta: float = 0.0
    axes: int = 1
    start: float = 0.0
    far: float = 0.0
    near: float = 0.0
    near_bytes: float = 0.0
    all_reduces: int = 0
    reckoned_alpha: float = 0.0
    reckoned_beta: float = float("inf")

    def reckons(self, size: float) -> float:
        """Seconds that compilers reckon for a hop of so many bytes, by which they order it."""
        return self.reckoned_alpha + self.reckoned_beta * size

    @property
    def memory(self) -> float:
        """Seconds a byte read or written: a byte added is two read and one written."""
        return self.gamma / 3

    def holds(self, size: float) -> bool:
        """Whether so many bytes stay in the memory beside the core."""
        return size <= self.near_bytes


def seconds(paid: Price, shard_bytes: float, model: Model, accumulate_ratio: float = 1) -> float:
    """The seconds that a price takes on a machine.

    Args:
        paid: what `pricing.price` counted.
        shard_bytes: bytes in 1/n of the full vector.
        model: of the machine.
        accumulate_ratio: the width of a partial sum over that of the operand. The busiest
            link is taken to carry sums in the proportion in which a rank sends them.

    >>> paid = pricing.price("all_gather", "ring", (8,), network=(8,))
    >>> print(f"{cost.seconds(paid, 2**20, cost.DEVICES['v5e']):.1e}")
    1.7e-04
    """
    raw = float(paid.raw / paid.sent) if paid.sent else 1.0
    link_bytes = float(paid.link) * shard_bytes * (raw + (1 - raw) * accumulate_ratio)
    added_bytes = float(paid.additions) * shard_bytes * accumulate_ratio
    return model.alpha * paid.startups + model.beta * link_bytes + model.gamma * added_bytes


def seconds_on_hosts(paid: HostsPrice, shard_bytes: float, inner: Model, outer: Model) -> float:
    """The seconds that a price takes on hosts.

    Messages within hosts and messages between hosts travel at once: a round takes the longer of
    the two.

    Args:
        paid: what `pricing.price_on_hosts` counted.
        shard_bytes: bytes in 1/n of the full vector.
        inner: of a rank's port to the ranks of its host, and of its additions.
        outer: of a host's port.

    >>> paid = pricing.price_on_hosts("all_gather", "ring", (8,), hosts=2)
    >>> inner, outer = cost.SWITCHES["h200"], cost.SWITCHES["ethernet100"]
    >>> print(f"{cost.seconds_on_hosts(paid, 2**20, inner, outer):.1e}")
    7.3e-04
    """

    def wire(load: Load, model: Model) -> float:
        return model.alpha * load.startups + model.beta * float(load.link) * shard_bytes

    rounds = (n * max(wire(near, inner), wire(far, outer)) for n, near, far in paid.rounds)
    return sum(rounds) + inner.gamma * float(paid.additions) * shard_bytes


class Range(NamedTuple):
    """The sizes in bytes at which one of several is the fastest; both ends are included."""

    name: str
    least: int
    most: int


def fastest(times: Mapping[str, Callable[[int], float]], least: int, most: int) -> list[Range]:
    """The fastest of several at every size, to the byte.

    By bisection from the powers of two on. (Where time is a line in the size, as that of
    `seconds` is, the fastest at both ends of an interval is the fastest in it.)

    Args:
        times: seconds of so many bytes; of those that tie, the first counts.
        least, most: the smallest and the largest size.

    >>> cost.fastest({"few": lambda size: 3 + size, "long": lambda size: 9 + size / 2}, 1, 100)
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
        for one in changes(low, high):  # each begins where the one before ends
            start = found.pop().least if found and found[-1].name == one.name else one.least
            found.append(one._replace(least=start))
    return found


class Sample(NamedTuple):
    """One measurement: what was paid, and the seconds that it took."""

    startups: float
    link_bytes: float
    added_bytes: float
    seconds: float


def fit(samples: Iterable[Sample]) -> tuple[Model, float]:
    """The model nearest to what was measured, and its median relative error.

    It is the least squares of the *relative* error, so that small payloads count as much as large
    ones, without negative coefficients. A coefficient is 0 if no sample pays it (the additions of
    a gather), or if the samples cannot tell it from an earlier one.

    Raises:
        ValueError: no samples, or one that took no time.

    >>> model, error = cost.fit([cost.Sample(1, 100, 0, 3.0), cost.Sample(2, 100, 0, 5.0)])
    >>> print(f"{model.alpha:.2f} {model.beta:.2f} {error:.2f}")
    2.00 0.01 0.00
    """
    rows = np.array([tuple(sample) for sample in samples], float)
    if rows.size == 0 or not (rows[:, 3] > 0).all():
        raise ValueError(f"fit needs samples of more than 0 seconds, got {rows.tolist()}")
    relative = rows[:, :3] / rows[:, 3:]
    size = np.linalg.norm(relative, axis=0)
    scaled = relative / np.where(size > 0, size, 1)  # messages and bytes differ by 1e9
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


def _tpu(
    link: float,
    memory: float,
    flops: float,
    axes: int,
    share: float,
    near: float,
    near_mib: int,
    reckoned: tuple[float, float],
    all_reduces: int = 0,
) -> Model:
    """Of rates: bytes a second one way of a link, bytes of memory, operations of a matmul.

    Then: at what share of the memory's rate a matmul reads it; the bytes a second of the memory
    beside the core, and the MiB that it holds; what compilers reckon for a hop (seconds, bytes a
    second); `Model.all_reduces`.
    """
    rates = (1 / link, 3 / memory, 1 / flops)
    reads = (1 / (share * memory), 1 / near, near_mib * 2**20)
    alpha, rate = reckoned
    return Model(1e-6, *rates, axes, _START, *reads, all_reduces, alpha, 1 / rate)


# What is not published is read off programs that libtpu 0.0.52 compiled for 8 devices on
# 2026-11-22: `python -m ringcoll overlap --text` prints them. Cycles are `estimated_cycles`.
# share and near: matmuls of 16 rows by [8192, 3584], or by [3584, 8192], 58.7 MB, take 99.3 us
#   from the main memory on v5e, 35.2 on v5p, 42.5 on v6e, 22.0 on tpu7x; from the memory beside
#   the core 11.5 on v5e and 9.4 on v6e; half as wide, 4.9 on v5p and 4.8 on tpu7x.
# near_mib: compilers hold 112 MiB on v5e (v5e:2x2) and 28, but not 56, on v5p and tpu7x: the
#   core's memory, of 128 or 64 MiB, less the 16 that kernels have by default.
# start: what matmuls of 64 to 256 rows take beside their operations (v6e: 10.6 us at 128 rows,
#   19.4 at 256; of operations, 8.2 and 16.4).
# reckoned: hops of 1 and 2 MiB were started before a matmul or after it by how long slices take to
#   be placed (`costs.matmul.PLACING`): on v5p 1 MiB counts as 3.1 to 3.7 us and 2 MiB as 3.7 to
#   5.1; on v6e as 3.2 to 3.9 and 5.4 to 6.7; on v5e 0.5 MiB as 10.0 to 10.2, 8 MiB as 156 at
#   least. On tpu7x, whose hops were in time, it is taken for the rate of the link.
# all_reduces: the slices in `tests/costs/test_cost.py`.

_START = 3e-6

#: Modelled, not measured: 1 us a message and link (an assumption); a link
#: carries, each way, nine tenths of the rate published for a port (50 or 100 GB/s);
#: additions run at the rate of the memory, matmuls at that of bf16. Published at
#: docs.cloud.google.com/tpu/docs/v5e, v5p, v6e, tpu7x, whose device is half a chip. Price with
#: the `network` of the slice, and `closed`, which of its axes are rings (`ringcoll.costs.slices`).
DEVICES: Mapping[str, Model] = MappingProxyType(
    {
        "v5e": _tpu(45e9, 810e9, 197e12, 2, 0.73, 5.1e12, 112, (0.3e-6, 53e9), 16),
        "v5p": _tpu(90e9, 2760e9, 459e12, 3, 0.60, 6.0e12, 48, (1.5e-6, 620e9), 8),
        "v6e": _tpu(90e9, 1640e9, 918e12, 2, 0.84, 6.2e12, 112, (1.5e-6, 480e9), 16),
        "tpu7x": _tpu(90e9, 3690e9, 1153e12, 3, 0.72, 6.1e12, 48, (1.5e-6, 90e9)),
    }
)


def _switch(alpha: float, port: float, memory: float = float("inf")) -> Model:
    """Of rates: bytes a second one way of a port, bytes of memory."""
    return Model(alpha, 1 / port, 3 / memory, axes=0)


#: Modelled, not measured: ports to a switch. Of GPUs, what is published for NVLink one way
#: (450 of 900 GB/s) and memory: nvidia.com/en-us/data-center/h100, h200. Of networks, what the
#: name says in Gbit/s, by definition; additions are not counted. The alphas are assumptions.
SWITCHES: Mapping[str, Model] = MappingProxyType(
    {
        "h100": _switch(3e-6, 450e9, 3.35e12),
        "h200": _switch(3e-6, 450e9, 4.8e12),
        "infiniband400": _switch(5e-6, 400e9 / 8),
        "ethernet100": _switch(20e-6, 100e9 / 8),
        "ethernet10": _switch(30e-6, 10e9 / 8),
    }
)

#: As `device.device_kind` calls them.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "TPU v5 lite": "v5e",
        "TPU v5e": "v5e",
        "TPU v5": "v5p",
        "TPU v5p": "v5p",
        "TPU v6 lite": "v6e",
        "TPU v6e": "v6e",
        "TPU7x": "tpu7x",
    }
)


def links(ranks: int, model: Model) -> int:
    """The links by which every device of a slice can receive at once.

    Two for each axis of a torus; one for each axis of a grid, because its corners have fewest.
    A slice with as many chips as a torus of `slices.SIDES` is taken for one; a single axis is a
    ring.

    >>> v5e = cost.DEVICES["v5e"]
    >>> cost.links(8, v5e), cost.links(256, v5e)  # a grid, a torus
    (2, 4)
    """
    closed = ranks >= SIDES.get(model.axes, 1) ** model.axes
    return model.axes * (1 + closed)


def scatter_links(ranks: int, model: Model) -> float:
    """`links` for a built-in reduce-scatter: half as many where XLA makes it an all-reduce.

    XLA does that from `Model.all_reduces` ranks on; with two axes, only if they are equally long.

    >>> v5e = cost.DEVICES["v5e"]
    >>> cost.scatter_links(8, v5e), cost.scatter_links(256, v5e)
    (2.0, 2.0)
    """
    is_square = model.axes != 2 or isqrt(ranks) ** 2 == ranks
    twice = is_square and 0 < model.all_reduces <= ranks
    return links(ranks, model) / (1 + twice)
