"""A picture of a program that no schedule describes. Its frames come from its proof."""

from collections.abc import Iterable

from ringcoll.draw.plan import Plan
from ringcoll.draw.steps import Frame, Message, Piece
from ringcoll.draw.svg import as_svg
from ringcoll.formats.counting import by_round
from ringcoll.formats.proof import Proof, Value
from ringcoll.schedules.phases import Carries, Phase
from ringcoll.schedules.schedule import Schedule

_CARRIES = {"all_gather": Carries.SHARDS, "all_to_all": Carries.BLOCKS}


def svg_of(proof: Proof) -> str:
    """All rounds of a program as one picture.

    A column is a shard, and its bands are chunks; a vector of one chunk has one column.

    Args:
        proof: the proof of the program, on at most 16 ranks.

    Raises:
        ValueError: there are too many ranks or rounds, or shards have different numbers of chunks.

    >>> formats.svg_of(formats.prove(formats.program("psum", "ring", (3,))))[:4]
    '<svg'
    """
    program = proof.program
    size, chunks = program.size, program.chunks
    sends_vectors = chunks == 1 and program.collective == "psum"
    if chunks % size and not sends_vectors:
        raise ValueError(
            f"{chunks} chunks on {size} ranks: a picture has a column for each shard, and as many "
            "chunks in each; read the rounds as text"
        )
    lanes = 1 if sends_vectors else chunks // size
    carries = Carries.VECTORS if sends_vectors else _CARRIES.get(program.collective, Carries.SUMS)
    phase = Phase("as in the file", carries, Schedule((size,), (), lanes))
    plan = Plan(program.collective, program.name, (size,), (phase,), phase.schedule, None)
    columns = 1 if sends_vectors else size
    held = [
        tuple(_cells(program.collective, values, lanes, columns) for values in ranks)
        for ranks in proof.held()
    ]
    frames = [Frame(0, phase, (), held[0])]
    for number, sent in enumerate(by_round(proof), 1):
        messages = (
            Message(m.sender, m.receiver, 0, 0, tuple(_piece(plan, v, lanes) for v in m.values))
            for m in sent
        )
        frames.append(Frame(number, phase, tuple(messages), held[number]))
    return as_svg(plan, run=tuple(frames))


def _place(collective: str, value: Value, lanes: int) -> tuple[int, int]:
    """The column and the lane of a value; for a sum of several chunks, those of the first."""
    rank, chunk = min(value)
    return (rank, chunk % lanes) if collective == "all_gather" else divmod(chunk, lanes)


def _piece(plan: Plan, value: Value, lanes: int) -> Piece:
    column, _ = _place(plan.collective, value, lanes)
    return Piece(column, frozenset(rank for rank, _ in value))


def _cells(
    collective: str, values: Iterable[Value], lanes: int, columns: int
) -> tuple[tuple[frozenset[int], ...], ...]:
    """By lane and column, whose data a rank has: for sums the largest one, for blocks all."""
    cells = [[frozenset[int]()] * columns for _ in range(lanes)]
    for value in values:
        column, lane = _place(collective, value, lanes)
        ranks, before = frozenset(rank for rank, _ in value), cells[lane][column]
        together = before | ranks if collective == "all_to_all" else ranks
        cells[lane][column] = max(before, together, key=len)
    return tuple(map(tuple, cells))
