"""The figures of programs that were compiled but not run, and tables of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.compiled.programs import BUILT_IN, PLAIN
from benchmarks.measuring import report
from ringcoll.overlap import Report


@dataclass(frozen=True)
class Figures:
    """The cost of one program.

    Attributes:
        which: the keywords that name the program; they are the first columns of a table.
        total, exposed, communication: microseconds; 0 if its text has no times.
        hidden: by kind of collective, how many have a matmul under them, and how many there are.
    """

    which: dict[str, str]
    total: float
    exposed: float
    communication: float
    temporaries: int | None
    program_bytes: int | None
    compile_seconds: float
    timed: bool
    hidden: dict[str, tuple[int, int]]

    @property
    def algorithm(self) -> str:
        return self.which["algorithm"]

    def is_beside(self, other: "Figures") -> bool:
        """Whether the two differ only in the algorithm."""
        return self.which | {"algorithm": other.algorithm} == other.which


def hidden_of(seen: Report) -> dict[str, tuple[int, int]]:
    """By kind of collective, how many have a matmul under them, and how many there are."""
    hidden: Counter[str] = Counter()
    every: Counter[str] = Counter()
    for row in seen.rows:
        hidden[row.kind] += row.count - row.without_matmul
        every[row.kind] += row.count
    return {kind: (hidden[kind], every[kind]) for kind in every}


def print_timed(found: Sequence[Figures]) -> None:
    """Print programs with times, each with ratios to the built-in forms of the same program."""
    figures = (
        "total\nus", "exposed\n%", "above\n%", "plain\nover it", "built in\nover it",
        "temp\nMiB", "program\nKiB", "compile\ns",
    )  # fmt: skip
    table = report.table(*found[0].which, *figures)
    for one in found:
        same = [other for other in found if other.is_beside(one)]
        total = {other.algorithm: other.total for other in same}
        plain = next((other for other in same if other.algorithm == PLAIN), None)
        least = max(plain.total - plain.exposed, one.communication) if plain else None
        built_in = [total[name] for name in BUILT_IN if name in total]
        table.add_row(
            *one.which.values(),
            f"{one.total:.0f}",
            f"{100 * one.exposed / one.total:.1f}",
            f"{100 * (one.total / least - 1):.0f}" if least else "",
            f"{plain.total / one.total:.2f}" if plain else "",
            f"{min(built_in) / one.total:.2f}" if built_in else "",
            _mebibytes(one.temporaries),
            "" if one.program_bytes is None else f"{one.program_bytes / 2**10:.0f}",
            f"{one.compile_seconds:.1f}",
        )
    report.console().print(table)


def print_counted(found: Sequence[Figures]) -> None:
    """Print programs for GPUs, or without times, with counts of hidden collectives."""
    table = report.table(*found[0].which, "with a matmul under them", "temp\nMiB", "compile\ns")
    for one in found:
        table.add_row(
            *one.which.values(),
            ", ".join(f"{kind} {hidden} of {n}" for kind, (hidden, n) in one.hidden.items()),
            _mebibytes(one.temporaries),
            f"{one.compile_seconds:.1f}",
        )
    report.console().print(table)


def _mebibytes(n: int | None) -> str:
    return "" if n is None else f"{n / 2**20:.0f}"
