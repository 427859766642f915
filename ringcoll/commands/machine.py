"""The machines that a command prices: ranks, the network between them, its constants."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from ringcoll.commands import arguments
from ringcoll.costs import slices
from ringcoll.costs.counts import HostsPrice, Price, price, price_on_hosts
from ringcoll.costs.machines import DEVICES, SWITCHES
from ringcoll.costs.model import Model, seconds, seconds_on_hosts
from ringcoll.io.text import bytes_in_words, seconds_in_words
from ringcoll.schedules.registry import Algorithm

MODELS = {**DEVICES, **SWITCHES}
_CONSTANTS = {
    "alpha": "seconds per message",
    "hop": "seconds per link that a message passes",
    "beta": "seconds per byte sent",
    "gamma": "seconds per byte added",
}
OUTER = "ethernet100"
_SOME_SIZES = (2**10, 2**20, 2**26, 2**30)
Shape = tuple[int, ...]
#: A function from the bytes of the full vector to seconds.
Seconds = Callable[[float], float]


@dataclass(frozen=True)
class Machine:
    """Ranks of a shape on a torus or a switch; or, with an outer network, on hosts.

    Attributes:
        shape: the sizes of the axes of the ranks, major first.
        model: the constants of the links between ranks.
        network: the shape of the torus or grid; None is a switch.
        closed: which axes of the network are rings; None: all.
        outer: the constants of a host's port; None: there are no hosts.
        local: the number of ranks of a host, which share its port.
    """

    shape: Shape
    model: Model
    network: Shape | None = None
    outer: Model | None = None
    local: int = 1
    closed: tuple[bool, ...] | None = None

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

    def price(self, collective: str, algorithm: Algorithm) -> Price | HostsPrice:
        """The price of a collective on this machine: its rounds, messages and bytes.

        Raises:
            ScheduleError: there is no such schedule, or it cannot be routed.
        """
        if self.outer is None:
            return price(collective, algorithm, self.shape, self.network, self.closed)
        return price_on_hosts(collective, algorithm, self.shape, self.ranks // self.local)

    def seconds(self, paid: Price | HostsPrice) -> Seconds:
        """The time of a price on this machine, as a function of bytes."""
        inner, outer = self.model, self.outer
        if isinstance(paid, Price):
            return lambda size: seconds(paid, size / self.ranks, inner)
        assert outer is not None  # `price` returns a HostsPrice only if there are hosts
        return lambda size: seconds_on_hosts(paid, size / self.ranks, inner, outer)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say which machines are priced."""
    add = parser.add_argument
    add(
        "-n",
        "--ranks",
        type=shapes,
        default="2..256",
        metavar="LIST",
        help="the ranks, one row for each: 2,3,5; 2..256 (the powers of two from 2 to 256); 16x16 "
        "(two axes); 2..64x8 (the first axis 2 to 64, the second 8) (default: %(default)s)",
    )
    known = ", ".join(MODELS)
    add("--device", choices=MODELS, default="v5e", metavar="NAME", help=f"{known} (v5e)")
    add(
        "--network",
        type=network,
        metavar="NETWORK",
        help="switch; slice (it has the shape of --ranks; its axes are rings or lines, as on a "
        "TPU); torus (the same, with rings only); or the shape of another slice such as 4x4, whose "
        "chips the ranks take in order (default: slice for a TPU, switch for others)",
    )
    for name, what in _CONSTANTS.items():
        add(
            f"--{name}",
            type=arguments.seconds,
            metavar="SECONDS",
            help=f"{what}, in place of the device's",
        )
    add(
        "--local",
        type=arguments.count,
        metavar="N",
        help="put the ranks on hosts, N to a host, in order. A switch joins the ranks of a host; "
        "they share its port to the --outer network",
    )
    add("--outer", choices=MODELS, metavar="NAME", help="the network between hosts (ethernet100)")
    for name in ("alpha", "beta"):
        add(
            f"--outer-{name}",
            type=arguments.seconds,
            metavar="SECONDS",
            help=f"{_CONSTANTS[name]}, in place of the outer network's",
        )


