"""Plans of collectives: the measured row that covers a call, or the built-in."""

from functools import lru_cache
from typing import Any

from ringcoll.choose.plan import Plan
from ringcoll.choose.table import Table
from ringcoll.schedules.registry import LAX


@lru_cache(maxsize=1024)
def plan(table: Table, *call: Any, **placement: Any) -> Plan:
    """The plan of a collective whose algorithm a table picks. Equal calls are decided only once.

    The other arguments are those of `Table.row`.

    >>> from ringcoll.choose.collectives import plan
    >>> table = ringcoll.Table.from_json('''{"rows": [{"collective": "psum", "platform": "cpu",
    ...     "algorithm": "ring", "hosts": [2, null], "why": "half the time of lax"}]}''')
    >>> print(plan(table, "psum", "cpu", 4, 4096, "float32", "0.12", hosts=4))
    ring: row 1 of the table: half the time of lax
    """
    row = table.row(*call, **placement)
    if row is None:
        return Plan(LAX, why="no row covers it: the built-in")
    number = table.rows.index(row) + 1
    why = f"row {number} of the table" + (f": {row.why}" if row.why else "")
    return Plan(row.algorithm, why=why)
