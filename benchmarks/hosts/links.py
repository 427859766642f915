"""Hosts and their links: the fewest bytes that links must carry, and the bytes of a schedule."""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil

import numpy as np

from benchmarks.collectives.cases import CASES, Case, name_and_options, on_shape
from benchmarks.measuring.model import paid
from benchmarks.measuring.row import Measurement
from ringcoll.algorithms import COLLECTIVES, build
from ringcoll.costs import Price
from ringcoll.costs import wire as costs
from ringcoll.schedules.phases import phases
from ringcoll.schedules.registry import EXCHANGES, LAX

#: "star" is one switch; "ring" is a cable from each host to the next one.
LINKS = ("star", "ring")


@dataclass(frozen=True)
class HostLinks:
    """The hosts and their links.

    Attributes:
        hosts: the number of hosts.
        local: the number of ranks on each host.
        links: how hosts are joined, one of `LINKS`.
        rate, tcp: bytes per second of a link in one direction: the configured rate, and the rate
            that TCP reaches.
        counts: whether the hosts have their own interfaces; then the counters of these are read.
    """

    hosts: int
    local: int
    links: str
    rate: float
    tcp: float
    counts: bool = True

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.hosts * self.local

    def bound(self, case: Case, size: int) -> float:
        """The fewest bytes that the busiest link must carry in one direction.

        Args:
            case: the collective.
            size: bytes, as nccl-tests counts them.
        """
        if case.name == "ppermute":
            return size
        shares = (self.hosts - 1) / self.hosts * size
        if case.name == "pbroadcast":
            shares = size
        elif case.name in ("psum", "pmax", "pmin"):  # first scattered, then gathered
            shares *= 2
        ports = 2 if self.links == "ring" and self.hosts > 2 else 1
        if case.name not in EXCHANGES:
            return shares / ports
        if ports == 1:
            return shares * self.local
        # A block for the host at distance d passes d links.
        return self.hosts**2 // 4 / self.hosts * size * self.local / ports

    def price(self, row: Measurement) -> float | None:
        """Bytes that the busiest link carries by the row's schedule; None for a built-in."""
        name, options = name_and_options(row.resolved)
        if name in ("auto", LAX) or row.collective not in COLLECTIVES:
            return None
        loads = sum(loads for loads, _ in self._moves(row))
        shard = row.size / row.ranks
        if "wire" in options:
            shard = costs.Wire(options["wire"]).nbytes(ceil(shard / np.dtype(row.type).itemsize))
        return float(np.max(loads)) * shard

    def paid(self, row: Measurement) -> Price | None:
        """The price for the fit of a model: as `model.paid`, but with other bytes on the link.

        XLA:CPU runs the moves of a round one after the other. If two ranks exchange messages, gloo
        sends one direction after the other.
        """
        counts = paid(row)
        if counts is None or row.collective not in COLLECTIVES:
            return counts
        busy = [loads.max() * (2 if swaps else 1) for loads, swaps in self._moves(row)]
        return replace(counts, link=Fraction(sum(busy)))

    def _moves(self, row: Measurement) -> Iterator[tuple[np.ndarray, bool]]:
        """For each move: shards on every link, by sender and side; whether two ranks exchange."""
        name, shape = on_shape(name_and_options(row.resolved)[0])
        schedule = build(row.collective, name, shape or (row.ranks,))
        for phase in phases(row.collective, schedule):
            for move in (move for moves in phase.rounds for move in moves):
                step = partial(phase.schedule.step, axis=move.axis, shift=move.shift)
                loads, swaps = np.zeros((self.hosts, 3)), False
                for rank in range(row.ranks):
                    to = step(rank)
                    here, there = rank // self.local, to // self.local
                    swaps |= here != there and step(to) == rank
                    while here != there:
                        side = way(here, there, self.hosts) if self.links == "ring" else 0
                        loads[here, side] += phase.shards * len(move.offsets) / phase.schedule.lanes
                        here = (here + side) % self.hosts if side else there
                yield loads, swaps

    def found(self, row: Measurement, by_link: np.ndarray) -> dict[str, float | None]:
        """A row's bytes over its price, and its time over the bounds.

        Args:
            row: a row with a time.
            by_link: the bytes that a call sent through every interface of every host.
        """
        if row.seconds is None:
            raise ValueError(f"only checked, not timed: {row}")
        case = next(case for case in CASES if case.name == row.collective)
        sent = float(by_link.max()) if self.counts else None
        priced = self.price(row)
        least = self.bound(case, row.size)
        return {
            "sent": sent,
            "of_price": sent / priced if sent and priced else None,
            "of_bound": row.seconds.median * self.rate / least,
            "of_tcp": row.seconds.median * self.tcp / least,
        }


def way(source: int, target: int, hosts: int) -> int:
    """The direction in which a message leaves in a ring of hosts: 1 to the next host, or -1.

    It is the shorter way. To the opposite host, even hosts send in one direction and odd hosts in
    the other. So all cables carry equally much if all pairs of opposite hosts exchange messages.
    """
    ahead = (target - source) % hosts
    if 2 * ahead == hosts:
        return -1 if source % 2 else 1
    return 1 if 2 * ahead < hosts else -1


def bits(text: str) -> float:
    """Read a rate as `tc` takes it, such as 500mbit, in bytes per second; a type for argparse."""
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text)
    if not parsed or not float(parsed[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: give a rate such as 500mbit or 1gbit")
    return float(parsed[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[parsed[2]] / 8


def in_bits(rate: float) -> str:
    """A rate in bytes per second, written in Mbit/s."""
    return f"{rate * 8e-6:.4g} Mbit/s"
