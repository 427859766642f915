"""Tables as the CSV of NCCL's example tuner, and back.

    # colltype,minbytes,maxbytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff
    allreduce,0,65535,ring,ll,-1,1,8,-1,-1

As in a `Table`, the first line that covers a call decides. Sizes are NCCL's: the operand or the
result of a rank, whichever is larger. Both ends of a range are included; -1 is any. The only
algorithm of NCCL that a table knows is the ring. For others a table has "lax", the built-in
collective, which is NCCL.
"""

from typing import NamedTuple

from ringcoll.collectives.table import LAX, Table, TableRow
from ringcoll.io.bounds import Bounds

_COLLECTIVES = {"allgather": "all_gather", "reducescatter": "psum_scatter", "allreduce": "psum"}
_OURS = {ours: theirs for theirs, ours in _COLLECTIVES.items()}
_OTHERS = ("broadcast", "reduce")
_ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
_PROTOCOLS = ("ll", "ll128", "simple")
_COLUMNS = (
    *("colltype", "minbytes", "maxbytes", "algorithm", "protocol", "channels"),
    *("nNodes", "nRanks", "numPipeOps", "regBuff"),
)
_LEAST_COLUMNS = 8  # older files do not have numPipeOps and regBuff
_MOST = 2**62
#: A line is for one number of ranks. A row for several numbers becomes several lines, at most
#: this many.
_MOST_LINES = 64


class Tuned(NamedTuple):
    """A table that was read, and words about what it leaves out."""

    table: Table
    left_out: tuple[str, ...]


class TunerText(NamedTuple):
    """A text that was written, and words about what it leaves out."""

    text: str
    left_out: tuple[str, ...]


def from_nccl_tuner(text: str, file: str = "NCCL tuner CSV") -> Tuned:
    """Read the table in the text of a tuner's file.

    A table does not have protocols and channels; they go into the `why` of its rows. A line that a
    table cannot express is left out, with the reason: a line for another collective, for a number
    of pipelined operations or registered buffers, or for bytes of an all-gather on any number of
    ranks.

    Args:
        text: CSV.
        file: its name, for errors.

    Raises:
        ValueError: a line is wrong; the message has its number.

    >>> tuned = formats.from_nccl_tuner("allreduce,0,65535,ring,ll,-1,1,8,-1,-1")
    >>> tuned.table.pick("psum", "gpu", 8, 4096, "float32", "0.12")
    'ring'
    """
    rows, left_out = [], []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line or line.lower().startswith("colltype,"):
            continue
        where = f"{file}, line {number}"
        try:
            rows.append(_row(line))
        except _CannotSay as reason:
            left_out.append(f"{where}: left out: {reason}")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return Tuned(Table(tuple(rows), f"read from {file}"), tuple(left_out))


class _CannotSay(Exception):
    """A line or a row that the other format cannot express."""


