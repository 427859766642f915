"""Plans of collectives: the measured row that covers a call, or the built-in."""

from functools import lru_cache
from math import prod

import numpy as np

from ringcoll.choose.plan import Plan
from ringcoll.choose.table import Algorithm, Table
from ringcoll.costs.wire import Wire
from ringcoll.schedules.registry import EXCHANGES, LAX
from ringcoll.schedules.tree import is_balanced


@lru_cache(maxsize=1024)
def plan(
    collective: str,
    table: Table,
    platform: str,
    shape: tuple[int, ...],
    elements: int,
    dtype: np.dtype,
    jax: str,
    *,
    hosts: int = 1,
    ranks_a_host: int | None = None,
    wire: Wire | None = None,
    by_tree: bool = False,
) -> Plan:
    """The plan of a collective whose algorithm a table picks. Equal calls are decided only once.

    Args:
        collective, platform: as in `TableRow`.
        table: the table.
        shape: the sizes of the axes of ranks.
        elements, dtype: the number of elements of one rank's operand, and their dtype.
        jax, hosts, ranks_a_host: as for `Table.row`.
        wire: what messages hold in place of floats.
        by_tree: whether sums are added by the balanced tree.

    Raises:
        ValueError: there is no such collective.

    >>> from ringcoll.choose.collectives import plan
    >>> table = ringcoll.Table.from_json('''{"rows": [{"collective": "psum", "platform": "cpu",
    ...     "algorithm": "ring", "hosts": [2, null], "why": "half the time of lax"}]}''')
    >>> print(plan("psum", table, "cpu", (4,), 1024, jnp.dtype("float32"), "0.12", hosts=4))
    ring: row 1 of the table: half the time of lax
    """
    what, nbytes, name = collective, elements * dtype.itemsize, dtype.name
    if wire:
        # If the owner adds all contributions, a sum is an exchange of bytes: by the built-in, or by
        # a schedule of one round. Both encode each contribution only once.
        what = what if what in ("all_gather", *EXCHANGES) else "all_to_all"
        nbytes, name = wire.nbytes(elements), "uint8"
    call = what, platform, prod(shape), nbytes, name, jax
    row = table.row(*call, hosts=hosts, ranks_a_host=ranks_a_host)
    if row is None:
        return Plan(LAX, why="no row covers it: the built-in")
    if by_tree and not adds_by_tree(row.algorithm, collective, shape):
        return Plan(LAX, why=f"{row.algorithm} does not add by the balanced tree")
    algorithm = "direct" if what != collective and row.algorithm != LAX else row.algorithm
    number = table.rows.index(row) + 1
    return Plan(algorithm, why=f"row {number} of the table" + (f": {row.why}" if row.why else ""))


def adds_by_tree(algorithm: Algorithm, collective: str, shape: tuple[int, ...]) -> bool:
    """Whether a collective adds by the balanced tree; its schedule says so.

    The built-in does: it exchanges contributions, which ringcoll then adds.
    """
    # An all_gather adds in its gradient, which is a psum_scatter.
    collective = "psum_scatter" if collective == "all_gather" else collective
    return (
        isinstance(algorithm, Table)
        or algorithm in ("auto", LAX)
        or is_balanced(collective, algorithm, shape)
    )
