"""A collective as text: the messages of each round in words, and tables of who holds what."""

from collections.abc import Iterator, Sequence

from ringcoll.draw.captions import name_notes, price_line, round_words, sentence
from ringcoll.draw.plan import Execution, check_size
from ringcoll.draw.steps import Frame, RankSet, frames, ranges
from ringcoll.io.text import aligned, wrapped

_NEW = "*"


def as_text(plan: Execution, width: int = 80) -> str:
    """The rounds of a plan in words, in lines of at most `width`.

    The words are about a rank r: every rank does the same. If tables fit, there is one for each
    round.

    Raises:
        ValueError: there are too many ranks.

    >>> text = draw.as_text(draw.plan("all_gather", "direct", (3,)))
    >>> for line in text.splitlines()[9:14]:
    ...     print(line)
    round 1 of 1, all-gather: every rank r sends to each of r+1, r-1: shard r
    rank \\ shard  0   1   2
    0             0   1*  2*
    1             0*  1   2*
    2             0*  1*  2
    """
    check_size(plan)
    names = [part for line in name_notes(plan) for part in wrap(line, width)]
    blocks = [[plan.title], *([names] if names else []), *_rounds(plan, width)]
    return "\n\n".join("\n".join(b) for b in [*blocks, wrap(price_line(plan), width)])


def wrap(text: str, width: int, first: str = "", then: str = "") -> list[str]:
    """The lines of a text, indented; no line ends inside "(lane 3"."""
    joined = first + text.replace("(lane ", "(lane\xa0")
    return [line.replace("\xa0", " ") for line in wrapped([joined], then, width)]


def _rounds(plan: Execution, width: int) -> Iterator[list[str]]:
    """What the cells of tables mean, and the lines of each round."""
    tables = _tables(plan, width)
    cells = "the ranks whose data a sum has" if plan.adds else "the shards that a rank holds"
    if plan.has_blocks:
        cells = "whose blocks a rank holds"
    if plan.tour:
        cells = "the shards that a rank holds, and who has added to the sums that it holds"
    if tables:
        yield [*wrap(f"Cells: {cells}; {_NEW} is new, . is nothing.", width), "", *tables[0]]
    else:
        few = f"Tables of {plan.size} ranks are left out: {width} columns are too few for them."
        yield wrap(few, width)
    for number, now in plan.numbered():
        name, messages = round_words(plan, now)[0], sentence(plan, now)
        text = f"round {number} of {plan.paid.rounds}, {name}: {messages}"
        yield [*wrap(text, width, then="  "), *(tables[number] if tables else [])]


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
