"""The measured tables inside JAX's plugin for CUDA, read from the installed wheel.

XLA's compiler for GPUs carries a table of collectives that its authors measured on H100, B200,
GB200 and GB300: a serialised protocol buffer, `xla.gpu.DeviceHloInstructionProfiles`, in the shared
library of the wheel `jax-cuda13-pjrt`. Its schema is `xla/service/gpu/model/hlo_op_profile.proto`
of openxla/xla; what was run is in `xla/tools/collective_perf_table_gen.cc`. A few fields of the
wire format are enough, so no schema is compiled.

The library also has a table of matmuls, `xla.GemmPerfTable`, as text: FLOP/s by shape and dtype.
"""

import mmap
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import NamedTuple

from benchmarks.machines.points import PublishedPoint
from ringcoll.algorithms import in_lax

WHEEL = "jax-cuda13-pjrt"
#: The keys of the table, and the names of the machines.
KEYS: Mapping[bytes, str] = {
    b"sm_90": "h100",
    b"sm_100_B200": "b200",
    b"sm_100_GB200": "gb200",
    b"sm_103": "gb300",
}
# Numbers of fields in the schemas.
_ENTRIES, _INSTRUCTION, _THROUGHPUT = 1, 1, 6
_OPCODE, _SHAPE, _PAIRS, _GROUPS = 2, 3, 52, 92
_DIMENSIONS = 3
_SOURCE, _TARGET = 1, 2
_GROUP_COUNT, _GROUP_SIZE = 1, 2

Fields = list[tuple[int, int | bytes]]

#: How the table of matmuls begins.
_MATMULS = b"# proto-message: xla.GemmPerfTable"
#: The element types of both operands in that table, and their names here.
DTYPES: Mapping[str, str] = {
    "f32xf32": "float32",
    "bf16xbf16": "bfloat16",
    "f8e4m3fnxf8e4m3fn": "float8",
}
#: Matmuls that are left out: they are faster than the published 1979 TFLOP/s of this GPU.
_INCREDIBLE = ("h100", "float8")


class Matmul(NamedTuple):
    """A measured matmul: its machine, the dtype of its operands, its FLOPs and its seconds."""

    device: str
    dtype: str
    flops: float
    seconds: float


class TableError(ValueError):
    """The wheel is not installed, or has no such table."""


def points() -> list[PublishedPoint]:
    """All measurements in the table of the installed wheel.

    The table has bytes per second, from which seconds are computed. An entry whose rate was rounded
    to 0 is left out.

    Raises:
        TableError: the wheel is not installed, or has no such table.
    """
    with _library() as library:
        found = [
            point
            for key, device in KEYS.items()
            for entry in _table(library, key)
            if (point := _point(entry, device))
        ]
    if not found:
        raise TableError(f"{WHEEL} {version_of()} holds no table of collectives")
    return found


def matmuls() -> list[Matmul]:
    """All matmuls in the table of the installed wheel that were measured on a machine of `KEYS`.

    Raises:
        TableError: the wheel is not installed, or has no such table.
    """
    with _library() as library:
        start = library.find(_MATMULS)
        text = library[start : library.find(b"\0", start)].decode() if start >= 0 else ""
    found = []
    for part in re.split(r"\nentries \{", text)[1:]:
        key = re.search(r'key: "(.*?)"', part)
        device = KEYS.get(key[1].encode()) if key else None
        if device:
            found += [one for entry in part.split("entries {")[1:] for one in _of(entry, device)]
    if not found:
        raise TableError(f"{WHEEL} {version_of()} holds no table of matmuls")
    return found


def _of(entry: str, device: str) -> Iterator[Matmul]:
    """The matmuls of one entry of the table: one shape, several dtypes."""
    flops = 2 * prod(int(size) for size in re.findall(r"\b[bmnk]: (\d+)", entry))
    for dtype, rate in re.findall(r'key: "(\w+)->\w+" value: (\d+)', entry):
        if dtype in DTYPES and (device, DTYPES[dtype]) != _INCREDIBLE:
            yield Matmul(device, DTYPES[dtype], flops, flops / int(rate))


