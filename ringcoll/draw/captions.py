"""Describe rounds in words that are true for every rank r."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from ringcoll.draw.plan import Execution, Running
from ringcoll.schedules.phases import Carries, Phase
from ringcoll.schedules.schedule import Move, digits

_MOST = 4  # names in a list before it is shortened
_LETTERS = "ijklmnopqstuvwxyz"
_NOUNS = {"pmax": "maximum", "pmin": "minimum"}  # the others: sum


@dataclass(frozen=True)
class Names:
    """Names of ranks relative to a rank r.

    On one axis, a name is r+1. On axes of two ranks each, it is r^2, because adding there is an
    exclusive or. On other axes, it is (i, j+1), digit by digit.
    """

    shape: tuple[int, ...]

    @property
    def _by_digit(self) -> bool:
        return len(self.shape) > 1 and set(self.shape) != {2}

    def name(self, offset: int, sign: int = 1) -> str:
        """The name of rank r + offset, by the shorter way: r+1 or r-1.

        At half the ranks both ways are equal; `sign` -1 chooses r minus half.
        """
        if not self._by_digit:
            return _plus("r", offset, sign, self.shape)
        return self._digits([{digit} for digit in digits(offset, self.shape)], sign)

    def list_of(self, offsets: Sequence[int], sign: int = 1) -> str:
        """The names of several ranks; all ranks along an axis are one name: (*, j)."""
        if self._by_digit:
            every = [digits(offset, self.shape) for offset in offsets]
            sets = [set(along) for along in zip(*every, strict=True)]
            is_product = all(len(s) in (1, n) for s, n in zip(sets, self.shape, strict=True))
            if is_product and prod(map(len, sets)) == len(offsets):
                return self._digits(sets, sign)
        return _shortened([self.name(offset, sign) for offset in offsets])

    def _digits(self, sets: Sequence[set[int]], sign: int) -> str:
        """The name of ranks that have, along each axis, one digit or all digits."""
        parts = [
            "*" if len(some) == n > 1 else _plus(letter, min(some), sign, (n,))
            for letter, some, n in zip(_LETTERS, sets, self.shape, strict=False)
        ]
        return f"({', '.join(parts)})"

    def explanation(self) -> str:
        """A sentence that explains the names; "" for r+1, which needs none."""
        if self._by_digit:
            letters = ", ".join(_LETTERS[: len(self.shape)])
            sizes = " x ".join(map(str, self.shape))
            return f"Rank r is ({letters}) of {sizes}, row-major, each modulo its own; * is all."
        if len(self.shape) > 1:
            return "r^s is the exclusive or: the partner across the binary digits of s."
        return ""


def _plus(name: str, offset: int, sign: int, shape: Sequence[int]) -> str:
    """The name of the rank at this offset from the rank `name`."""
    if offset == 0:
        return name
    if len(shape) > 1:
        return f"{name}^{offset}"
    ahead, behind = 2 * offset, 2 * (shape[0] - offset)
    if ahead < behind or (ahead == behind and sign > 0):
        return f"{name}+{offset}"
    return f"{name}-{shape[0] - offset}"


def name_notes(plan: Execution) -> list[str]:
    """Sentences that explain the names of ranks, and the lanes, where needed."""
    shapes = dict.fromkeys(phase.schedule.shape for phase in plan.phases)
    lines = [Names(shape).explanation() for shape in shapes]
    if plan.lanes > 1:
        lines.append(f"A lane carries 1/{plan.lanes} of everything; the lanes run side by side.")
    return list(filter(None, lines))


def _message_texts(plan: Execution, phase: Phase, number: int) -> Iterator[str]:
    """The messages of a rank in a round (from 0) of a phase: "to r+1: shard r"."""
    for what, moves in groupby(phase.rounds[number], lambda m: _what(plan, phase, number, m)):
        steps = [(phase.schedule.step(0, m.axis, m.shift), 1 if m.shift > 0 else -1) for m in moves]
        names = [Names(phase.schedule.shape).name(*step) for step in steps]
        targets = _shortened(names, "each of ")
        yield f"to {targets}: {what}"


def sentence(plan: Execution, now: Sequence[Running]) -> str:
    """The messages of a round as one sentence."""
    _, rank, messages = round_words(plan, now)
    return f"every rank {rank} sends " + "; ".join(messages)


def round_words(plan: Execution, now: Sequence[Running]) -> tuple[str, str, list[str]]:
    """What runs in a round: the phases, the name of a rank, and its messages."""
    names = " and ".join(phase.name for phase, _ in now) or "in between"
    rank = Names(plan.phases[0].schedule.shape).name(0)
    messages = [text for phase, i in now for text in _message_texts(plan, phase, i)]
    return names, rank, messages or ["nothing"]


def price_line(plan: Execution) -> str:
    """The cost of a plan in a line; bytes are in units of the full vector."""
    paid, n = plan.paid, plan.size
    sent = paid.sent / n
    decimal = "" if sent.denominator == 1 else f" ({float(sent):.3g})"
    added = f", adds {paid.additions / n}" if paid.additions else ""
    sends = f"{sent}{decimal} full vector{'' if paid.sent == n else 's'}"
    if plan.tour:  # its raw bytes are shards, and the others are sums
        sends = (
            f"{paid.raw / n} of a full vector of shards and {(paid.sent - paid.raw) / n} of sums"
        )
    return (
        f"Each rank: {_plural(paid.rounds, 'round')}, {_plural(paid.messages, 'message')}; "
        f"sends {sends}{added}."
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _what(plan: Execution, phase: Phase, number: int, move: Move) -> str:
    """The content of a move. A shard that moves to a higher rank is named by a lower one: r-1."""
    lane = f" (lane {move.lane})" if phase.schedule.lanes > 1 else ""
    if phase.carries is Carries.BLOCKS:
        return _blocks(phase, number, move) + lane
    columns = [phase.along(0, offset, -1) for offset in move.offsets]
    whose = Names(phase.schedule.shape).list_of(columns, -1 if move.shift > 0 else 1)
    s = "s" if len(columns) > 1 else ""
    if phase.carries is Carries.VECTORS:
        return f"the whole vector{s} of {whose}{lane}"
    if phase.carries is Carries.SHARDS:
        return f"shard{s} {whose}{lane}"
    noun = _NOUNS.get(plan.collective, "sum")
    if columns == [phase.schedule.step(0, move.axis, move.shift)]:
        return f"its {noun} of that rank's shard{lane}"
    return f"its {noun} of shard{s} {whose}{lane}"


def _blocks(phase: Phase, number: int, move: Move) -> str:
    """Which blocks a move carries: the ranks they are for, and the ranks they come from.

    The ranks they come from are left out if that is only the sender.
    """
    names = Names(phase.schedule.shape)
    went = dict.fromkeys(move.offsets, 0)
    for moves in phase.rounds[:number]:
        for earlier in moves:
            for slot in went.keys() & set(earlier.offsets):
                went[slot] = phase.schedule.step(went[slot], earlier.axis, earlier.shift)
    to = phase.schedule.step(0, move.axis, move.shift)
    ends = list(dict.fromkeys(phase.along(slot, w, -1) for slot, w in went.items()))
    sources = list(dict.fromkeys(phase.along(0, w, -1) for w in went.values()))
    count = f"{len(went)} blocks" if len(went) > 1 else "its block"
    whom = "it" if ends == [to] else names.list_of(ends)
    if sources == [0]:
        return f"{count} for {whom}"
    return f"{count} for {whom} from {names.list_of(sources, -1)}"


def _shortened(names: Sequence[str], before: str = "") -> str:
    """Names with commas, shortened if they are many; `before` precedes several."""
    if len(names) > _MOST + 1:
        return f"{before}{', '.join(names[: _MOST - 1])}, ..., {names[-1]} ({len(names)} of them)"
    return (before if len(names) > 1 else "") + ", ".join(names)
