"""Compare two reports, line by line."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any

from ringcoll.io.text import bytes_in_words, wrapped
from ringcoll.overlap.report import Report
from ringcoll.overlap.rows import NO_LINE, LineRows, LineWork, by_line, table_lines

#: The least change of a line's compute that is printed, as a share of the total.
_LEAST = 1e-3
#: The most lines behind the change of compute.
_PLACES = 3


def compare(before: Report, now: Report) -> str:
    """What changed between two reports: first the total and its parts, then lines of source.

    An edit moves lines, so lines of the same file that call the same function are matched in order.
    If one report has more of these, lines with the same number are matched first. In a file with
    another name, lines with the same number that call the same function match.

    Args:
        before: a report, such as one that `Report.from_json` read.
        now: a report of the same program, or of a different one.

    Raises:
        ValueError: only one of the two has times.

    >>> text = jax.jit(lambda x: x).lower(jnp.ones(4)).compile()
    >>> print(overlap.compare(overlap.report(text), overlap.report(text)).splitlines()[-1])
    before: 0 of 0 collectives exposed (0.0%); now: 0 of 0 collectives exposed (0.0%)
    """
    if before.timed != now.timed:
        untimed = now if before.timed else before
        raise ValueError(f"compare: {untimed.name} has no times, and the other report has")
    return "\n".join(_lines(before, now))


def _lines(before: Report, now: Report) -> Iterator[str]:
    scale, unit, shown = (1e6, " us", "{:.1f}") if now.timed else (1.0, "", "{:.0f}")
    changes, same = [], 0
    works = [*_pairs(before.works, now.works)]
    rows = [*_pairs(by_line(before.rows), by_line(now.rows))]
    for pair in rows:
        old, new = (scale * line.sum_of(now.figure) if line else 0.0 for line in pair)
        cells = shown.format(old), shown.format(new)
        is_changed = not all(pair) or cells[0] != cells[1]
        change = _change(pair, old, new) if is_changed else ""
        line, sent = pair[1] or pair[0], [_sent(line) for line in pair]
        name = line.name if line else ""
        if all(pair) and sent[0] != sent[1]:
            change, name = change or "sends", f"{name}, {sent[1]}, before {sent[0]}"
        if change and line:
            changes.append((new - old, (change, *cells, line.kind, name)))
        else:
            same += 1
    for pair in works:
        old, new = (line.seconds if line else 0.0 for line in pair)
        if abs(new - old) > _LEAST * max(before.total, now.total):
            cells = shown.format(scale * old), shown.format(scale * new)
            name = (pair[1] or pair[0]).at or NO_LINE
            row = _change(pair, old, new), *cells, "compute", name
            changes.append((scale * (new - old), row))
    yield from wrapped([f"compared with {before.title}: {_verdict(before, now, works)}"])
    yield ""
    if changes:
        heads = "change", f"before{unit}", f"now{unit}", "what", "line"
        changes.sort(key=lambda change: -change[0])
        yield from table_lines([heads, *(cells for _, cells in changes)])
        yield ""
    if same:
        yield f"{same} line{'s' * (same > 1)} as before"
    if advice := _dearer(works, rows, _LEAST * now.total):
        yield from wrapped([advice], then="")
    faster = f", {before.total / now.total:.2f} times as fast" if now.total else ""
    yield f"before: {before.summary}; now: {now.summary}{faster}"


def _change(pair: Sequence[Any], old: float, new: float) -> str:
    """What happened to a line, whose figure was one number and is another."""
    if all(pair):
        return "grew" if new > old else "shrank"
    return "went" if pair[0] else "appeared"


def _verdict(before: Report, now: Report, works: Sequence[list[Any]]) -> str:
    """The change of the total and of its parts, with the lines whose compute changed most."""
    slower = now.total - before.total
    scale, unit = (1e3, "ms") if now.total >= 1e-2 else (1e6, "us")
    most = sorted(_by_place(works).items(), key=lambda item: -abs(item[1]))[:_PLACES]
    places, parts, file = [], [], ""
    for place, seconds in most:
        if abs(change := scale * seconds) < 0.05:
            continue
        own, _, number = place.rpartition(":")
        places.append(f"{f':{number}' if own and own == file else place} {change:+.1f}")
        file = own
    for part in {**before.parts, **now.parts}:
        change = scale * (now.parts.get(part, 0.0) - before.parts.get(part, 0.0))
        if abs(change) >= 0.05:
            of_lines = f" ({', '.join(places)})" if part == "compute" and places else ""
            parts.append(f"{part} {change:+.1f}{of_lines}")
    if not parts:
        return "as fast as before"
    word = "slower" if slower > 0 else "faster"
    return f"{word} by {scale * abs(slower):.1f} {unit}: {', '.join(parts)}"


def _by_place(pairs: Iterable[Sequence[Any]]) -> Mapping[str, float]:
    """How much longer each line of source computes, or waits."""
    changes = defaultdict[str, float](float)
    for pair in pairs:
        place = (pair[1] or pair[0]).at.partition(" ")[0] or NO_LINE
        for sign, line in zip((-1, 1), pair, strict=True):
            if line:
                waits = isinstance(line, LineRows)
                changes[place] += sign * (line.sum_of("exposed") if waits else line.seconds)
    return changes


def _dearer(works: Iterable[Sequence[Any]], rows: Iterable[Sequence[Any]], least: float) -> str:
    """The line that pays most for what it hides, if it pays `least` more than it hides."""
    compute, exposed = _by_place(works), _by_place(rows)
    grown = sum(compute.values())  # work that only moved to another line costs nothing
    computes = {place: min(compute.get(place, 0.0), grown) for place in exposed}
    longer = {place: computes[place] + exposed[place] for place in exposed}
    hides = [place for place in exposed if exposed[place] < 0 and longer[place] > least]
    if not hides:
        return ""
    place = max(hides, key=lambda place: longer[place])
    return (
        f"hidden, but slower: {place} waits {-1e6 * exposed[place]:.1f} us less and computes "
        f"{1e6 * computes[place]:.1f} us more; what it did before is quicker"
    )


def _sent(line: LineRows | None) -> str:
    """How often a line sends, and how much each time: "8 x 2M"."""
    return f"{line.sum_of('count')} x {bytes_in_words(line.mean_of('bytes'))}" if line else ""


def _pairs(before: Sequence[Any], now: Sequence[Any]) -> Iterator[list[Any]]:
    """The same line in both reports; None for a report that does not have it."""
    alone: tuple[list[Any], list[Any]] = [], []
    for old, new in _alike(before, now, lambda line: re.sub(r":\d+", "", line.at)):
        if len(old) != len(new):
            for same in (attrgetter("at"), _figures):
                for line in list(new):
                    if match := next((o for o in old if same(o) == same(line)), None):
                        old.remove(match)
                        new.remove(line)
                        yield [match, line]
        for pair in map(list, zip_longest(*(sorted(side, key=_number) for side in (old, new)))):
            if all(pair):
                yield pair
            else:
                alone[pair[0] is None].append(pair[0] or pair[1])
    for old, new in _alike(*alone, lambda line: re.sub(r"^[^ :]+:", ":", line.at)):
        yield from map(list, zip_longest(old, new))


def _alike(
    before: Sequence[Any], now: Sequence[Any], name: Callable[[Any], str]
) -> Iterable[tuple[list[Any], list[Any]]]:
    """The lines of both reports that have the same name and kind."""
    alike: defaultdict[tuple, tuple[list, list]] = defaultdict(lambda: ([], []))
    for side, lines in enumerate((before, now)):
        for line in lines:
            alike[name(line), line.kind][side].append(line)
    return alike.values()


def _figures(line: LineRows | LineWork) -> tuple[float, ...]:
    if isinstance(line, LineWork):
        return (round(line.seconds, 9),)
    return tuple(
        round(line.sum_of(name), 9) for name in ("count", "bytes", "without_matmul", "exposed")
    )


def _number(line: LineRows | LineWork) -> int:
    number = re.search(r":(\d+)", line.at)
    return int(number[1]) if number else 0
