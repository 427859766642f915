"""Where the ranks of a collective are: on a slice of TPU chips, or on hosts of GPUs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import index

from ringcoll.costs.machines import MACHINES, Device
from ringcoll.costs.slices import closed, rings
from ringcoll.io.strict_json import shown

#: More would take minutes and gigabytes: a schedule is built and proved move by move.
MOST_RANKS = 2**16


@dataclass(frozen=True)
class Place:
    """The ranks of a collective, and where they are."""

    device: Device
    shape: tuple[int, ...]
    hosts: int = 1
    network: tuple[int, ...] | None = None
    closed: tuple[bool, ...] | None = None
    between: str = ""
    #: The number of hosts for a built-in collective, where hosts may have different numbers of
    #: ranks; 0: as `hosts`.
    uneven: int = 0
    #: The sides of a slice, if the ranks of one axis fill it: the built-in uses all its links.
    sides: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return prod(self.shape)

    def by_sides(self) -> "Place":
        """The same ranks, with the sides of the slice that they fill as axes."""
        if not self.sides:
            return self
        is_ring = closed(self.device.model.axes, self.sides)
        return replace(self, shape=self.sides, network=self.sides, closed=is_ring, sides=())


def place_of(ranks: int | Sequence[int], device: Device, topology: str | None) -> Place:
    """Where the ranks of a collective are on a machine; see the arguments of `predict`.

    Raises:
        ValueError: the topology is not known, or the ranks do not fit it.
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
    if topology is not None and not isinstance(topology, str):
        raise ValueError(_unknown(topology))
    words = (topology or "").lower()
    if device.model.axes:
        return _on_a_slice(shape, device, topology, words)
    sizes, switch = _sizes(words), re.search(r"switch|nvl", words)
    hosts = shape[0] if len(shape) > 1 else device.hosts(shape[0])
    uneven = -(-shape[0] // (device.ranks_a_host or shape[0])) if len(shape) == 1 else 0
    if found := re.search(r"(\d+)\s*(?:nodes?|hosts?)\b", words):
        hosts, uneven = int(found[1]), 0
    elif sizes:
        hosts, uneven = sizes[0], 0
    elif switch:
        hosts, uneven = 1, 0
    between = _network_in(words, device.name)
    if topology is not None and not (found or sizes or between or switch):
        raise ValueError(_unknown(topology))
    if hosts < 1 or prod(shape) % hosts:
        raise ValueError(f"predict: {prod(shape)} ranks do not divide among {hosts} hosts")
    between = between or device.between
    is_needed = hosts > 1 and device.ranks_a_host != 1
    if (is_needed or between) and between not in MACHINES:
        raise ValueError(
            f"predict: {device.name} names no network between hosts ({between!r}); give a topology "
            f"with one of {', '.join(_networks())}, or put it into the file as `between`"
        )
    return Place(device, shape, hosts, between=between, uneven=uneven)


def _on_a_slice(shape: tuple[int, ...], device: Device, topology: str | None, words: str) -> Place:
    axes, sizes = device.model.axes, _sizes(words)
    line = re.search(r"\bline|no wrap|mesh", words)
    ring = re.search(r"\bring|torus|wraps", words)
    if topology is not None and not (sizes or line or ring):
        raise ValueError(_unknown(topology))
    if 0 in sizes:
        raise ValueError(_unknown(topology))
    if max(sum(n > 1 for n in shape), sum(n > 1 for n in sizes)) > axes:
        raise ValueError(f"predict: {device.name} has links along {axes} axes, not {shape}")
    if sizes and prod(sizes) < prod(shape):
        raise ValueError(
            f"predict: {prod(shape)} ranks do not fit on a slice of {prod(sizes)} ({topology!r})"
        )
    network = shape
    is_ring = rings(axes, shape)
    if sizes and prod(sizes) == prod(shape) and len(shape) > 1:
        network, is_ring = sizes, closed(axes, sizes)
    elif prod(sizes) > prod(shape) and (shape[0] in sizes or len(shape) > 1):  # a part of it
        sides = dict(zip(sizes, closed(axes, sizes), strict=True))
        is_ring = tuple(sides.get(n, False) for n in shape)
    if line or ring:
        is_ring = (bool(ring and not line),) * len(network)
    fills = len(shape) == 1 and prod(sizes) == shape[0] and not (line or ring)
    return Place(
        device, shape, network=network, closed=is_ring, sides=sizes if sizes and fills else ()
    )


def _sizes(words: str) -> tuple[int, ...]:
    """The sizes that a word such as "4x4" in a text gives; none if there is no such word."""
    found = re.search(r"\b\d+(?:x\d+)+\b", words)
    return tuple(map(int, found[0].split("x"))) if found else ()


def _networks() -> list[str]:
    return [name for name, one in MACHINES.items() if one.ranks_a_host == 1]


def _network_in(words: str, device: str) -> str:
    """The network that a text names; "" if none. If several names match, the longest one counts.

    A network that was measured with the device is preferred: "infiniband" for gloo means
    gloo_infiniband.
    """
    named = {word.lower(): n for n in _networks() for word in (n, *MACHINES[n].also)}
    own = [n for n in named if n.startswith(f"{device}_")]
    named |= {name.removeprefix(f"{device}_"): name for name in own}
    found = [word for word in named if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", words)]
    return named[max(found, key=len)] if found else ""


def _unknown(topology: object) -> str:
    return (
        f"predict: topology {topology!r} says no slice ('4x4', 'line', 'ring'), no hosts "
        f"('4 hosts', 'switch') and no network between them ({', '.join(_networks())})"
    )
