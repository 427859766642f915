"""Where the ranks of a collective are: on a slice of TPU chips, or on hosts of GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from numbers import Integral
from operator import index
from typing import Any

from ringcoll.costs.counts import Price, price
from ringcoll.costs.embedding import embed
from ringcoll.costs.machines import Device, find
from ringcoll.costs.model import seconds
from ringcoll.costs.routes import Places
from ringcoll.costs.slices import closed as closed_sides
from ringcoll.costs.slices import rings
from ringcoll.io.strict_json import shown
from ringcoll.schedules.registry import ScheduleLike

#: More would take minutes and gigabytes: a schedule is built and proved move by move.
MOST_RANKS = 2**16
#: The name of a network that joins all ranks, in place of a slice.
SWITCH = "switch"
#: A function from the bytes of the full vector to seconds.
Seconds = Callable[[float], float]
#: `price`, which remembers what it has priced.
counted = lru_cache(maxsize=4096)(price)


@dataclass(frozen=True)
class Place:
    """The ranks of a collective, and where they are.

    Attributes:
        device: the machine.
        shape: the sizes of the axes of the ranks, major first.
        hosts: the number of hosts.
        network: the shape of the torus or grid; None is a switch.
        closed: which axes of the network are rings; None: all.
        places: the place of each rank on the network, for each group of ranks that communicates at
            the same time; None: the ranks fill the network in order.
        built_in: the place for a built-in collective, if it is a different one: if the ranks of one
            axis fill a slice, the shape is that of the slice, because it uses all its links.
    """

    device: Device
    shape: tuple[int, ...]
    hosts: int = 1
    network: tuple[int, ...] | None = None
    closed: tuple[bool, ...] | None = None
    places: Places | None = None
    built_in: "Place | None" = None

    @property
    def ranks(self) -> int:
        return prod(self.shape)

    @property
    def where(self) -> tuple[Any, ...]:
        """The last arguments of `costs.price`."""
        return self.shape, self.network, self.closed, self.places

    @property
    def name(self) -> str:
        """The shape in words: 8, or 4x2."""
        return "x".join(map(str, self.shape))

    @property
    def words(self) -> str:
        """Where the ranks are, in words."""
        if self.network is None:
            hosts = f"{self.hosts} hosts of {self.ranks // self.hosts}"
            return hosts if self.hosts > 1 else "one switch"
        if self.places:
            chips = "x".join(map(str, self.network))
            return f"the last axis of a mesh on {chips} chips, as ringcoll.mesh orders it"
        if self.is_torus:
            return "one ring of chips along each axis"
        axes = zip(self.network, self.closed or (), strict=False)
        lines = dict.fromkeys(str(n) for n, is_ring in axes if n > 1 and not is_ring)
        return f"chips along each axis; an axis of {' or '.join(lines)} is a line, not a ring"

    @property
    def is_torus(self) -> bool:
        """Whether no axis of the network is a line; True for a switch."""
        axes = zip(self.network or (), self.closed or (), strict=False)
        return all(is_ring for n, is_ring in axes if n > 1)

    def price(self, collective: str, algorithm: ScheduleLike) -> Price:
        """The rounds, messages and bytes of a collective here.

        Args:
            collective, algorithm: as for `costs.price`.

        Raises:
            ScheduleError: there is no such schedule, or it cannot be routed.
        """
        return counted(collective, algorithm, *self.where)

    def seconds(self, paid: Price) -> Seconds:
        """The time of a price here, as a function of bytes; infinite if it was not measured."""
        if self.hosts > 1 and self.device.ranks_a_host != 1:  # nobody measured a message there
            return lambda size: inf
        return lambda size: seconds(paid, size / self.ranks, self.device.model)


def place_of(
    ranks: int | Sequence[int],
    device: str | Device,
    *,
    hosts: int | None = None,
    network: str | None = None,
) -> Place:
    """Where the ranks of a collective are on a machine.

    Args:
        ranks: the number of ranks; or a shape: the axes of a TPU's slice, or (hosts, ranks of a
            host).
        device: a machine, by name or `device_kind`: "v5p", "h100", "NVIDIA H100 80GB HBM3"; or the
            path of a file that `python -m ringcoll machine --fit` wrote, "mine.json".
        hosts: the number of hosts of GPUs; None: the fewest with equal numbers of ranks, or the
            first size of a shape.
        network: the chips of a TPU's slice, "4x4": the built-in uses all its axes; if there are
            fewer ranks than chips, they are the last axis of a `ringcoll.mesh` (None: a slice of
            the ranks' shape). Or "switch".

    Raises:
        ValueError: the machine or the network is not known, or the ranks do not fit it.

    >>> costs.place_of(16, "h100").hosts
    2
    """
    try:
        shape = tuple(map(index, ranks)) if isinstance(ranks, Sequence) else (index(ranks),)
    except TypeError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ValueError(f"ranks {ranks!r} is not a number of ranks, nor a shape of them")
    check_ranks(shape)
    machine = device if isinstance(device, Device) else find(device)
    if machine.model.axes:
        if hosts is not None:
            raise ValueError(f"hosts={hosts!r}: {machine.name} is on a slice; leave it out")
        return _on_a_slice(shape, machine, network)
    if hosts is not None and (not isinstance(hosts, Integral) or hosts < 1):
        raise ValueError(f"hosts={hosts!r} is not a number of hosts; give 1 or more")
    if network is not None:
        raise ValueError(f"network={network!r}: {machine.name} is on no slice; leave it out")
    return _on_hosts(shape, machine, hosts)


def check_ranks(shape: Sequence[int]) -> None:
    """Refuse more than `MOST_RANKS` ranks."""
    if prod(shape) > MOST_RANKS:
        raise ValueError(
            f"ranks {shown(shape)}: a schedule of more than {MOST_RANKS} ranks takes "
            "minutes and gigabytes to build; every rank does the same, so give fewer"
        )


def _on_hosts(shape: tuple[int, ...], device: Device, hosts: int | None) -> Place:
    if hosts is None:
        hosts = device.hosts(shape[0]) if len(shape) == 1 else shape[0]
    if prod(shape) % hosts:
        raise ValueError(f"{prod(shape)} ranks do not divide among {hosts} hosts")
    return Place(device, shape, hosts)


def _on_a_slice(shape: tuple[int, ...], device: Device, network: str | None) -> Place:
    axes = device.model.axes
    if network == SWITCH:
        return Place(device, shape)
    sizes = sizes_in(network) if network else ()
    if network and not sizes:
        raise ValueError(f"network {network!r} is no slice ('4x4'), nor {SWITCH!r}")
    if max(sum(n > 1 for n in shape), sum(n > 1 for n in sizes)) > axes:
        raise ValueError(f"{device.name} has links along {axes} axes, not {sizes or shape}")
    if sizes and prod(sizes) < prod(shape):
        raise ValueError(
            f"{prod(shape)} ranks do not fit on a slice of {prod(sizes)} ({network!r})"
        )
    laid, is_ring, fills = shape, rings(axes, shape), prod(sizes) == prod(shape)
    if fills and len(shape) > 1:
        laid, is_ring = sizes, closed_sides(axes, sizes)
    elif fills and sum(n > 1 for n in sizes) == 1:  # there is no box to go round
        is_ring = (any(closed_sides(axes, sizes)),)
    elif prod(sizes) > prod(shape) and len(shape) > 1:  # a part of its sides
        sides = dict(zip(sizes, closed_sides(axes, sizes), strict=True))
        is_ring = tuple(sides.get(n, False) for n in shape)
    elif prod(sizes) > prod(shape) and prod(sizes) % prod(shape) == 0:
        # The last axis of a mesh, with all others beside it.
        closes = closed_sides(axes, sizes)
        placed = embed(sizes, closes, (prod(sizes) // prod(shape), *shape))
        assert placed is not None  # the chips of a slice form a box, which can be cut
        places = tuple(tuple(map(tuple, group)) for group in placed.tolist())
        return Place(device, shape, network=sizes, closed=closes, places=places)
    built_in = None
    if fills and len(shape) == 1:
        built_in = Place(device, sizes, network=sizes, closed=closed_sides(axes, sizes))
    return Place(device, shape, network=laid, closed=is_ring, built_in=built_in)


def sizes_in(text: str) -> tuple[int, ...]:
    """The sizes of axes in "8", "4x2" or "4X2", major first; () if they are not sizes above 0."""
    sizes = text.lower().split("x") if isinstance(text, str) else []
    return tuple(map(int, sizes)) if all(n.isdecimal() and int(n) for n in sizes) else ()
