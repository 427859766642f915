"""Plans of collectives: the measured row that covers a call, or the built-in."""

from functools import lru_cache

from ringcoll.choose.plan import Plan
from ringcoll.choose.table import Table
from ringcoll.schedules.registry import LAX


@lru_cache(maxsize=1024)
def plan(
    collective: str,
    nbytes: int,
    dtype: str,
    *,
    table: Table,
    platform: str,
    ranks: int,
    jax: str,
    hosts: int = 1,
    ranks_a_host: int | None = None,
) -> Plan:
    """The plan of a collective whose algorithm a table picks. Equal calls are decided only once.

    Args:
        collective, platform: as in `TableRow`.
        nbytes, dtype: the bytes of one rank's operand, and the name of their dtype.
        table: the table.
        ranks: the number of ranks.
        jax, hosts, ranks_a_host: as for `Table.row`.

    Raises:
        ValueError: there is no such collective.

    >>> from ringcoll.choose.collectives import plan
    >>> table = ringcoll.Table.from_json('''{"rows": [{"collective": "psum", "platform": "cpu",
    ...     "algorithm": "ring", "hosts": [2, null], "why": "half the time of lax"}]}''')
    >>> call = dict(table=table, platform="cpu", ranks=4, jax="0.12", hosts=4)
    >>> print(plan("psum", 4096, "float32", **call))
    ring: row 1 of the table: half the time of lax
    """
    call = collective, platform, ranks, nbytes, dtype, jax
    row = table.row(*call, hosts=hosts, ranks_a_host=ranks_a_host)
    if row is None:
        return Plan(LAX, why="no row covers it: the built-in")
    number = table.rows.index(row) + 1
    why = f"row {number} of the table" + (f": {row.why}" if row.why else "")
    return Plan(row.algorithm, why=why)
