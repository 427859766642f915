"""The seconds of a collective on a named machine, by one of ringcoll's algorithms or the built-in.

A built-in collective is priced as it is run: on TPUs by rings along all axes of the slice, as XLA
runs it, and on hosts over gloo by a ring. On GPUs it is not modelled: its price is interpolated
between sizes that were measured with as many ranks on as many hosts.
"""

from collections.abc import Hashable
from dataclasses import replace
from math import inf, isinf
from typing import Any

from ringcoll.costs.model import Model, seconds
from ringcoll.costs.places import Place, Seconds, counted
from ringcoll.costs.wire import ENCODED, FLOATS, Wire
from ringcoll.io.strict_json import shown
from ringcoll.io.text import choose
from ringcoll.schedules.registry import (
    ALL_REDUCES,
    COLLECTIVES,
    EXCHANGES,
    LAX,
    TOUR,
    ScheduleLike,
    in_lax,
)

PERMUTE = "ppermute"
_WIDE = 4  # bytes of a float32, in which decoded values are added


def predict(
    collective: str,
    nbytes: float,
    place: Place,
    algorithm: ScheduleLike = LAX,
    dtype: str = "float32",
    wire: Wire | str | None = None,
) -> float | None:
    """The seconds that a collective takes at a place: on a machine, and a number of its ranks.

    The result is modelled on TPUs, and interpolated between measurements on GPUs. None: on this
    machine it was not measured, or not at such a size; `python -m ringcoll machine --show` lists
    what was, and `--fit` makes a machine of your own measurements.

    Args:
        collective: one of `algorithms.COLLECTIVES`, or `ppermute` (to the next rank); `all_reduce`
            and `reduce_scatter` are other names of `psum` and `psum_scatter`. Or `tour`, which
            needs an algorithm.
        nbytes: bytes as nccl-tests counts them: the operand or the result of a rank, whichever is
            larger. That is the full vector: the result of an all_gather, the operand of the others.
        place: the ranks, and where they are; `place_of` makes one.
        algorithm: "lax" for the built-in; or a name, schedule or function, as
            `algorithms.build` takes it.
        dtype: the dtype of the elements, by its name; only a wire needs it.
        wire: what messages hold: "int8", or a `ringcoll.Wire`. Encoding, decoding and adding in
            float32 are included. "lax" is then the built-in exchange and gather of bytes.

    Raises:
        ValueError: the collective or algorithm is not known, or the algorithm has no schedule for
            these ranks; or nbytes is not a number of bytes; or the collective or dtype has no wire.

    >>> h100 = costs.place_of(8, "h100")
    >>> print(f"{costs.predict('all_gather', 2**26, h100):.1e}")
    2.1e-04
    >>> print(f"{costs.predict('all_gather', 2**26, h100, 'ring'):.1e}")
    8.9e-04
    """
    is_text = isinstance(collective, str)
    name = in_lax(collective) if is_text and collective != PERMUTE else collective
    if not is_text or name not in (*COLLECTIVES, TOUR, PERMUTE):
        cure = choose(collective, (*COLLECTIVES, TOUR, PERMUTE))
        raise ValueError(f"predict: collective {shown(collective)} is not known; {cure}")
    if not isinstance(place, Place):
        raise ValueError(
            f"predict: place {shown(place)} is not a Place; pass place_of(8, 'h100') or the like"
        )
    if not isinstance(algorithm, Hashable):
        words = "is not 'lax', a name, a schedule or a function"
        raise ValueError(f"predict: algorithm {shown(algorithm)} {words}")
    if not _is_size(nbytes):
        raise ValueError(
            f"predict: nbytes {shown(nbytes)} is not a number of bytes; give 0 or more, up to 2^63"
        )
    if name == TOUR and (algorithm == LAX or wire is not None):
        words = f"{name} by {algorithm!r}, wire={wire!r}"
        raise ValueError(
            f"predict: {words}: name an algorithm, and pass no wire: its schedule is priced"
        )
    if wire is None:
        return _or_none(seconds_of(name, place, algorithm)(float(nbytes)))
    codes = wire if isinstance(wire, Wire) else Wire(wire)
    if name not in ENCODED:
        raise ValueError(f"predict: {name} has no wire; there are {', '.join(ENCODED)}")
    if dtype not in FLOATS:
        raise ValueError(f"predict: dtype {dtype!r} with a wire, which carries {', '.join(FLOATS)}")
    return _or_none(seconds_of(name, place, algorithm, codes, FLOATS[dtype])(float(nbytes)))


def _or_none(found: float) -> float | None:
    return None if isinf(found) else found


def seconds_of(
    name: str,
    place: Place,
    algorithm: ScheduleLike,
    wire: Wire | None = None,
    itemsize: int = 4,
) -> Seconds:
    """The seconds of `predict`, as a function of bytes: the schedule is priced once.

    They are infinite where they were not measured, so that no choice takes them.

    Args:
        name: the collective, by the name that `jax.lax` gives it.
        place: the ranks, and where they are.
        algorithm, wire: as for `predict`.
        itemsize: the bytes of an element; only a wire needs it.

    Raises:
        ValueError: the algorithm has no schedule for these ranks, or there is no such built-in.
    """
    if place.ranks == 1:
        return lambda _: 0.0
    called = name
    if name in EXCHANGES:  # slices that are all of one size
        name = "all_to_all"
    elif name in ALL_REDUCES:
        name = "psum"
    if algorithm == LAX and place.device.model.axes and place.network is None:
        raise ValueError(f"the built-in of {place.device.name} runs on a slice")
    if wire is not None:
        return _encoded(name, algorithm, itemsize, place, wire)
    if algorithm == LAX:
        return lambda nbytes: _built_in(called, name, nbytes, place)
    if name == PERMUTE:
        raise ValueError(f"a ppermute is one message: algorithm {algorithm!r} is not 'lax'")
    return place.seconds(place.price(name, algorithm))


