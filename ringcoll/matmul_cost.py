"""What a matmul with a collective costs in seconds: the collective under it, or beside it.

`"auto"` compares `hidden_seconds` with `bare_seconds`. A matmul takes as long as its operations
or as reading its operands, whichever is longer. A collective that is hidden cuts the matmul into
as many pieces as ranks, and each piece reads the stationary factor again: with few rows that
takes longer than the wire. The `Model` has the rates, and the size of the memory beside
the core. The times of compiled programs of 128 to 8,192 rows are within a tenth of these, except
in the cells that `benchmarks/grid.md` marks.
"""

from dataclasses import dataclass

from ringcoll.cost import Model


@dataclass(frozen=True, slots=True)
class Work:
    """The matmuls beside a collective: their FLOPs, and the bytes of memory that they move.

    Attributes:
        flops: of the whole.
        added: bytes that adding partial results moves each round, if they are cut into pieces.
        once: bytes that are read or written once, whether they are cut or not.
        again: bytes that every piece reads, and that the whole reads once.
    """

    flops: float
    added: float = 0.0
    once: float = 0.0
    again: float = 0.0


def hidden_seconds(
    work: Work,
    shard_bytes: float,
    ranks: int,
    model: Model,
    gathers: bool = False,
    load: float = 1 / 2,
) -> float:
    """Seconds of a collective under its matmul, which is cut into as many pieces as ranks.

    A piece is multiplied while the collective does a round; the first or the last alone.

    Args:
        work: of the whole.
        shard_bytes: what a rank sends in a round.
        ranks: n.
        model: of the machine.
        gathers: whether the matmul takes what the collective brings. Then compilers copy what is
            read again into the memory beside the core before the first piece, if it fits there.
            Otherwise the first piece reads it from the main memory, and the later pieces from
            the memory beside the core, if it fits there.
        load: the share of that on the busiest link; of a bidirectional ring, half goes each way.
    """
    fills = gathers and model.holds(work.again)
    added = work.added * (model.near if model.holds(work.again + work.added) else model.memory)
    first = fills * work.again * model.memory + piece_seconds(work, 1 / ranks, model, fills)
    piece = piece_seconds(work, 1 / ranks, model, model.holds(work.again))
    hop = model.alpha + model.beta * shard_bytes * load
    return first + added + (ranks - 1) * max(piece + added, hop)


def piece_seconds(work: Work, share: float, model: Model, is_near: bool) -> float:
    """Seconds of a share of the matmuls: to compute or to read, whichever is longer.

    Args:
        work: of the whole.
        share: how much of it.
        model: of the machine.
        is_near: whether what is read again is in the memory beside the core.
    """
    reading = work.once * share * model.far + work.again * (model.near if is_near else model.far)
    return max(model.start + work.flops * share * model.delta, reading)


def bare_seconds(
    work: Work,
    shard_bytes: float,
    ranks: int,
    model: Model,
    links: float = 2,
    gathers: bool = False,
) -> float:
    """Seconds of the matmul whole, before or after its collective, which takes no latency.

    Args:
        work, shard_bytes, ranks, model, gathers: as for `hidden_seconds`. The memory beside the
            core is filled while a gather is under way.
        links: how many the collective comes in by at once.
    """
    wire = (ranks - 1) * model.beta * shard_bytes / links
    fills = model.holds(work.again)
    filling = fills * work.again * model.memory
    return (max(wire, filling) if gathers else wire + filling) + piece_seconds(
        work, 1, model, fills
    )