@contextmanager
def _library() -> Iterator[mmap.mmap]:
    """The shared library of the installed wheel.

    Raises:
        TableError: the wheel or the library is missing.
    """
    spec = find_spec("jax_plugins.xla_cuda13") if find_spec("jax_plugins") else None
    if spec is None or spec.origin is None:
        raise TableError(f"{WHEEL} is not installed; pip install -e '.[gpu]' brings it")
    path = Path(spec.origin).with_name("xla_cuda_plugin.so")
    if not path.exists():
        raise TableError(f"{path} is not there: {WHEEL} {version_of()} has no library of that name")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        yield library


def version_of() -> str:
    try:
        return version(WHEEL)
    except PackageNotFoundError:
        return "of no version"


def _table(library: mmap.mmap, key: bytes) -> Iterator[bytes]:
    """The entries under a key of the map. In a map, field 1 is the key and field 2 the value."""
    head = b"\n" + bytes([len(key)]) + key + b"\x12"
    start = library.find(head)
    while start >= 0:
        try:
            length, begin = _varint(library, start + len(head))
            entries = [v for k, v in _fields(library[begin : begin + length]) if k == _ENTRIES]
        except (ValueError, IndexError):  # these bytes are not an entry of the map
            entries = []
        if entries:
            return (entry for entry in entries if isinstance(entry, bytes))
        start = library.find(head, start + 1)
    return iter(())


def _point(entry: bytes, device: str) -> PublishedPoint | None:
    """One measurement; None if its rate is unknown."""
    fields = dict(_fields(entry))
    rate = fields.get(_THROUGHPUT, 0)
    instruction = _fields(_bytes(fields[_INSTRUCTION]))
    parts = dict(instruction)
    opcode = _bytes(parts[_OPCODE]).decode()
    (elements,) = _numbers(_bytes(dict(_fields(_bytes(parts[_SHAPE])))[_DIMENSIONS]))
    size = 4.0 * elements  # float32
    notes = f"{WHEEL} {version_of()}"
    if opcode == "collective-permute":
        pairs = [dict(_fields(_bytes(v))) for k, v in instruction if k == _PAIRS]
        steps = [(int(pair.get(_SOURCE, 0)), int(pair.get(_TARGET, 0))) for pair in pairs]
        ranks, name = 1 + max(max(step) for step in steps), "ppermute"
        notes += f"; {_pattern(steps, ranks)}"
        groups = 1
    else:
        shape = dict(_fields(_bytes(parts[_GROUPS])))
        groups, ranks = int(shape[_GROUP_COUNT]), int(shape[_GROUP_SIZE])
        name = in_lax(opcode.replace("-", "_"))
    if name == "psum_scatter":
        size *= ranks  # the size of its result
    if not rate:
        return None
    # The rate counts the bytes of the result for a gather, and those of the operand for a scatter.
    topology = f"{groups * ranks} on NVSwitch; {groups} groups of {ranks} at once"
    return PublishedPoint(
        "XLA's table", device, name, ranks, 1, topology, size, size / float(rate), notes
    )


def _pattern(steps: list[tuple[int, int]], ranks: int) -> str:
    if all(b == (a + 1) % ranks for a, b in steps):
        return "ring +1"
    return "pairs i<->i^1" if len(steps) == ranks else "one way i->i+n/2"


# -- the wire format of protocol buffers: protobuf.dev/programming-guides/encoding --


def _varint(data: mmap.mmap | bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _fields(data: bytes) -> Fields:
    """The fields of a message: their numbers, and their values (numbers, or bytes).

    Raises:
        ValueError: it is not a message.
    """
    found: Fields = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(data, at)
        else:
            length, at = {1: (8, at), 5: (4, at)}.get(kind) or _varint(data, at)
            value, at = data[at : at + length], at + length
        if number == 0 or kind not in (0, 1, 2, 5) or at > len(data):
            raise ValueError("no message of a protocol buffer")
        found.append((number, value))
    return found


def _numbers(data: bytes) -> list[int]:
    """Packed numbers."""
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message should be")
    return value
