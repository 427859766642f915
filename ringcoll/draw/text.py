"""A collective as text: the messages of each round in words, and tables of who holds what."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import groupby

from ringcoll.draw.captions import name_notes, price_line, round_words, sentence
from ringcoll.draw.plan import Execution
from ringcoll.draw.steps import Frame, RankSet, frames, ranges
from ringcoll.io.text import aligned, wrapped
from ringcoll.schedules.phases import Carries, Phase
from ringcoll.schedules.schedule import Move, Round

_MOST_RANKS = 16  # more ranks get no tables, however wide a line is
_MOST_RUNS = 16  # a phase of more runs of equal rounds is described by longer runs
_NEW = "*"


def as_text(plan: Execution, width: int = 80) -> str:
    """The rounds of a plan in words, in lines of at most `width`.

    If tables fit, there is one for each round. If not, the words are about a rank r: every rank
    does the same.

    >>> text = draw.as_text(draw.plan("all_gather", "direct", (3,)))
    >>> for line in text.splitlines()[9:14]:
    ...     print(line)
    round 1 of 1, all-gather: every rank r sends to each of r+1, r-1: shard r
    rank \\ shard  0   1   2
    0             0   1*  2*
    1             0*  1   2*
    2             0*  1*  2
    """
    names = [part for line in name_notes(plan) for part in wrap(line, width)]
    blocks = [[plan.title], *([names] if names else [])]
    tables = _tables(plan, width) if plan.size <= _MOST_RANKS else None
    if not tables:
        few = f"Tables of {plan.size} ranks are left out: {width} columns are too few for them."
        blocks.append(wrap(few, width))
    blocks += _in_tables(plan, tables, width) if tables else [_in_general(plan, width)]
    return "\n\n".join("\n".join(b) for b in [*blocks, wrap(price_line(plan), width)])


def wrap(text: str, width: int, first: str = "", then: str = "") -> list[str]:
    """The lines of a text, indented; no line ends inside "(lane 3"."""
    joined = first + text.replace("(lane ", "(lane\xa0")
    return [line.replace("\xa0", " ") for line in wrapped([joined], then, width)]


# -- in tables --


def _in_tables(plan: Execution, tables: Sequence[list[str]], width: int) -> Iterator[list[str]]:
    cells = "the ranks whose data a sum has" if plan.adds else "the shards that a rank holds"
    if plan.has_blocks:
        cells = "whose blocks a rank holds"
    if plan.tour:
        cells = "the shards that a rank holds, and who has added to the sums that it holds"
    yield [*wrap(f"Cells: {cells}; {_NEW} is new, . is nothing.", width), "", *tables[0]]
    for (number, now), table in zip(plan.numbered(), tables[1:], strict=True):
        name, messages = round_words(plan, now)[0], sentence(plan, now)
        text = f"round {number} of {plan.paid.rounds}, {name}: {messages}"
        yield [*wrap(text, width, then="  "), *table]


def _tables(plan: Execution, width: int) -> list[list[str]] | None:
    """A table for each frame; None if they are too wide.

    All lanes share a cell if that fits; if not, each lane has a row.
    """
    run = frames(plan)
    for lanes_apart in (False, True)[bool(plan.tour) :]:
        tables = [
            _table(plan, frame, before, lanes_apart)
            for before, frame in zip((run[0], *run), run, strict=False)
        ]
        if max(len(line) for table in tables for line in table) <= width:
            return tables
    return None


def _table(plan: Execution, frame: Frame, before: Frame, lanes_apart: bool) -> list[str]:
    """The lines of one table; what is new since the frame `before` is marked."""
    n = plan.size
    columns = ["vector"] if plan.whole else [str(c) for c in range(n)]
    what = "" if plan.whole else " \\ block for" if plan.has_blocks else " \\ shard"
    rows = [[f"rank{what}", *columns]]
    for rank, lanes in enumerate(frame.held):
        of_lanes = []
        for lane, cells in enumerate(lanes):
            old = before.held[rank][min(lane, len(before.held[rank]) - 1)]  # stages are alike
            pairs = zip(cells, old, strict=True)
            of_lanes.append(
                [(_ranks(now, n) or ".") + _NEW * bool(now - was) for now, was in pairs]
            )
        alike = all(cells == of_lanes[0] for cells in of_lanes)
        if lanes_apart and (plan.tour or not alike):
            names = _lane_names(plan, len(of_lanes))
            rows += [[f"{rank} {name}", *row] for name, row in zip(names, of_lanes, strict=True)]
        else:
            rows.append([str(rank), *map(_join_lanes, zip(*of_lanes, strict=True))])
    return [*aligned(rows, left=len(rows[0]))]


def _lane_names(plan: Execution, count: int) -> list[str]:
    """The names of the lanes of a rank; a tour has lanes of shards, and then lanes of sums."""
    if not plan.tour:
        return [f"lane {lane}" for lane in range(count)]
    lanes = [f", lane {lane}" for lane in range(count // 2)] if count > 2 else [""]
    return [f"{what}{lane}" for what in ("shards", "sums") for lane in lanes]


def _join_lanes(lanes: Sequence[str]) -> str:
    """The cell of all lanes together; equal lanes are written once."""
    return lanes[0] if len(set(lanes)) == 1 else "|".join(lanes)


def _ranks(held: RankSet, size: int) -> str:
    """Ranks in the order of the ring, three neighbours or more as a range: 0-3, or 2,3,0."""
    found = ranges(held)
    if len(found) > 1 and found[0].start == 0 and found[-1].stop == size:
        found.append(found.pop(0))  # the run that goes on from the last rank to rank 0
    short = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run) for run in found]
    return ",".join(name for names in short for name in names)


# -- in general --


def _in_general(plan: Execution, width: int) -> list[str]:
    """Describe runs of equal rounds: the first, the last, and how much a rank holds afterwards."""
    lines: list[str] = []
    done = 0
    for phase in plan.phases:
        if plan.tour and phase.carries is Carries.SUMS:
            done = plan.tour.delay
        lines += ["", f"{phase.name}:"] if lines else [f"{phase.name}:"]
        holds_one = phase.carries in (Carries.SHARDS, Carries.VECTORS)
        held = Fraction(1 if holds_one else plan.size)
        number = 0
        for rounds in _runs_of_equal(phase.rounds):
            for moves in rounds:
                held += _gain(phase, moves)
            last = number + len(rounds) - 1
            for text in _run_of_rounds(plan, phase, (number, last), done):
                lines += wrap(text, width, "  ", "    ")
            number = last + 1
            if plan.tour:  # a rank of a tour also makes sums, so no count is printed
                continue
            lines.append(f"    then rank r holds {_amount(plan, phase, held, number)}")
        done += len(phase.rounds)
    return lines


def _run_of_rounds(plan: Execution, phase: Phase, run: tuple[int, int], done: int) -> Iterator[str]:
    """Describe the rounds of a phase from the first to the last of `run`."""
    first, last = run
    if first == last:
        yield f"round {done + first + 1}: {sentence(plan, [(phase, first)])}"
        return
    first_round, last_round = (sentence(plan, [(phase, number)]) for number in run)
    yield f"rounds {done + first + 1} to {done + last + 1}, first: {first_round}"
    yield f"... last: {last_round}"


def _runs_of_equal(rounds: Sequence[Round]) -> list[list[Round]]:
    """Runs of rounds with equal moves; if there are too many runs, shifts in a run may differ."""

    def runs(shifts: bool) -> list[list[Round]]:
        def key(moves: Round) -> object:
            return [(m.axis, m.lane, len(m.offsets), shifts and m.shift) for m in moves]

        return [list(run) for _, run in groupby(rounds, key)]

    equal = runs(shifts=True)
    return equal if len(equal) <= _MOST_RUNS else runs(shifts=False)


def _gain(phase: Phase, moves: Sequence[Move]) -> Fraction:
    """How many more shards a rank holds after a round. It receives as many as it sends."""
    count = Fraction(sum(len(move.offsets) for move in moves), phase.schedule.lanes)
    signs = {Carries.SHARDS: 1, Carries.VECTORS: 1, Carries.SUMS: -1, Carries.BLOCKS: 0}
    return signs[phase.carries] * count


def _amount(plan: Execution, phase: Phase, held: Fraction, rounds: int) -> str:
    count = f"{round(float(held), 3):.12g}"  # enough digits for any whole number
    if phase.carries is Carries.VECTORS:
        return f"{count} vectors" + (", and adds them" if rounds == len(phase.rounds) else "")
    noun = {Carries.SHARDS: "shards", Carries.SUMS: "sums", Carries.BLOCKS: "blocks"}
    return f"{count} of {plan.size} {noun[phase.carries]}"
