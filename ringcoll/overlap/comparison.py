"""Compare two reports, line by line."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from operator import attrgetter

from ringcoll.io.text import bytes_in_words
from ringcoll.overlap.report import Report
from ringcoll.overlap.rows import LineRows, by_line, table_lines


def compare(before: Report, now: Report) -> str:
    """What changed between two reports, by line of source; the last line has the totals.

    An edit moves lines, so lines of the same file that call the same function are matched in order.
    If one report has more of these, lines with the same number are matched first.

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
    for pair in _pairs(by_line(before.rows), by_line(now.rows)):
        old, new = (scale * line.sum_of(now.figure) if line else 0.0 for line in pair)
        cells = shown.format(old), shown.format(new)
        change = "appeared" if not pair[0] else "went" if not pair[1] else ""
        if cells[0] != cells[1]:
            change = change or ("grew" if new > old else "shrank")
        line, sent = pair[1] or pair[0], [_sent(line) for line in pair]
        name = line.name if line else ""
        if all(pair) and sent[0] != sent[1]:
            change, name = change or "sends", f"{name}, {sent[1]}, before {sent[0]}"
        if change and line:
            changes.append((new - old, (change, *cells, line.kind, name)))
        else:
            same += 1
    yield f"compared with {before.title}:"
    yield ""
    if changes:
        heads = "change", f"before{unit}", f"now{unit}", "collective", "line"
        changes.sort(key=lambda change: -change[0])
        yield from table_lines([heads, *(cells for _, cells in changes)])
        yield ""
    if same:
        yield f"{same} line{'s' * (same > 1)} as before"
    faster = f", {before.total / now.total:.2f} times as fast" if now.total else ""
    yield f"before: {before.summary}; now: {now.summary}{faster}"


def _sent(line: LineRows | None) -> str:
    """How often a line sends, and how much each time: "8 x 2M"."""
    return f"{line.sum_of('count')} x {bytes_in_words(line.mean_of('bytes'))}" if line else ""


def _pairs(before: Sequence[LineRows], now: Sequence[LineRows]) -> Iterator[list[LineRows | None]]:
    """The same line in both reports; None for a report that does not have it."""
    alike: defaultdict[tuple, tuple[list[LineRows], ...]] = defaultdict(lambda: ([], []))
    for side, lines in enumerate((before, now)):
        for line in lines:
            alike[re.sub(r":\d+", "", line.at), line.kind][side].append(line)
    for old, new in alike.values():
        if len(old) != len(new):
            for same in (attrgetter("at"), _figures):
                for line in list(new):
                    if match := next((o for o in old if same(o) == same(line)), None):
                        old.remove(match)
                        new.remove(line)
                        yield [match, line]
        yield from map(list, zip_longest(*(sorted(side, key=_number) for side in (old, new))))


def _figures(line: LineRows) -> tuple[float, ...]:
    return tuple(round(line.sum_of(name), 9) for name in ("count", "bytes", "bare", "exposed"))


def _number(line: LineRows) -> int:
    number = re.search(r":(\d+)", line.at)
    return int(number[1]) if number else 0
