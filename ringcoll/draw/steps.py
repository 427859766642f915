"""Who holds what after each round: a schedule executed on symbols in place of numbers.

A symbol is the set of ranks whose data it contains. A shard of an all-gather contains its owner's
data; a partial sum contains the data of every rank that has added to it. If the last frame is the
result of the collective, the schedule is proved, without a device and without
`ringcoll.runtime.run`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ringcoll.draw.plan import Execution
from ringcoll.schedules.phases import Carries, Phase
from ringcoll.schedules.schedule import Move, ScheduleError
from ringcoll.schedules.tour import Tour

RankSet = frozenset[int]
#: By rank, lane and column: the ranks whose data is there; empty if nothing is held. A tour has
#: lanes of shards, followed by the same number of lanes of sums.
Held = tuple[tuple[tuple[RankSet, ...], ...], ...]


def ranges(ranks: RankSet) -> list[range]:
    """Ranks in order; neighbours are one range."""
    found: list[range] = []
    for rank in sorted(ranks):
        if found and found[-1].stop == rank:
            found[-1] = range(found[-1].start, rank + 1)
        else:
            found.append(range(rank, rank + 1))
    return found


@dataclass(frozen=True, slots=True)
class Piece:
    """A shard, partial sum, block or vector: its column, and whose data is in it."""

    column: int
    contributors: RankSet


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends to another in one round, in one lane."""

    sender: int
    receiver: int
    lane: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """The messages of a round, and what every rank holds after it. The first frame is the start."""

    messages: tuple[Message, ...]
    held: Held


#: The pieces of a rank in a lane, by key. The key of a block is its slot; the key of a shard, sum
#: or vector is its rank.
_Store = dict[int, Piece]
_State = list[list[_Store]]


def frames(plan: Execution) -> tuple[Frame, ...]:
    """Execute a plan.

    Raises:
        ScheduleError: a rank sends what it does not hold, or adds something twice.

    >>> run = draw.frames(draw.plan("all_gather", "ring", (4,)))
    >>> len(run), len(run[1].messages)  # the start and three rounds; four messages in the first
    (4, 4)
    """
    if plan.tour:
        return tuple(_tour_frames(plan, plan.tour))
    first = plan.phases[0] if plan.phases else None
    state: _State = []
    for rank in range(plan.size):
        started = _start(plan, first, rank)
        state.append([dict(started) for _ in range(first.schedule.lanes if first else 1)])
    result = [Frame((), _by_column(plan, state))]
    for phase in plan.phases:
        if phase.carries is Carries.VECTORS:
            state = _add_vectors(state, phase.schedule.lanes)
        for moves in phase.rounds:
            messages = tuple(_deliver(phase, moves, state))
            result.append(Frame(messages, _by_column(plan, state)))
    return tuple(result)


def _tour_frames(plan: Execution, tour: Tour) -> Iterator[Frame]:
    """The frames of a tour: ranks add for the shards of a round while the next round is sent.

    A rank drops a shard when it has added to the shard's sum and has forwarded the shard.
    """
    lanes, every_rank = tour.out.lanes, range(plan.size)
    state: _State = [
        [{r: Piece(r, frozenset([r]))} for _ in range(lanes)] + [{} for _ in range(lanes)]
        for r in every_rank
    ]
    arrived = [(lane, 0) for lane in range(lanes)]
    sent = {(m.lane, o): number for number, m in tour.out.numbered_moves() for o in m.offsets}
    yield Frame((), _by_column(plan, state))
    for number, running in plan.numbered():
        messages: list[Message] = []
        arriving: list[tuple[int, int]] = []
        for phase, i in running:
            moves = phase.rounds[i]
            if phase.carries is Carries.SHARDS:
                arriving = [(m.lane, o) for m in moves for o in tour.out.arrivals(m)]
            else:
                moves = tuple(replace(move, lane=move.lane + lanes) for move in moves)
            messages += _deliver(phase, moves, state)
        used = [*arrived, *(key for key, last in sent.items() if last == number)]
        for rank in every_rank:
            for lane, offset in arrived:
                owner = plan.phases[0].along(rank, offset, -1)
                own, store = Piece(owner, frozenset([rank])), state[rank][lanes + lane]
                store[owner] = _sum([store[owner], own]) if owner in store else own
            for lane, offset in used:
                if offset and max(sent.get((lane, offset), 0), number) == number:
                    state[rank][lane].pop(plan.phases[0].along(rank, offset, -1), None)
        arrived = arriving
        yield Frame(tuple(messages), _by_column(plan, state))


def _start(plan: Execution, phase: Phase | None, rank: int) -> _Store:
    """What a rank holds in a lane before the first round."""
    own, every_rank = frozenset([rank]), range(plan.size)
    if phase is None or phase.carries is Carries.VECTORS:
        return {rank: Piece(0, own)}
    if phase.carries is Carries.SHARDS:
        return {rank: Piece(rank, own)}
    if phase.carries is Carries.SUMS:
        return {owner: Piece(owner, own) for owner in every_rank}
    return {slot: Piece(phase.along(rank, slot), own) for slot in every_rank}


def _deliver(phase: Phase, moves: tuple[Move, ...], state: _State) -> Iterator[Message]:
    """Execute a round and return its messages: first all ranks send, then all receive."""
    keeps = phase.carries in (Carries.SHARDS, Carries.VECTORS)
    by_slot = phase.carries is Carries.BLOCKS
    post = []
    for move in moves:
        for rank, lanes in enumerate(state):
            store = lanes[move.lane]
            keys = move.offsets if by_slot else [phase.along(rank, o, -1) for o in move.offsets]
            if missing := [key for key in keys if key not in store]:
                raise ScheduleError(f"rank {rank} sends {missing[0]}, which it does not hold")
            pieces = tuple(store[key] if keeps else store.pop(key) for key in keys)
            to = phase.schedule.step(rank, move.axis, move.shift)
            post.append((keys, Message(rank, to, move.lane, pieces)))
    for keys, message in post:
        store = state[message.receiver][message.lane]
        for key, piece in zip(keys, message.pieces, strict=True):
            store[key] = _sum([store[key], piece]) if key in store else piece
        yield message


def _sum(pieces: list[Piece]) -> Piece:
    """The sum of pieces.

    Raises:
        ScheduleError: the data of a rank is in two of them.
    """
    contributors = frozenset().union(*(piece.contributors for piece in pieces))
    if len(contributors) < sum(len(piece.contributors) for piece in pieces):
        raise ScheduleError(f"something of column {pieces[0].column} is added twice")
    return Piece(pieces[0].column, contributors)


def _add_vectors(state: _State, lanes: int) -> _State:
    """Add up the vectors that a stage gathered, and cut the sum into lanes."""
    sums = [[_sum(list(store.values())) for store in stores] for stores in state]
    if any(piece != pieces[0] for pieces in sums for piece in pieces):
        raise ScheduleError("the lanes of a stage do not add the same")
    return [[{rank: pieces[0]} for _ in range(lanes)] for rank, pieces in enumerate(sums)]


def _by_column(plan: Execution, state: _State) -> Held:
    """The state by column; blocks for one rank, or vectors to be added, are shown together."""
    columns = range(1 if plan.whole else plan.size)

    def cell(store: _Store, column: int) -> RankSet:
        pieces = [piece for piece in store.values() if piece.column == column]
        return _sum(pieces).contributors if pieces else frozenset()

    return tuple(
        tuple(tuple(cell(store, column) for column in columns) for store in stores)
        for stores in state
    )
