"""Make a machine from the output of nccl-tests: read it, fit a machine, and print its error."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ringcoll.costs.curves import fit_curve
from ringcoll.costs.model import Sample, fit
from ringcoll.costs.places import MOST_RANKS
from ringcoll.costs.prediction import PERMUTE
from ringcoll.io.strict_json import shown
from ringcoll.schedules.registry import COLLECTIVES, in_lax

#: The fewest sizes from which both the cost of a start and the cost of a byte can be found.
ENOUGH = 4
_KNOWN = (*COLLECTIVES, PERMUTE)
#: Lines of nccl-tests' output: the test, a rank, where ranks are cut off, the columns.
_TEST = re.compile(r"#(?: Collective test starting:)?\s+(\w+?)_perf\w*\s*$")
_RANK = re.compile(r"#\s+Rank\s+(\d+)(?:\s+Group\s+(\S+))?(?:.*?\bon\s+(\S+))?")
_CUT = re.compile(r"(#.*)?\.\.\.\s*$")
_COLUMNS = re.compile(r"(.*?)#\s+size\s+count\s+type")
_NAMES = {"alltoall": "all_to_all", "sendrecv": PERMUTE, "broadcast": "pbroadcast"}


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement, and the number of its line."""

    collective: str
    bytes: float
    ranks: int
    seconds: float
    hosts: int
    line: int


def read_timings(text: str) -> list[Timing]:
    """Read the output of nccl-tests.

    Raises:
        ValueError: it is not such output; the message has the line and the cure.
    """
    text = text.removeprefix("\ufeff")  # a byte order mark
    if not text.strip():
        raise ValueError("line 1: the file is empty; give a table of measurements")
    lines = text.splitlines()
    if not any(map(_COLUMNS.match, lines)):
        raise ValueError(
            "line 1: nccl-tests' output without its header, '#  size  count  type ...', or no such "
            "output (its JSON is not read); give all of it, with every '#'"
        )
    timings = list(_of_nccl_tests(lines))
    if not timings:
        raise ValueError("line 1: no measurement; give a time in each line")
    return timings


