"""Programs as Chakra execution traces, a file for each rank, for simulators such as ASTRA-sim.

A trace is a list of protobuf messages, each after its length: first the metadata, then a node for
every message sent, message received, copy and addition, with the nodes that it waits for. The part
of protobuf's wire format that is needed takes a dozen lines here, so no package is needed.
"""

from collections.abc import Sequence

from ringcoll.formats.order import StepOrder
from ringcoll.formats.program import At, Program

#: Values of `NodeType` in et_def.proto.
_COMPUTE, _SEND, _RECEIVE = 4, 5, 6
_VERSION = "0.0.4"
#: The fields of an attribute, by the type of its value.
_BOOL, _INT32, _INT64, _UINT64, _STRING = 27, 7, 9, 13, 29


def to_chakra(program: Program, nbytes: int, itemsize: int = 4) -> list[bytes]:
    """The content of the trace of each rank.

    Args:
        program: a program of any collective; prove it first.
        nbytes: bytes of the full vector; chunks are equal parts of it.
        itemsize: bytes of an element; an addition is one operation for each element.

    Raises:
        ValueError: there are fewer bytes than chunks, or an element has no bytes.

    >>> traces = formats.to_chakra(formats.program("all_gather", "ring", (4,)), nbytes=2**20)
    >>> len(traces)
    4
    """
    if nbytes < program.chunks or itemsize < 1:
        least = f"at least one for each of {program.chunks} chunks"
        raise ValueError(f"to_chakra: nbytes={nbytes}, itemsize={itemsize}; give {least}, and 1")
    order = StepOrder(program)
    traces = [
        _Trace(rank, program, -(-nbytes // program.chunks), itemsize)
        for rank in range(program.size)
    ]
    tags: dict[At, int] = {}
    so_far: dict[tuple[int, int], int] = {}
    for sends, receives in order.connections:
        for sent, received in zip(sends, receives, strict=True):
            pair = sent.rank, received.rank
            tags[sent] = so_far.get(pair, 0)
            so_far[pair] = tags[sent] + 1
    for at in order.order:
        tag, came = tags.get(at, 0), tags[order.source[at]] if at in order.source else 0
        before = [other for other in order.waits[at] if other.rank == at.rank]
        traces[at.rank].step(at, before, tag, came)
    return [trace.text() for trace in traces]


class _Trace:
    """The nodes of one rank."""

    def __init__(self, rank: int, program: Program, chunk_bytes: int, itemsize: int) -> None:
        self.rank, self.program = rank, program
        self.chunk_bytes, self.itemsize = chunk_bytes, itemsize
        self.nodes: list[bytes] = []
        self.ends: dict[At, list[int]] = {}  # for each step, the nodes after which it is done

    def step(self, at: At, before: Sequence[At], tag: int, came: int) -> None:
        """Add the nodes of a step: receive, then compute, then send, as far as it does these."""
        step, block = self.program.step(at), self.program.block(at)
        does, size = step.does, step.count * self.chunk_bytes
        last = sorted({end for other in before for end in self.ends[other]})
        if does.receives:
            last = [self._message(_RECEIVE, block.source, self.rank, size, came, last)]
        if does.adds or (does.receives and does.reads) or step.kind == "cpy":
            name = "copy" if step.kind == "cpy" else "add"
            attributes = (
                _attribute("is_cpu_op", _BOOL, 0)
                + _attribute("num_ops", _INT64, -(-size // self.itemsize))
                + _attribute("tensor_size", _UINT64, size)
            )
            last = [self._node(name, _COMPUTE, last, attributes)]
        if does.sends:
            last = [self._message(_SEND, self.rank, block.to, size, tag, last)]
        self.ends[at] = last

    def _message(
        self,
        kind: int,
        sender: int | None,
        receiver: int | None,
        size: int,
        tag: int,
        after: list[int],
    ) -> int:
        assert sender is not None
        assert receiver is not None  # `Program.check_indices` has checked this
        name = f"send to {receiver}" if kind == _SEND else f"receive from {sender}"
        attributes = (
            _attribute("is_cpu_op", _BOOL, 0)
            + _attribute("comm_size", _INT64, size)
            + _attribute("comm_src", _INT32, sender)
            + _attribute("comm_dst", _INT32, receiver)
            + _attribute("comm_tag", _INT32, tag)
        )
        return self._node(name, kind, after, attributes)

    def _node(self, name: str, kind: int, after: list[int], attributes: bytes) -> int:
        number = len(self.nodes)
        waits = b"".join(map(_varint, after))  # packed
        node = _whole(1, number) + _bytes(2, name.encode()) + _whole(3, kind)
        self.nodes.append(node + (_bytes(5, waits) if after else b"") + attributes)
        return number

    def text(self) -> bytes:
        """The content of the file."""
        name = _bytes(1, b"name") + _bytes(_STRING, self.program.name.encode())
        metadata = _bytes(1, _VERSION.encode()) + _bytes(2, name)
        return b"".join(_varint(len(one)) + one for one in (metadata, *self.nodes))


def _attribute(name: str, field: int, value: int) -> bytes:
    return _bytes(10, _bytes(1, name.encode()) + _whole(field, value))


def _whole(field: int, value: int) -> bytes:
    """A field that is a whole number from 0."""
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    """A field that is text, or a message."""
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """A number in bytes of seven bits, the lowest first; the eighth bit says that more follow."""
    low = bytearray()
    while value > 127:
        low.append(value & 127 | 128)
        value >>= 7
    return bytes([*low, value])