def machines(args: argparse.Namespace) -> list[Machine]:
    """The machines of the arguments, one for each of --ranks.

    Raises:
        ValueError: they do not fit the network or the hosts.
    """
    model = _changed(MODELS[args.device], args, "")
    if not args.local and (args.outer, args.outer_alpha, args.outer_beta) != (None, None, None):
        raise ValueError(
            "--outer is the network between hosts: give --local, the ranks of a host, too"
        )
    found = []
    for shape in args.ranks:
        wanted = args.network or ("slice" if model.axes and not args.local else "switch")
        network = {"slice": shape, "torus": shape, "switch": None}.get(wanted, wanted)
        closed = None
        if model.axes and network and wanted != "torus":
            laid = slices.rings if wanted == "slice" else slices.closed
            closed = laid(model.axes, network)
        machine = Machine(shape, model, network, closed=closed)
        if args.local:
            if network or machine.ranks % args.local:
                why = "hosts are a switch each" if network else "they do not divide"
                raise ValueError(f"--local {args.local} of {machine.name} ranks: {why}")
            outer = _outer(args)
            machine = replace(machine, outer=outer, local=args.local)
        elif network and prod(network) != machine.ranks:
            name = "x".join(map(str, network))
            raise ValueError(f"--network {name} does not have {machine.name} ranks")
        elif 0 < model.axes < sum(n > 1 for n in network or ()):
            name = "x".join(map(str, network or ()))
            raise ValueError(
                f"a torus of {name}: {args.device} has links along {model.axes} axes; give "
                "another --device, or in --network the torus that the ranks are on"
            )
        found.append(machine)
    return found


def described(args: argparse.Namespace) -> Iterator[str]:
    """The constants of the device and of the network between hosts, in lines."""
    model = _changed(MODELS[args.device], args, "")
    yield f"modelled on {args.device}: {_constants(model)}"
    if args.local:
        name = args.outer or OUTER
        yield f"hosts of {args.local} ranks that share a port, {name}: {_constants(_outer(args))}"


def lines(machines: Sequence[Machine]) -> Iterator[str]:
    """A note that names the networks in which an axis is a line; nothing if there are none."""
    networks = [machine.network or () for machine in machines if not machine.is_torus]
    if networks:
        names = dict.fromkeys("x".join(map(str, network)) for network in networks)
        yield (
            f"an axis of {', '.join(names)} is a line, not a ring, on a slice of chips "
            "(--network torus closes every axis)"
        )


def _constants(model: Model) -> str:
    if wire := model.wire:
        some = (f"{seconds_in_words(wire(b))} of {bytes_in_words(b)}" for b in _SOME_SIZES)
        return f"a message, measured: {', '.join(some)}"
    words = f"alpha {seconds_in_words(model.alpha)}"
    if model.hop:
        words += f", hop {seconds_in_words(model.hop)}"
    for name, second in (("beta", model.beta), ("gamma", model.gamma)):
        words += f", {name} 1/({1e-9 / second:.4g} GB/s)" if second else f", {name} 0"
    return words


def _outer(args: argparse.Namespace) -> Model:
    return _changed(MODELS[args.outer or OUTER], args, "outer_")


def _changed(model: Model, args: argparse.Namespace, prefix: str) -> Model:
    """The model with the constants that the options with this prefix give."""
    values = {name: getattr(args, prefix + name, None) for name in _CONSTANTS}
    changes = {name: value for name, value in values.items() if value is not None}
    if "alpha" in changes or "beta" in changes:  # they replace the measured times of messages
        changes["wire"] = None
    return replace(model, **changes)


def shapes(text: str) -> list[Shape]:
    """Read a list of shapes, such as "2..8,3,4x4". A range means powers of two, also for an axis.

    Raises:
        argparse.ArgumentTypeError: it is not such a list, or a shape has too many ranks.
    """
    listed = [shape for item in text.split(",") for shape in product(*map(_range, item.split("x")))]
    for shape in listed:
        arguments.check_ranks(shape)
    return listed


def network(text: str) -> str | Shape:
    """Read a network: "switch", "slice", "torus", or the shape of a slice.

    Raises:
        argparse.ArgumentTypeError: it is neither a name nor a shape.
    """
    if text in ("switch", "slice", "torus"):
        return text
    return arguments.shape(text)


def _range(text: str) -> list[int]:
    """The numbers of "8", or the powers of two of "2..8"."""
    first, dots, last = text.partition("..")
    try:
        low, high = int(first), int(last) if dots else int(first)
    except ValueError:
        low, high = 1, 0
    numbers = [2**k for k in range(high.bit_length()) if low <= 2**k <= high] if dots else [low]
    if low < 1 or high < low or not numbers:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of ranks; write 8, 2..256 or 4x4"
        )
    return numbers