def fit_machine(name: str, timings: Sequence[Timing]) -> tuple[dict[str, Any], list[str]]:
    """Fit a machine: the contents of its file, and lines that describe the fit.

    Collectives get a curve for each number of ranks. Rates come from permutes (sendrecv); without
    these there are none.

    Args:
        name: the name of the machine.
        timings: measurements; each collective and number of ranks needs `ENOUGH` sizes.

    Raises:
        ValueError: there are too few sizes to find both the start of a message and its rate.
    """
    groups: dict[tuple[str, int, int], list[Timing]] = defaultdict(list)
    for one in timings:
        groups[one.collective, one.ranks, one.hosts].append(one)
    curves, lines = [], []
    for (collective, ranks, hosts), group in sorted(groups.items()):
        sizes = sorted({one.bytes for one in group})
        if len(sizes) < ENOUGH:
            raise ValueError(
                f"line {group[0].line}: {collective} on {ranks} ranks has {len(sizes)} sizes; "
                f"measure {ENOUGH} or more, to tell a start from a rate"
            )
        points = [(one.bytes, one.seconds) for one in group]
        curves.append(curve_of(collective, ranks, hosts, points, "measured by the user"))
        lines.append(
            f"{collective} on {ranks} ranks: {len(group)} points, "
            f"{len(curves[-1]['knots'])} knots, median error {curves[-1]['error']:.1%}"
        )
    rates, words = _rates([one for one in timings if one.collective == PERMUTE])
    most = max(one.ranks // one.hosts for one in timings)
    data = {
        "name": name,
        "what": "measured by the user",
        "aliases": [],
        "axes": 0,
        "ranks_a_host": max(most, 2),
        "rates": rates,
        "curves": curves,
    }
    return data, [*lines, words, f"{data['ranks_a_host']} ranks a host"]


def curve_of(
    collective: str, ranks: int, hosts: int, points: Sequence[tuple[float, float]], source: str
) -> dict[str, Any]:
    """Fit a curve to points of bytes and seconds, in the form that a machine's file holds."""
    curve, error = fit_curve(points)
    return {
        "collective": collective,
        "ranks": ranks,
        "hosts": hosts,
        "points": len(points),
        "error": round(error, 4),
        "source": source,
        "knots": [[int(size), float(f"{t:.4g}")] for size, t in curve.knots],
    }


def _rates(permutes: Sequence[Timing]) -> tuple[dict[str, Any], str]:
    """The rates of messages, as a machine's file has them, and the fit in words."""
    if not permutes:
        return {}, "no permute was measured, so messages have no price"
    model, error = fit(Sample(1, one.bytes, 0, one.seconds) for one in permutes)
    if not model.beta:
        raise ValueError(
            f"line {permutes[0].line}: the times do not grow with the bytes, so there is no rate; "
            "measure larger sizes too"
        )
    basis = f"fitted to permutes, median error {error:.0%}"
    rates = {
        "start_seconds": [model.alpha, basis],
        "link_bytes_per_second": [1 / model.beta, basis],
    }
    words = f"{basis}: {model.alpha * 1e6:.3g} us a message, {1e-9 / model.beta:.4g} GB/s"
    return rates, words


def _of_nccl_tests(lines: Sequence[str]) -> Iterator[Timing]:
    """Read nccl-tests' output. It takes the out-of-place time of each line, the first of the two.

    Several outputs may follow each other; each has its own test and ranks: those of one group, if
    groups measured at the same time. What a launcher writes before each line is left out. It may
    differ in numbers only, such as those of a time.

    Raises:
        ValueError: an output is not complete, or a result is wrong.
    """
    headers = filter(None, map(_COLUMNS.match, lines))
    before = {re.sub(r"\d+", r"\\d+", re.escape(found[1])) for found in headers}
    if len(before) > 1:
        raise ValueError(
            "line 1: not every '#  size  count  type ...' has the same words before it; leave out "
            "what the launcher writes before each line"
        )
    launcher = re.compile(f"^{before.pop()}")
    name, groups, columns, in_table = "", defaultdict[str, list[str]](list), list[str](), False
    for number, line in enumerate((launcher.sub("", line) for line in lines), 1):
        cells, rank = line.split(), _RANK.match(line)
        if in_table and line.startswith("#"):  # the end of an output
            name, groups, columns, in_table = "", defaultdict(list), [], False
        seen = sum(map(len, groups.values()))
        if test := _TEST.match(line):
            name, groups = _NAMES.get(test[1], test[1]), defaultdict(list)
        elif (rank and int(rank[1]) != seen) or (seen and not columns and _CUT.match(line)):
            raise ValueError(
                f"line {number}: rank {seen} is missing or cut off; give every line '#  Rank ...' "
                "of an output, from 0 and in order"
            )
        elif rank:
            groups[rank[2] or ""].append(rank[3] or "")
        elif _COLUMNS.match(line):
            columns = cells[1:]
        elif cells and cells[0].isdigit():
            counts = {(len(hosts), len(set(hosts))) for hosts in groups.values()}
            _check_nccl_tests(number, name, counts, columns, cells)
            in_table = True
            if int(cells[0]):  # nccl-tests prints 0 for sizes of fewer bytes than ranks
                yield _timing(number, name, cells[0], cells[columns.index("time")], *counts)


def _check_nccl_tests(
    number: int, name: str, counts: Set[Any], columns: Sequence[str], cells: Sequence[str]
) -> None:
    """Refuse a line of times, or what is above it; `counts` are the ranks and hosts of a group.

    Raises:
        ValueError: its test, ranks or header is missing; groups differ; it is short; it is wrong.
    """
    if not name:
        raise ValueError(
            f"line {number}: no test is named above (all_gather_perf and so on); put a line "
            "`# all_gather_perf` above the ranks"
        )
    if not counts:
        raise ValueError(
            f"line {number}: no line '#  Rank  0 ...' above gives the number of ranks; keep "
            "the lines of ranks in each output"
        )
    if len(counts) > 1:
        raise ValueError(
            f"line {number}: the times of a split run are means over its groups, and these differ "
            f"(ranks and hosts: {shown(sorted(counts))}); measure groups that are alike"
        )
    if "time" not in columns or len(cells) < len(columns):
        raise ValueError(
            f"line {number}: {len(cells)} columns; nccl-tests prints size, count, type, redop, "
            "root, time and more, and their names in a header"
        )
    wrong = {cell for title, cell in zip(columns, cells, strict=False) if title == "#wrong"}
    if wrong - {"0", "N/A"}:
        raise ValueError(
            f"line {number}: #wrong is not 0: the results are wrong, so the time means nothing; "
            "measure again, or remove the line"
        )


def _timing(line: int, test: str, size: str, time: str, places: tuple[int, int]) -> Timing:
    """Check a measurement; `places` are the numbers of ranks and of hosts.

    Raises:
        ValueError: a value is not known, not a number, or out of range.
    """
    name, (ranks, hosts) = in_lax(test), places
    if name not in _KNOWN:
        raise ValueError(
            f"line {line}: collective {shown(test)} is not known; there are {', '.join(_KNOWN)}"
        )
    try:
        timing = Timing(name, float(size), ranks, float(time) * 1e-6, hosts, line)
    except ValueError:
        raise ValueError(f"line {line}: {shown([size, time])}: not a number") from None
    if not (0 < timing.bytes < 2**63 and 0 < timing.seconds < 1e9):
        raise ValueError(
            f"line {line}: {timing.bytes:g} bytes, {timing.seconds:g} s: give bytes and a time "
            "above 0"
        )
    if not 2 <= ranks <= MOST_RANKS:
        raise ValueError(f"line {line}: {ranks} ranks; measure 2 to {MOST_RANKS}")
    return timing
