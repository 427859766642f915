"""Where the ranks of a collective are: on a slice of TPU chips, or on hosts of GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from operator import index

from ringcoll.costs.counts import HostsPrice, Price, price, price_on_hosts
from ringcoll.costs.machines import MACHINES, Device, find
from ringcoll.costs.model import seconds, seconds_on_hosts
from ringcoll.costs.slices import closed as closed_sides
from ringcoll.costs.slices import rings
from ringcoll.io.strict_json import shown
from ringcoll.schedules.registry import Algorithm

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
        between: the network between hosts; None if there is none.
        ports: the number of ports of a host to that network; 0: one for each of its ranks.
        uneven: the number of hosts for a built-in collective, where hosts may have different
            numbers of ranks; 0: as `hosts`.
        sides: the sides of a slice, if the ranks of one axis fill it: the built-in uses all its
            links.
    """

    device: Device
    shape: tuple[int, ...]
    hosts: int = 1
    network: tuple[int, ...] | None = None
    closed: tuple[bool, ...] | None = None
    between: Device | None = None
    ports: int = 0
    uneven: int = 0
    sides: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return prod(self.shape)

    @property
    def name(self) -> str:
        """The shape in words: 8, or 4x2."""
        return "x".join(map(str, self.shape))

    @property
    def is_torus(self) -> bool:
        """Whether no axis of the network is a line; True for a switch."""
        axes = zip(self.network or (), self.closed or (), strict=False)
        return all(is_ring for n, is_ring in axes if n > 1)

    def by_sides(self) -> "Place":
        """The same ranks, with the sides of the slice that they fill as axes."""
        if not self.sides:
            return self
        is_ring = closed_sides(self.device.model.axes, self.sides)
        return replace(self, shape=self.sides, network=self.sides, closed=is_ring, sides=())

    def price(
        self, collective: str, algorithm: Algorithm, offsets: frozenset[int] | None = None
    ) -> Price | HostsPrice:
        """The rounds, messages and bytes of a collective here.

        Args:
            collective, algorithm, offsets: as for `costs.price`.

        Raises:
            ScheduleError: there is no such schedule, or it cannot be routed.
        """
        if self.between and 1 < self.hosts < self.ranks:
            return price_on_hosts(collective, algorithm, self.shape, self.hosts, offsets=offsets)
        where = self.shape, self.network, self.closed
        return counted(collective, algorithm, *where, offsets=offsets)

    def seconds(self, paid: Price | HostsPrice) -> Seconds:
        """The time of a price here, as a function of bytes."""
        inner, n = self.device.model, self.ranks
        outer = self.between.model if self.between and self.hosts > 1 else None
        if isinstance(paid, Price):
            return lambda size: seconds(paid, size / n, outer or inner)
        assert outer is not None  # `price` returns a HostsPrice only if there are several hosts
        ports = replace(outer, beta=outer.beta / (self.ports or n // self.hosts))
        return lambda size: seconds_on_hosts(paid, size / n, inner, ports)


def place_of(
    ranks: int | Sequence[int],
    device: Device,
    hosts: int | None = None,
    network: str | None = None,
    closed: bool | None = None,
) -> Place:
    """Where the ranks of a collective are on a machine; see the arguments of `predict`.

    Raises:
        ValueError: the network is not known, or the ranks do not fit it.
    """
    try:
        shape = tuple(map(index, ranks)) if isinstance(ranks, Sequence) else (index(ranks),)
    except TypeError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ValueError(f"predict: ranks {ranks!r} is not a number of ranks, nor a shape of them")
    if prod(shape) > MOST_RANKS:
        raise ValueError(
            f"predict: ranks {shown(ranks)}: a schedule of more than {MOST_RANKS} ranks takes "
            "minutes and gigabytes to build; give fewer"
        )
    if device.model.axes:
        if hosts is not None:
            raise ValueError(f"predict: hosts={hosts!r}: {device.name} is on a slice; leave it out")
        return _on_a_slice(shape, device, network, closed)
    if closed is not None:
        raise ValueError(f"predict: closed={closed!r}: {device.name} has no axes; leave it out")
    return _on_hosts(shape, device, hosts, network)


def _on_hosts(
    shape: tuple[int, ...], device: Device, hosts: int | None, network: str | None
) -> Place:
    uneven = 0
    if hosts is None and len(shape) == 1:
        hosts, uneven = device.hosts(shape[0]), -(-shape[0] // (device.ranks_a_host or shape[0]))
    elif hosts is None:
        hosts = shape[0]
    if hosts < 1 or prod(shape) % hosts:
        raise ValueError(f"predict: {prod(shape)} ranks do not divide among {hosts} hosts")
    between = _network_of(network) if network else MACHINES.get(device.between)
    is_needed = device.between or (hosts > 1 and device.ranks_a_host != 1)
    if is_needed and not between:
        raise ValueError(
            f"predict: {device.name} names no network between hosts ({device.between!r}); give a "
            f"network, one of {', '.join(_networks())}, or put it into the file as `between`"
        )
    return Place(device, shape, hosts, between=between, uneven=uneven)


def _on_a_slice(
    shape: tuple[int, ...], device: Device, network: str | None, closed: bool | None
) -> Place:
    axes = device.model.axes
    if network == SWITCH:
        return Place(device, shape)
    sizes = _sizes(network) if network else ()
    if max(sum(n > 1 for n in shape), sum(n > 1 for n in sizes)) > axes:
        raise ValueError(
            f"predict: {device.name} has links along {axes} axes, not {sizes or shape}"
        )
    if sizes and prod(sizes) < prod(shape):
        raise ValueError(
            f"predict: {prod(shape)} ranks do not fit on a slice of {prod(sizes)} ({network!r})"
        )
    laid, is_ring, fills = shape, rings(axes, shape), prod(sizes) == prod(shape)
    if fills and len(shape) > 1:
        laid, is_ring = sizes, closed_sides(axes, sizes)
    elif fills and sum(n > 1 for n in sizes) == 1:  # there is no box to go round
        is_ring = (any(closed_sides(axes, sizes)),)
    elif prod(sizes) > prod(shape) and (shape[0] in sizes or len(shape) > 1):  # a part of it
        sides = dict(zip(sizes, closed_sides(axes, sizes), strict=True))
        is_ring = tuple(sides.get(n, False) for n in shape)
    if closed is not None:
        is_ring = (closed,) * len(laid)
    goes_round = fills and len(shape) == 1 and closed is None
    return Place(device, shape, network=laid, closed=is_ring, sides=sizes if goes_round else ())


def _sizes(network: str) -> tuple[int, ...]:
    """The chips of a slice, from "4x4".

    Raises:
        ValueError: it is not a slice.
    """
    sizes = network.split("x") if isinstance(network, str) else []
    if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"predict: network {network!r} is no slice ('4x4'), nor {SWITCH!r}")
    return tuple(map(int, sizes))


def _networks() -> list[str]:
    return [name for name, one in MACHINES.items() if one.ranks_a_host == 1]


def _network_of(name: str) -> Device:
    """The network between hosts of a name.

    Raises:
        ValueError: there is no such network.
    """
    try:
        found = find(name)
    except ValueError:
        found = None
    if not found or found.ranks_a_host != 1:
        raise ValueError(
            f"predict: network {name!r} is not known between hosts; give one of "
            f"{', '.join(_networks())}"
        )
    return found