def _row(line: str) -> TableRow:
    cells = [cell.strip() for cell in line.split(",")]
    if not _LEAST_COLUMNS <= len(cells) <= len(_COLUMNS):
        raise ValueError(f"{len(cells)} columns; there are {', '.join(_COLUMNS)}")
    cell_of = dict(zip(_COLUMNS, cells, strict=False))
    collective, algorithm = cell_of["colltype"].lower(), cell_of["algorithm"].lower()
    _check("colltype", collective, (*_COLLECTIVES, *_OTHERS))
    _check("algorithm", algorithm, _ALGORITHMS)
    _check("protocol", cell_of["protocol"].lower(), _PROTOCOLS)
    least, most = (_number(name, cell_of[name], 0) for name in ("minbytes", "maxbytes"))
    if least > most:
        raise ValueError(f"minbytes {least} is above maxbytes {most}")
    any_ = {name: _number(name, text, -1) for name, text in cell_of.items() if name in _COLUMNS[5:]}
    if collective in _OTHERS:
        raise _CannotSay(f"a table has no rows of {collective}")
    for name in ("numPipeOps", "regBuff"):
        if any_.get(name, -1) != -1:
            raise _CannotSay(f"{name}={any_[name]}, which a table ignores")
    ranks = any_["nRanks"]
    bounds: Bounds = (least or None, most + 1 if most < _MOST else None)
    if collective == "allgather" and bounds != (None, None):
        if ranks < 1:
            raise _CannotSay("bytes of an all-gather on any number of ranks: give nRanks")
        bounds = (-(-least // ranks) or None, most // ranks + 1 if most < _MOST else None)
        if None not in bounds and bounds[0] == bounds[1]:
            raise _CannotSay(f"no operand on {ranks} ranks has {least} to {most} bytes in all")
    why = f"NCCL: {algorithm}, {cell_of['protocol'].lower()}"
    why += f", {any_['channels']} channels" if any_["channels"] > 0 else ""
    return TableRow(
        _COLLECTIVES[collective],
        "gpu",
        "ring" if algorithm == "ring" else LAX,
        ranks=_one(ranks),
        hosts=_one(any_["nNodes"]),
        bytes=bounds,
        why=why,
    )


def _one(number: int) -> Bounds:
    return (number, number + 1) if number > 0 else (None, None)


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: there is no {value!r:.40}; choose from {', '.join(known)}")


def _number(name: str, text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name}: {text!r:.40} is not a whole number from {least}")
    return number


def to_nccl_tuner(table: Table, protocol: str = "simple") -> TunerText:
    """The text of a tuner's file, from the rows of a table that are for GPUs.

    Rows for other platforms are ignored. A row is left out, with the reason, if NCCL does not have
    its algorithm or collective, or does not look at something that the row asks for. A row with
    "lax" needs no line: without a line NCCL chooses. A later row must not get the calls of a row
    without a line, so it is left out if it covers some of them.

    Args:
        table: a table.
        protocol: the protocol of all lines: "ll", "ll128" or "simple".

    Raises:
        ValueError: there is no such protocol.

    >>> row = ringcoll.collectives.table.TableRow("psum", "gpu", "ring", bytes=(0, 65536))
    >>> print(formats.to_nccl_tuner(ringcoll.Table((row,))).text.splitlines()[1])
    allreduce,0,65535,ring,simple,-1,-1,-1,-1,-1
    """
    _check("protocol", protocol, _PROTOCOLS)
    lines, left_out = [",".join(("# " + _COLUMNS[0], *_COLUMNS[1:]))], []
    passed: list[TableRow] = []  # rows without a line; later lines must not get their calls
    for number, row in enumerate(table.rows, 1):
        if row.platform not in ("gpu", "*"):
            continue
        try:
            if row.algorithm == LAX:
                passed.append(row)
                continue
            if any(_overlap(row, other) for other in passed):
                raise _CannotSay("an earlier row, which has no line, covers some of its calls")
            lines += _lines(row, protocol)
        except _CannotSay as reason:
            passed.append(row)
            left_out.append(f"row {number} ({row.collective}, {row.algorithm}): left out: {reason}")
    return TunerText("\n".join(lines) + "\n", tuple(left_out))


def _lines(row: TableRow, protocol: str) -> list[str]:
    if row.collective not in _OURS:
        raise _CannotSay(f"NCCL tunes no {row.collective}")
    if row.algorithm != "ring":
        raise _CannotSay(f"of these algorithms NCCL has only the ring, not {row.algorithm}")
    for name, value in (
        ("dtypes", row.dtypes),
        ("jax", row.jax),
        ("ranks_a_host", row.ranks_a_host),
    ):
        if value not in ((), (None, None)):
            raise _CannotSay(f"NCCL ignores {name}")
    ranks, hosts = _each("ranks", row.ranks), _each("hosts", row.hosts)
    if row.collective == "all_gather" and row.bytes != (None, None) and ranks == [-1]:
        raise _CannotSay("NCCL's bytes are those of all ranks: give their number")
    first, end = row.bytes
    lines = []
    for count in ranks:
        times = count if row.collective == "all_gather" and count > 0 else 1
        least = (first or 0) * times
        most = _MOST if end is None else (end - 1) * times
        for nodes in hosts:
            cells = (_OURS[row.collective], least, most, row.algorithm, protocol, -1, nodes, count)
            lines.append(",".join(map(str, (*cells, -1, -1))))
    return lines


def _each(name: str, bounds: Bounds) -> list[int]:
    """The numbers within bounds, one for each line; -1 for any number."""
    first, end = bounds
    if (first or 0) <= 1 and end is None:
        return [-1]
    if end is None or end - (first or 1) > _MOST_LINES:
        raise _CannotSay(
            f"a line has one number of {name}, and a row of {bounds} would need too many lines"
        )
    return list(range(max(first or 1, 1), end))


def _overlap(one: TableRow, other: TableRow) -> bool:
    """Whether both rows may cover the same call."""

    def meet(a: Bounds, b: Bounds) -> bool:
        ends = [end for end in (a[1], b[1]) if end is not None]
        return max(a[0] or 0, b[0] or 0) < min(ends, default=_MOST)

    return one.collective == other.collective and all(
        meet(getattr(one, name), getattr(other, name)) for name in ("ranks", "hosts", "bytes")
    )
