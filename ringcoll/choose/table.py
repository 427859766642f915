"""The table behind `algorithm="auto"`: the measured choice of algorithm, as data.

A table is a file of rows. The first row that covers a call names its algorithm. If no row does,
the answer is "lax", the built-in collective:

    {"measured_on": "8 virtual CPU devices, jax 0.10.2",
     "rows": [{"collective": "all_gather", "platform": "cpu", "algorithm": "ring",
               "hosts": [1, 2], "bytes": [4194304, null], "dtypes": ["bfloat16", "float8"],
               "jax": ["0.12", null], "why": "..."}]}

Bounds are as in `range`: the first value is included, the last is not, and null means no bound. A
host is a process of JAX: ranks of one process share its memory; between processes there is a
network.

On CPU, if a table picks "ring" for an all-reduce of narrow floats, only its reduce-scatter is a
ring: the built-in all-gather of integers is faster (see `ringcoll.runtime.hop.moved`).
"""

import json
import os
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ringcoll.io.files import write
from ringcoll.io.strict_json import (
    Bounds,
    check_choice,
    check_dtype,
    check_fields,
    check_string,
    checked,
    number,
    parsed,
    shown,
    version,
    within,
)
from ringcoll.schedules.registry import LAX, ScheduleLike, build, listed_name, names
from ringcoll.schedules.schedule import SizeError

#: The environment variable that names another file for `default_table`.
VARIABLE = "RINGCOLL_TABLE"
PLATFORMS = ("cpu", "gpu", "tpu", "*")


def choices(collective: str) -> tuple[str, ...]:
    """The names of the algorithms of a collective: its schedules, and the built-in.

    Raises:
        ValueError: there is no such collective.
    """
    return (*names(collective), LAX)


@dataclass(frozen=True)
class TableRow:
    """The algorithm of one collective on one platform, within half-open bounds.

    Attributes:
        collective: one of `algorithms.COLLECTIVES`; "psum" stands for pmean, pmax and pmin.
        platform: one of `PLATFORMS`; "*" is any.
        algorithm: an algorithm of the collective; it becomes the name in `choices(collective)`.
        ranks: the number of ranks on the axis, or on all axes together.
        hosts: the number of hosts of these ranks; a process of JAX counts as one.
        ranks_a_host: the most of these ranks that one host has.
        bytes: the bytes of one rank's operand.
        dtypes: names or beginnings of names, such as "float8"; an empty list is all. (XLA on CPU
            sends narrow floats as wide ones, but not narrow integers.)
        jax: versions of JAX, such as ("0.12", None). (Newer ones promote less.)
        why: a comment.

    Raises:
        ValueError: a field is wrong; the message has the field, its value and the cure.
    """

    collective: str
    platform: str
    algorithm: str
    ranks: Bounds = (None, None)
    hosts: Bounds = field(default=(None, None), kw_only=True)
    ranks_a_host: Bounds = field(default=(None, None), kw_only=True)
    bytes: Bounds = (None, None)
    dtypes: tuple[str, ...] = ()
    jax: tuple[str | None, str | None] = (None, None)
    why: str = ""

    def __post_init__(self) -> None:
        for name in ("collective", "platform", "algorithm", "why"):
            check_string(name, getattr(self, name))
        if self.collective in ("pmean", "pmax", "pmin"):
            raise ValueError(f"collective: {self.collective!r} runs by the rows of 'psum'")
        known = choices(self.collective)
        object.__setattr__(self, "algorithm", listed_name(self.collective, self.algorithm))
        check_choice("algorithm", self.algorithm, known)
        check_choice("platform", self.platform, PLATFORMS)
        orders = dict.fromkeys(("ranks", "hosts", "ranks_a_host", "bytes"), number)
        for name, order in {**orders, "jax": version}.items():
            # JSON has only lists, and a row of lists could not be hashed.
            object.__setattr__(self, name, checked(name, getattr(self, name), order))
        if not isinstance(self.dtypes, tuple | list):
            raise ValueError(f"dtypes: {shown(self.dtypes)} is not a list of names")
        for dtype in self.dtypes:
            check_dtype("dtypes", dtype)
        object.__setattr__(self, "dtypes", tuple(self.dtypes))


