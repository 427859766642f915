"""The time that a narrow wire saves and costs: fewer bytes to send, and the work to encode them."""

from ringcoll.costs.model import Model
from ringcoll.costs.wire import SCALE, Wire
from ringcoll.schedules.registry import ALL_REDUCES

_WIDE = 4  # bytes of a float32, in which decoded values are added


def ratio(wire: Wire, itemsize: int) -> float:
    """The bytes of a long encoded message over the bytes of its values."""
    return (1 + SCALE / wire.block) / itemsize


def seconds(
    collective: str, ranks: int, nbytes: float, itemsize: int, wire: Wire, model: Model
) -> float:
    """The seconds that one rank takes to encode, decode and add; its main memory is the limit.

    If the memory next to the core holds the codes and a shard's sum, the main memory is read once
    for the operand and written once for the result. (So XLA compiles "hamiltonian"; "torus" takes
    twice as long on v5e.) If not, this assumes that nothing is fused with other work: a gather
    encodes a shard and decodes all shards; a sum or an exchange encodes and decodes a vector; an
    all-reduce does both. An all-reduce by stages encodes more often, which is left out.

    Args:
        collective: its name in `jax.lax`.
        ranks: the number of ranks.
        nbytes: the bytes of the full vector.
        itemsize: the bytes of its elements.
        wire: what messages hold.
        model: the rates of the machine.
    """
    shard = nbytes / ranks
    if model.holds(ratio(wire, itemsize) * nbytes + shard * _WIDE / itemsize):
        read = shard if collective == "all_gather" else nbytes
        written = shard if collective == "psum_scatter" else nbytes
        return model.memory * (read + written)
    vectors = {"all_gather": 1 + 1 / ranks, "psum": 3 + 1 / ranks}.get(collective, 2.0)
    moved = vectors * nbytes * (1 + ratio(wire, itemsize))
    adds = collective in (*ALL_REDUCES, "psum_scatter")
    added = adds * nbytes * (1 - 1 / ranks) * _WIDE / itemsize
    return model.memory * moved + model.gamma * added
