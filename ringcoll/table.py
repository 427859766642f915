"""The table behind `algorithm="auto"`: which algorithm where, as data.

A table is a file of rows. The first row that covers a call names its algorithm; where
none does, the answer is "lax", the built-in collective:

    {"measured_on": "8 virtual CPU devices, jax 0.10.2",
     "rows": [{"collective": "all_gather", "platform": "cpu", "algorithm": "ring",
               "bytes": [4194304, null], "dtypes": ["bfloat16", "float8"],
               "jax": ["0.12", null], "why": "..."}]}

Bounds are as in `range`: the first value is in, the last is not; null is open.

Two of the algorithms are no schedules. "lax" is the built-in collective. "lax_as_bits" is
that of the operand's bits, for collectives that only move data: where XLA would promote a
narrow float it sends integers of the same width (see `ringcoll.wire.as_bits`). An
all-reduce may be "ring+lax_as_bits": reduce-scatter by the ring, all-gather by that.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ringcoll import algorithms
from ringcoll.algorithms import ALL_REDUCES, build, names
from ringcoll.schedule import ScheduleError

#: The environment variable that names another file for `default_table`.
VARIABLE = "RINGCOLL_TABLE"
PLATFORMS = ("cpu", "gpu", "tpu", "*")

Bounds = tuple[int | None, int | None]

LAX, LAX_AS_BITS = BUILT_INS = ("lax", "lax_as_bits")
#: What is added to the name of a reduce-scatter.
GATHERED_AS_BITS = "+" + LAX_AS_BITS


def choices(collective: str) -> tuple[str, ...]:
    """All that a collective can run by: the names of its schedules, and the built-ins.

    Raises:
        ValueError: no such collective.
    """
    as_bits: tuple[str, ...] = ()
    if collective in ("all_gather", "all_to_all"):
        as_bits = (LAX_AS_BITS,)
    elif collective in ALL_REDUCES:
        as_bits = tuple(name + GATHERED_AS_BITS for name in names("psum_scatter"))
    return (*names(collective), LAX, *as_bits)


def reducing_half(algorithm: str) -> str:
    """The algorithm itself, or that of the reduce-scatter of "ring+lax_as_bits"."""
    return algorithm.removesuffix(GATHERED_AS_BITS)


@dataclass(frozen=True)
class Row:
    """The algorithm of one collective on one platform, within half-open bounds.

    Attributes:
        collective: one of `algorithms.COLLECTIVES`; "psum" stands for pmean, pmax and pmin.
        platform: one of `PLATFORMS`; "*" is any.
        algorithm: one of `choices(collective)`.
        ranks: of the axis, or of all axes together.
        bytes: of one rank's operand.
        dtypes: names or beginnings of names, such as "float8"; none is all. (XLA on CPU
            sends narrow floats as wide ones, but not narrow integers.)
        jax: versions of JAX, such as ("0.12", None). (Newer ones promote less.)
        why: a comment.

    Raises:
        ValueError: with the field, its value and the cure.
    """

    collective: str
    platform: str
    algorithm: str
    ranks: Bounds = (None, None)
    bytes: Bounds = (None, None)
    dtypes: tuple[str, ...] = ()
    jax: tuple[str | None, str | None] = (None, None)
    why: str = ""

    def __post_init__(self) -> None:
        for name in ("collective", "platform", "algorithm", "why"):
            _check_string(name, getattr(self, name))
        if self.collective in ("pmean", "pmax", "pmin"):
            raise ValueError(f"collective: {self.collective!r} runs by the rows of 'psum'")
        _check_choice("algorithm", self.algorithm, choices(self.collective))
        _check_choice("platform", self.platform, PLATFORMS)
        for name, order in (("ranks", _number), ("bytes", _number), ("jax", _version)):
            # JSON has lists only, and a row of lists could not be hashed.
            object.__setattr__(self, name, _bounds(name, getattr(self, name), order))
        if not isinstance(self.dtypes, tuple | list):
            raise ValueError(f"dtypes: {self.dtypes!r} is not a list of names")
        for dtype in self.dtypes:
            _check_string("dtypes", dtype)
        object.__setattr__(self, "dtypes", tuple(self.dtypes))

    def covers(
        self, collective: str, platform: str, ranks: int, nbytes: int, dtype: str, jax: str
    ) -> bool:
        """Whether the row is about such a call."""
        return (
            self.collective == collective
            and self.platform in (platform, "*")
            and _within(ranks, self.ranks, _number)
            and _within(nbytes, self.bytes, _number)
            and _within(jax, self.jax, _version)
            and (not self.dtypes or dtype.startswith(self.dtypes))
        )


@dataclass(frozen=True)
class Table:
    """Rows, of which the first that covers a call decides.

    Attributes:
        rows: from the particular to the general.
        measured_on: where and with what, in words.
    """

    rows: tuple[Row, ...] = ()
    measured_on: str = ""

    def __post_init__(self) -> None:
        _check_string("measured_on", self.measured_on)

    def pick(
        self, collective: str, platform: str, ranks: int, nbytes: int, dtype: str, jax: str
    ) -> str:
        """The algorithm of the first row that covers a call, or "lax".

        A row is passed over if its algorithm does not exist for so many ranks.

        Args:
            collective, platform: as in `Row`; "gpu" for every maker's.
            ranks: of all axes together.
            nbytes: of one rank's operand.
            dtype: the name of its dtype.
            jax: the version of JAX.

        Raises:
            ValueError: no such collective.
        """
        names(collective)  # a misspelt one would match no row, and be LAX in silence
        for row in self.rows:
            covers = row.covers(collective, platform, ranks, nbytes, dtype, jax)
            if covers and runs(collective, row.algorithm, (ranks,)):
                return row.algorithm
        return LAX

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Table":
        """The table in a file.

        Raises:
            ValueError: as `from_json`, with the path.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a file, one row a line."""
        rows = ",\n".join(f"  {json.dumps(_without_defaults(row))}" for row in self.rows)
        text = f'{{"measured_on": {json.dumps(self.measured_on)}, "rows": [\n{rows}\n]}}\n'
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def from_json(cls, text: str) -> "Table":
        """The table in a JSON text.

        Raises:
            ValueError: with the number of the row, the field, its value and the cure.
        """
        table = json.loads(text)  # its JSONDecodeError is a ValueError with the line
        _check_fields(table, cls, "the table")
        if not isinstance(table.get("rows"), list):
            raise ValueError(f"rows: {table.get('rows')!r} is not a list of rows")
        rows = []
        for number, row in enumerate(table["rows"], 1):
            try:
                _check_fields(row, Row, "the row")
                rows.append(Row(**row))
            except ValueError as error:
                raise ValueError(f"row {number}: {error}") from error
        return cls(tuple(rows), table.get("measured_on", ""))


#: What may be given as `algorithm=`: what `algorithms` knows (names, "auto"
#: and the built-ins among the strings), or a table that picks.
Algorithm = algorithms.Algorithm | Table


@lru_cache(maxsize=1)
def default_table() -> Table:
    """The table that comes with the package, or the file that RINGCOLL_TABLE names.

    Raises:
        ValueError, OSError: as `Table.load`.
    """
    if path := os.environ.get(VARIABLE):
        return Table.load(path)
    return Table.from_json(files("ringcoll").joinpath("table.json").read_text(encoding="utf-8"))


def runs(collective: str, algorithm: str, shape: tuple[int, ...]) -> bool:
    """Whether there is such an algorithm on axes of these sizes."""
    algorithm = reducing_half(algorithm)
    if algorithm in BUILT_INS:
        return True
    try:
        build(collective, algorithm, shape)
    except ScheduleError:
        return False
    return True


def _within(value: Any, bounds: tuple[Any, Any], order: Callable[[Any], Any]) -> bool:
    first, end = bounds
    return (first is None or order(first) <= order(value)) and (
        end is None or order(value) < order(end)
    )


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is neither null nor a whole number from 0")
    return value


def _version(value: Any) -> tuple[int, ...]:
    """Its numbers: 0.12 and 0.12.0 are the same, and 0.12.1rc1 is 0.12.1."""
    numbers = r"(\d+(?:\.\d+)*?)(?:\.0)*"
    found = re.fullmatch(numbers + r"(?:(?:a|b|rc|\.dev|\.post|\+).*)?", str(value))
    if not found or not isinstance(value, str):
        raise ValueError(f"{value!r} is neither null nor a version such as '0.12'")
    return tuple(map(int, found[1].split(".")))


def _without_defaults(row: Row) -> dict[str, Any]:
    return {f.name: value for f in fields(row) if (value := getattr(row, f.name)) != f.default}


def _check_string(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name}: {value!r} is not a string")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: there is no {value!r}; choose from {', '.join(choices)}")


def _bounds(name: str, bounds: Any, order: Callable[[Any], Any]) -> tuple[Any, Any]:
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError(f"{name}: {bounds!r} is not a pair; write [first, end], null if open")
    try:
        places = [order(bound) for bound in bounds if bound is not None]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    first, end = bounds
    if len(places) == 2 and places[0] >= places[1]:
        raise ValueError(f"{name}: {first} to {end} covers nothing; the end is not in it")
    return first, end


def _check_fields(given: Any, kind: type, what: str) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{what} is {given!r}, not an object of fields")
    known = {field.name: field for field in fields(kind)}
    for name in given:
        _check_choice("field", name, tuple(known))
    for name, field in known.items():
        if name not in given and field.default is MISSING:
            raise ValueError(f"{name}: is missing")
