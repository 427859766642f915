"""The seconds of a collective on a named machine, by one of ringcoll's algorithms or the built-in.

A built-in collective is priced as it is run: on GPUs by measured curves (of NCCL), on TPUs by rings
along all axes of the slice, as XLA runs it, and on hosts over gloo by a ring.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil, log2
from typing import Any

from ringcoll.costs import encoding, machines
from ringcoll.costs.counts import HostsPrice, Price, price, price_on_hosts
from ringcoll.costs.curves import Curve, Way, across, rising
from ringcoll.costs.machines import MACHINES, Device
from ringcoll.costs.model import Model, seconds, seconds_on_hosts
from ringcoll.costs.places import Place, place_of
from ringcoll.costs.wire import ENCODED, Wire
from ringcoll.io.strict_json import DTYPES, shown
from ringcoll.io.text import choose
from ringcoll.schedules.registry import (
    ALL_REDUCES,
    COLLECTIVES,
    EXCHANGES,
    TOUR,
    Algorithm,
    in_lax,
)

LAX = "lax"
PERMUTE = "ppermute"
#: If a machine has no curve of a collective, the curves of these are used: they send as much, in
#: the same steps.
_ALIKE: Mapping[str, Sequence[str]] = {
    "all_gather": ("psum_scatter",),
    "psum_scatter": ("all_gather",),
    "all_to_all": ("all_gather", "psum_scatter"),
}
#: How NCCL runs each collective between hosts.
_WAYS: Mapping[str, Way] = {
    "all_gather": Way.RING,
    "psum_scatter": Way.RING,
    "psum": Way.TREE,
    "all_to_all": Way.DIRECT,
    PERMUTE: Way.RING,
}
#: XLA's and nccl-tests' names of dtypes.
_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "double": "float64",
    "float": "float32",
    "half": "float16",
}
#: The bytes of the floats that a wire carries.
_FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4}


def predict(
    collective: str,
    nbytes: float,
    ranks: int | Sequence[int],
    device: str | Device,
    algorithm: Algorithm = LAX,
    dtype: str = "float32",
    topology: str | None = None,
    wire: Wire | str | None = None,
    *,
    offsets: frozenset[int] | None = None,
) -> float:
    """The seconds that a collective takes on a machine.

    The result is modelled. The model uses measurements if there are any: `python -m benchmarks
    measured` compares it with every measurement.

    Args:
        collective: one of `algorithms.COLLECTIVES`, or `ppermute` (to the next rank); `all_reduce`
            and `reduce_scatter` are other names of `psum` and `psum_scatter`. Or `tour`, which
            needs an algorithm.
        nbytes: bytes as nccl-tests counts them: the operand or the result of a rank, whichever is
            larger. That is the full vector: the result of an all_gather, the operand of the others.
        ranks: the number of ranks; or a shape: the axes of a TPU's slice, or (hosts, ranks of a
            host).
        device: a machine, by name or `device_kind`: "v5p", "h100", "NVIDIA H100 80GB HBM3"; or the
            path of a file that `python -m ringcoll machine --fit` wrote, "mine.json".
        algorithm: "lax" for the built-in; or a name, schedule or function, as
            `algorithms.build` takes it.
        dtype: the dtype of the elements; sums are assumed to be kept in it.
        topology: None for the usual one: TPUs on a slice of the ranks' shape, GPUs on the fewest
            hosts (for an algorithm of ringcoll, hosts with equal numbers of ranks). Otherwise words
            that describe it: the chips of a slice ("4x4"; the built-in uses all its axes; if there
            are fewer ranks than chips, they are one axis of it), "line" or "ring", "switch", the
            hosts ("4 hosts"), a network between hosts ("ethernet100").
        wire: what messages hold: "int8", or a `ringcoll.Wire`. Encoding, decoding and adding in
            float32 are included. "lax" is then the built-in exchange and gather of bytes.
        offsets: as for `costs.price`; only for an algorithm without a wire.

    Raises:
        ValueError: the machine, collective, algorithm, ranks, dtype or topology is not known, or
            the algorithm has no schedule for these ranks; or nbytes is not a number of bytes; or
            the collective or dtype has no wire.

    >>> print(f"{costs.predict('all_gather', 2**26, 8, 'h100'):.1e}")
    2.1e-04
    >>> ring = costs.predict("all_gather", 2**26, 8, "h100", algorithm="ring")
    >>> print(f"{ring:.1e}")
    8.9e-04
    """
    is_text = isinstance(collective, str)
    name = in_lax(collective) if is_text and collective != PERMUTE else collective
    if not is_text or name not in (*COLLECTIVES, TOUR, PERMUTE):
        cure = choose(collective, (*COLLECTIVES, TOUR, PERMUTE))
        raise ValueError(f"predict: collective {shown(collective)} is not known; {cure}")
    if not isinstance(algorithm, Hashable):
        words = "is not 'lax', a name, a schedule or a function"
        raise ValueError(f"predict: algorithm {shown(algorithm)} {words}")
    if not _is_size(nbytes):
        raise ValueError(
            f"predict: nbytes {shown(nbytes)} is not a number of bytes; give 0 or more, up to 2^63"
        )
    if name in EXCHANGES:  # slices that are all of one size
        name = "all_to_all"
    if not isinstance(dtype, str) or _DTYPES.get(dtype, dtype) not in DTYPES:
        cure = choose(dtype, DTYPES)
        raise ValueError(f"predict: dtype {shown(dtype)} is not known; {cure}")
    machine = device if isinstance(device, Device) else machines.find(device)
    place = place_of(ranks, machine, topology)
    if place.ranks == 1:
        return 0.0
    if (name == TOUR or offsets is not None) and (algorithm == LAX or wire is not None):
        words = f"{name} by {algorithm!r}, wire={wire!r}"
        raise ValueError(
            f"predict: {words}: name an algorithm, and pass no wire: its schedule is priced"
        )
    if wire is not None:
        codes = wire if isinstance(wire, Wire) else Wire(wire)
        if name not in ENCODED:
            raise ValueError(f"predict: {name} has no wire; there are {', '.join(ENCODED)}")
        itemsize = _FLOATS.get(_DTYPES.get(dtype, dtype), 0)
        if not itemsize:
            raise ValueError(
                f"predict: dtype {dtype!r} with a wire, which carries {', '.join(_FLOATS)}"
            )
        if name in ALL_REDUCES:
            name = "psum"
        return _encoded(name, algorithm, float(nbytes), itemsize, place, codes)
    if algorithm == LAX:
        return _built_in(name, float(nbytes), place)
    if name == PERMUTE:
        raise ValueError(
            f"predict: a ppermute is one message: algorithm {algorithm!r} is not 'lax'"
        )
    return _by_schedule(name, algorithm, float(nbytes), place, offsets)


def _is_size(nbytes: Any) -> bool:
    try:
        return bool(0 <= nbytes <= 2**63)
    except (TypeError, ValueError):  # no number; several
        return False


def _encoded(
    name: str, algorithm: Algorithm, nbytes: float, itemsize: int, place: Place, wire: Wire
) -> float:
    """Seconds with a wire: fewer bytes to send, and the work to encode, decode and add."""
    work = encoding.seconds(name, place.ranks, nbytes, itemsize, wire, place.device.model)
    size = nbytes * encoding.ratio(wire, itemsize)
    if algorithm != LAX:
        no_sums = replace(place.device.model, gamma=0.0)  # `work` includes the additions
        still = replace(place, device=replace(place.device, model=no_sums))
        return work + _by_schedule(name, algorithm, size, still)
    parts = {"psum": ("all_to_all", "all_gather"), "psum_scatter": ("all_to_all",)}
    return work + sum(_built_in(part, size, place) for part in parts.get(name, (name,)))


# -- by a schedule --


def paid(
    collective: str, ranks: int | Sequence[int], device: str | Device, algorithm: Algorithm
) -> Price | HostsPrice:
    """The counts that `predict` turns into seconds: the messages, bytes and additions.

    Args:
        collective, ranks, device, algorithm: as for `predict`, but not the built-in.

    Raises:
        ValueError: as `predict`.

    >>> from ringcoll.costs.prediction import paid
    >>> paid("all_gather", 8, "v5e", "ring").startups
    7
    """
    machine = device if isinstance(device, Device) else machines.find(device)
    return _paid(in_lax(collective), algorithm, place_of(ranks, machine, None))


@lru_cache(maxsize=4096)
def _price(*what: Any, offsets: frozenset[int] | None = None) -> Price:
    return price(*what, offsets=offsets)


def _paid(
    name: str, algorithm: Algorithm, place: Place, offsets: frozenset[int] | None = None
) -> Price | HostsPrice:
    if place.between and 1 < place.hosts < place.ranks:
        return price_on_hosts(name, algorithm, place.shape, place.hosts, offsets=offsets)
    return _price(name, algorithm, place.shape, place.network, place.closed, offsets=offsets)


def _by_schedule(
    name: str,
    algorithm: Algorithm,
    nbytes: float,
    place: Place,
    offsets: frozenset[int] | None = None,
) -> float:
    model, shard = place.device.model, nbytes / place.ranks
    outer = MACHINES[place.between].model if place.hosts > 1 and place.between else None
    cost = _paid(name, algorithm, place, offsets)
    if isinstance(cost, Price):
        return seconds(cost, shard, outer or model)
    assert outer is not None  # `_paid` returns a HostsPrice only if there are several hosts
    # A host has a port for each of its ranks.
    ports = replace(outer, beta=outer.beta * place.hosts / place.ranks)
    return seconds_on_hosts(cost, shard, model, ports)


# -- the built-in --


def _built_in(name: str, nbytes: float, place: Place) -> float:
    if place.device.model.axes:
        return _on_tpus(name, nbytes, place.by_sides())
    if place.device.ranks_a_host == 1:  # the machine is a network between hosts of one rank
        network = MACHINES[place.between] if place.between else place.device
        return _in_a_ring(name, nbytes, place.ranks, network.model)
    hosts = place.uneven or place.hosts
    measured = _measured(name, nbytes, place.ranks, hosts > 1, place.device)
    if measured is not None:
        return measured
    if hosts == 1:
        return _in_a_ring(name, nbytes, place.ranks, place.device.model)
    return _between_hosts(name, nbytes, hosts, place)


def _on_tpus(name: str, nbytes: float, place: Place) -> float:
    """Seconds on TPUs: by both directions of a ring, or of all rings of a torus.

    If XLA turns a reduce-scatter into an all-reduce and a slice, it is priced as an all-reduce.
    """
    device, n = place.device, place.ranks
    model = replace(device.model, beta=device.model.beta / device.built_in_share)
    if name == PERMUTE:
        return model.alpha + model.hop + device.model.beta * nbytes
    if name == "psum_scatter" and 0 < model.all_reduces <= n and len(set(place.shape)) == 1:
        name = "psum"
    if name == "pbroadcast":
        name = "psum"
    # Messages start together; each link carries its share. (A matmul that exchanges rows does not
    # know the slice: see `model.all_to_all_seconds`.)
    if name == "all_to_all":
        paid = _price(name, "pairwise", place.shape, place.network, place.closed)
        paid = replace(paid, startups=1, hops=max(place.shape) // 2, uneven=())
    elif sum(size > 1 for size in place.shape) > 1:
        paid = _price(name, "torus", place.shape, place.network, place.closed)
    elif place.closed == (True,):
        paid = _price(name, "bidirectional_ring", (n,), (n,))
    else:  # on a line, shards go outward: each direction of a link carries as much as a ring's
        paid = _price(name, "ring", (n,), (n,))
    return seconds(paid, nbytes / n, model)


def _in_a_ring(name: str, nbytes: float, ranks: int, model: Model) -> float:
    if name == PERMUTE:
        return _by_wire(nbytes, model)
    schedule = "pairwise" if name == "all_to_all" else "ring"
    return seconds(_price(name, schedule, (ranks,)), nbytes / ranks, model)


def _by_wire(nbytes: float, model: Model) -> float:
    return model.wire(nbytes) if model.wire else model.alpha + model.beta * nbytes


def _measured(
    name: str, nbytes: float, ranks: int, several_hosts: bool, device: Device
) -> float | None:
    """Seconds by the curves of a machine, or of its `like`; None if neither has curves."""
    if name in ALL_REDUCES:
        name = "psum"
    way, local = (_WAYS[name], device.ranks_a_host) if several_hosts else (Way.SWITCH, 1)
    for one in (name, *_ALIKE.get(name, ())):
        own = device.curves.get((one, several_hosts), {})
        like = _of_its_like(one, several_hosts, device)
        if name == PERMUTE and (own or like):  # the number of ranks does not matter
            known = own or like
            return known[min(known, key=lambda n: abs(n - ranks))](nbytes)
        if len(own) == 1 and like:
            ((measured, curve),) = own.items()
            return _in_proportion(curve, across(like, ranks), across(like, measured))(nbytes)
        if own or like:
            return across(own or like, ranks, way, local)(nbytes)
    return None


def _in_proportion(curve: Curve, wanted: Curve, known: Curve) -> Curve:
    """The curve times wanted / known."""
    sizes = (size for one in (curve, wanted, known) for size, _ in one.knots)
    return rising(sizes, lambda size: curve(size) * wanted(size) / known(size))


def _of_its_like(name: str, several_hosts: bool, device: Device) -> Mapping[int, Curve]:
    """The curves of the machine's `like`, changed to the rate of the machine's own links.

    If the switch does not add, ranks have to send the sums too: an all-reduce fills the links
    twice.
    """
    if not device.like or several_hosts:  # other hosts have another network
        return {}
    like, beta = MACHINES[device.like], device.model.beta
    twice = name == "psum" and like.switch_adds and not device.switch_adds
    return {
        n: _on_links(curve, beta / like.model.beta, 2 * (n - 1) / n * beta if twice else 0.0)
        for n, curve in like.curves.get((name, False), {}).items()
    }


def _on_links(curve: Curve, slower: float, a_byte: float) -> Curve:
    """A curve on links that are `slower` times slower; a byte takes at least `a_byte` seconds."""
    start = curve.knots[0][1]
    return rising(
        (size for size, _ in curve.knots),
        lambda size: start + max((curve(size) - start) * slower, size * a_byte),
    )


def _between_hosts(name: str, nbytes: float, hosts: int, place: Place) -> float:
    """Seconds on several hosts of GPUs without measurements, from one host and the network.

    Each rank has a port to other hosts; messages within a host travel at the same time.
    Each rank starts a message for every other rank of its ring. An all-reduce goes up and down a
    tree of hosts instead, as NCCL does for small vectors.
    """
    device, n = place.device, place.ranks
    outer, local = MACHINES[place.between].model, n / hosts
    within = _measured(name, nbytes, ceil(local), False, device) if local > 1 else None
    inner = within or device.model.alpha
    if name == PERMUTE:
        return max(inner, outer.alpha + outer.beta * nbytes)
    ring, a_byte = (n - 1) * outer.alpha, nbytes * outer.beta
    if name == "all_to_all":
        return max(inner, a_byte * (hosts - 1) / hosts) + ring
    if name in ("all_gather", "psum_scatter"):
        return max(inner, a_byte * (n - 1) / n / local) + ring
    # Two hosts exchange their sums. In a tree of more hosts, an inner host sends two sums.
    sums = 1 if hosts == 2 else 2
    return max(inner, a_byte * sums / local) + 2 * log2(hosts) * outer.alpha