@dataclass(frozen=True)
class Table:
    """Rows; the first row that covers a call decides.

    Attributes:
        rows: the rows, from special to general.
        measured_on: the machine and the versions of the measurements, in words.
    """

    rows: tuple[TableRow, ...] = ()
    measured_on: str = ""

    def __post_init__(self) -> None:
        check_string("measured_on", self.measured_on)
        object.__setattr__(self, "rows", tuple(self.rows))  # a list could not be hashed

    def pick(self, *call: Any, **placement: Any) -> str:
        """The algorithm of the row that decides, or "lax"; the arguments are those of `row`."""
        row = self.row(*call, **placement)
        return row.algorithm if row else LAX

    def row(
        self,
        collective: str,
        platform: str,
        ranks: int,
        nbytes: int,
        dtype: str,
        jax: str,
        *,
        hosts: int = 1,
        ranks_a_host: int | None = None,
    ) -> TableRow | None:
        """The first row that covers a call; None: the built-in runs.

        A row is skipped if its algorithm cannot run on this number of ranks.

        Args:
            collective, platform: as in `TableRow`; "gpu" is the GPUs of every vendor.
            ranks: the number of ranks on all axes together.
            nbytes: the bytes of one rank's operand.
            dtype: the name of its dtype.
            jax: the version of JAX.
            hosts: the number of hosts of the ranks.
            ranks_a_host: the most ranks that one host has; None: all hosts have equally many.

        Raises:
            ValueError: there is no such collective.
        """
        names(collective)  # a misspelt name would match no row, and silently give LAX
        local = -(-ranks // hosts) if ranks_a_host is None else ranks_a_host
        for row in self.rows:
            if (
                row.collective == collective
                and row.platform in (platform, "*")
                and within(ranks, row.ranks, number)
                and within(hosts, row.hosts, number)
                and within(local, row.ranks_a_host, number)
                and within(nbytes, row.bytes, number)
                and within(jax, row.jax, version)
                and (not row.dtypes or dtype.startswith(row.dtypes))
                and runs(collective, row.algorithm, (ranks,))
            ):
                return row
        return None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Table":
        """Read the table in a file.

        Raises:
            ValueError: as `from_json`; the message has the path.
            OSError: the file cannot be read.
        """
        try:
            if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
                raise ValueError("is not a regular file")  # reading a pipe may block for ever
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a file, one row per line. The file is written whole or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        write(path, self.to_json())

    def to_json(self) -> str:
        """The table as the text of a file."""
        rows = ",\n".join(f"  {json.dumps(_without_defaults(row))}" for row in self.rows)
        return f'{{"measured_on": {json.dumps(self.measured_on)}, "rows": [\n{rows}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> "Table":
        """Read the table in a JSON text.

        Raises:
            ValueError: a row is wrong; the message has its number, the field, the value and the
                cure.
        """
        table = parsed(text)
        check_fields(table, cls, "the table")
        if not isinstance(table.get("rows"), list):
            raise ValueError(f"rows: {shown(table.get('rows'))} is not a list of rows")
        rows = []
        for place, row in enumerate(table["rows"], 1):
            try:
                check_fields(row, TableRow, "the row")
                rows.append(TableRow(**row))
            except ValueError as error:
                raise ValueError(f"row {place}: {error}") from error
        return cls(tuple(rows), table.get("measured_on", ""))


#: What a caller may pass as `algorithm=`: an algorithm (as a string also "auto" or "lax"),
#: or a table that picks one.
Algorithm = ScheduleLike | Table


@lru_cache(maxsize=1)
def default_table() -> Table:
    """The table that comes with the package, or the file that RINGCOLL_TABLE names.

    Raises:
        ValueError, OSError: as `Table.load`.
    """
    if path := os.environ.get(VARIABLE):
        try:
            return Table.load(path)
        except OSError as error:
            why = f"{VARIABLE}: {error.strerror}"
            raise type(error)(error.errno, why, error.filename) from error
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {error}") from error
    return Table.from_json(
        files("ringcoll.choose").joinpath("table.json").read_text(encoding="utf-8")
    )


def runs(collective: str, algorithm: str, shape: tuple[int, ...]) -> bool:
    """Whether a collective can run by this algorithm on axes of these sizes."""
    if algorithm == LAX:
        return True
    try:
        build(collective, algorithm, shape)
    except SizeError:  # only this: a wrong algorithm must not be silently replaced
        return False
    return True


def _without_defaults(row: TableRow) -> dict[str, Any]:
    return {f.name: value for f in fields(row) if (value := getattr(row, f.name)) != f.default}