def _is_size(nbytes: Any) -> bool:
    try:
        return bool(0 <= nbytes <= 2**63)
    except (TypeError, ValueError):  # no number; several
        return False


def _encoded(
    name: str, algorithm: ScheduleLike, itemsize: int, place: Place, wire: Wire
) -> Seconds:
    """Seconds with a wire: fewer bytes to send, and the work to encode, decode and add."""
    model, ratio = place.device.model, wire.ratio(itemsize)
    if algorithm != LAX:
        no_sums = replace(model, gamma=0.0)  # the work includes the additions
        still = replace(place, device=replace(place.device, model=no_sums))
        sent = [still.seconds(still.price(name, algorithm))]
    else:
        parts = {"psum": ("all_to_all", "all_gather"), "psum_scatter": ("all_to_all",)}
        sent = [seconds_of(part, place, LAX) for part in parts.get(name, (name,))]

    def taken(nbytes: float) -> float:
        work = encoding_seconds(name, place.ranks, nbytes, itemsize, wire, model)
        return work + sum(seconds(nbytes * ratio) for seconds in sent)

    return taken


def encoding_seconds(
    name: str, ranks: int, nbytes: float, itemsize: int, wire: Wire, model: Model
) -> float:
    """The seconds that one rank takes to encode, decode and add; its main memory is the limit.

    If the memory next to the core holds the codes and a shard's sum, the main memory is read once
    for the operand and written once for the result. (So XLA compiles "hamiltonian"; "torus" takes
    twice as long on v5e.) If not, this assumes that nothing is fused with other work: a gather
    encodes a shard and decodes all shards; a sum or an exchange encodes and decodes a vector; an
    all-reduce does both. An all-reduce by stages encodes more often, which is left out.
    """
    shard, ratio = nbytes / ranks, wire.ratio(itemsize)
    if model.holds(ratio * nbytes + shard * _WIDE / itemsize):
        read = shard if name == "all_gather" else nbytes
        written = shard if name == "psum_scatter" else nbytes
        return model.memory * (read + written)
    vectors = {"all_gather": 1 + 1 / ranks, "psum": 3 + 1 / ranks}.get(name, 2.0)
    moved = vectors * nbytes * (1 + ratio)
    adds = name in ("psum", "psum_scatter")
    added = adds * nbytes * (1 - 1 / ranks) * _WIDE / itemsize
    return model.memory * moved + model.gamma * added


# -- the built-in --


def _built_in(called: str, name: str, nbytes: float, place: Place) -> float:
    """Seconds of `called`; if it was not measured itself, of the collective `name`, its like."""
    place = place.built_in or place
    if place.device.model.axes:
        return _on_tpus(name, nbytes, place)
    device, n = place.device, place.ranks
    if device.ranks_a_host == 1:  # the machine is a network between hosts of one rank
        return _in_a_ring(name, nbytes, n, device.model)
    known = (device.curves.get((each, n, place.hosts)) for each in (called, name))
    curve = next(filter(None, known), None)
    if name == PERMUTE and place.hosts == 1:  # however many ranks send, each sends one message
        curve = curve or device.model.wire
    return curve(nbytes) if curve else inf


def _on_tpus(name: str, nbytes: float, place: Place) -> float:
    """Seconds on TPUs: by both directions of a ring, or of all rings of a torus.

    If XLA turns a reduce-scatter into an all-reduce and a slice, it is priced as an all-reduce.
    """
    device, n = place.device, place.ranks
    model = device.model
    if name == PERMUTE:
        return model.alpha + model.hop + model.beta * nbytes
    if name == "psum_scatter" and 0 < model.all_reduces <= n and len(set(place.shape)) == 1:
        name = "psum"
    share = model.built_in_sum if name == "psum" else model.built_in
    # The groups of the other devices of a chip are assumed to communicate at the same time.
    model = replace(model, beta=model.beta * model.devices / share)
    # Messages start together; each link carries its share. (A matmul that exchanges rows does not
    # have the slice: see `model.all_to_all_seconds`.)
    if name == "all_to_all":
        paid = counted(name, "pairwise", *place.where)
        paid = replace(paid, startups=1, hops=max(place.shape) // 2, uneven=())
    elif sum(size > 1 for size in place.shape) > 1:
        paid = counted(name, "torus", *place.where)
    elif place.places:
        paid = counted(name, "bidirectional_ring", *place.where)
    elif place.closed == (True,):
        paid = counted(name, "bidirectional_ring", (n,), (n,))
    else:  # on a line, shards go outward: each direction of a link carries as much as a ring's
        paid = counted(name, "ring", (n,), (n,))
    return seconds(paid, nbytes / n, model)


def _in_a_ring(name: str, nbytes: float, ranks: int, model: Model) -> float:
    if name == PERMUTE:
        return model.alpha + model.beta * nbytes
    schedule = "pairwise" if name == "all_to_all" else "ring"
    return seconds(counted(name, schedule, (ranks,)), nbytes / ranks, model)
