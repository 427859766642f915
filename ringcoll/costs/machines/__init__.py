"""Machines as data: each has a file in this folder, with the source of every figure.

`find` gets a machine by name. `DEVICES` and `SWITCHES` are the models of all machines. `python -m
benchmarks machines` writes the curves (measured seconds of collectives on a number of ranks) and
the rates of GPUs' matmuls. Other rates are written by hand.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from ringcoll.costs.curves import Curve
from ringcoll.costs.model import Model
from ringcoll.io.strict_json import parsed
from ringcoll.io.text import choose

#: The bytes of an element, for the dtypes of measured matmuls.
_WIDTHS = {"float32": 4, "bfloat16": 2, "float8": 1}


@dataclass(frozen=True, slots=True)
class Matmuls:
    """Matmuls on elements of one width: they take start seconds, plus delta seconds per FLOP.

    error is the median of |modelled / measured - 1|; points is the number of measurements.
    """

    start: float
    delta: float
    error: float
    points: int


@dataclass(frozen=True)
class Device:
    """A machine, or a network between hosts of one rank.

    Attributes:
        name: the name of its file.
        what: a description in words.
        aliases: other names for it; JAX's `device_kind` is one of them.
        model: its rates.
        ranks_a_host: the number of ranks that one switch connects; 0 on a torus.
        curves: measured seconds of collectives. A key is the collective, the number of ranks and
            the number of hosts.
        matmuls: measured rates of matmuls, by the bytes of an element; empty if there are none.
        error: the median of the curves' median errors.
    """

    name: str
    what: str
    aliases: tuple[str, ...]
    model: Model
    ranks_a_host: int
    curves: Mapping[tuple[str, int, int], Curve]
    matmuls: Mapping[float, Matmuls]
    error: float

    def hosts(self, ranks: int) -> int:
        """The fewest hosts that hold this many ranks, with the same number on each."""
        if not self.ranks_a_host:
            return 1
        least = -(-ranks // self.ranks_a_host)
        return next(hosts for hosts in range(least, ranks + 1) if not ranks % hosts)


def device_of(data: Mapping[str, Any]) -> Device:
    """Make a machine from the contents of its file.

    Raises:
        KeyError: a field is missing.
    """
    rates = {name: value for name, (value, _source) in data["rates"].items()}
    curves: dict[tuple[str, int, int], Curve] = {}
    for one in data.get("curves", ()):
        knots = tuple((float(size), seconds) for size, seconds in one["knots"])
        curves[one["collective"], one["ranks"], one["hosts"]] = Curve(knots)
    matmuls: dict[float, Matmuls] = {
        _WIDTHS[one["dtype"]]: Matmuls(
            one["start_seconds"], 1 / one["flops_per_second"], one["error"], one["points"]
        )
        for one in data.get("matmuls", ())
    }
    hops = sorted(key for key in curves if (key[0], key[2], data["axes"]) == ("ppermute", 1, 0))
    return Device(
        data["name"],
        data["what"],
        tuple(data["aliases"]),
        _model(data["axes"], rates, curves[hops[0]] if hops else None),
        data.get("ranks_a_host", 0),
        MappingProxyType(curves),
        MappingProxyType(matmuls),
        median([one["error"] for one in data.get("curves", ())] or [0.0]),
    )


def _model(axes: int, rates: Mapping[str, float], wire: Curve | None) -> Model:
    def each(name: str) -> float:
        """The seconds of one unit, from a rate per second; 0 if there is no such rate."""
        return 1 / rates[name] if name in rates else 0.0

    memory = each("memory_bytes_per_second")
    share, share_of_links = rates.get("matmul_memory_share"), rates.get("built_in_share", 1.0)
    return Model(
        alpha=rates["start_seconds"] if axes else rates.get("start_seconds", inf),
        beta=each("link_bytes_per_second"),
        gamma=3 * memory,
        delta=each("flops_per_second"),
        hop=rates.get("hop_seconds", 0.0),
        axes=axes,
        start=rates.get("matmul_start_seconds", 0.0),
        hbm_seconds=memory / share if share else 0.0,
        vmem_seconds=each("near_bytes_per_second"),
        vmem_bytes=rates.get("near_bytes", 0.0),
        all_reduces=int(rates.get("all_reduces_from", 0)),
        devices=int(rates.get("devices_a_chip", 1)),
        sparse_cores=bool(rates.get("sparse_cores")),
        built_in=share_of_links,
        built_in_sum=rates.get("built_in_sum_share", share_of_links),
        wire=wire,
    )


def text_of(data: Mapping[str, Any]) -> str:
    """The contents of a machine's file as text, a line for each figure and each curve."""
    lines = []
    for name, value in data.items():
        if name == "rates":
            inner = [f"  {json.dumps(key)}: {json.dumps(rate)}" for key, rate in value.items()]
            lines.append(f' "{name}": {{\n' + ",\n".join(inner) + "\n }")
        elif name in ("curves", "matmuls") and value:
            inner = [f"  {json.dumps(curve)}" for curve in value]
            lines.append(f' "{name}": [\n' + ",\n".join(inner) + "\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


FOLDER = Path(__file__).parent


def contents(path: Path) -> dict[str, Any]:
    """The contents of a machine's file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON.
    """
    return parsed(path.read_text(encoding="utf-8"))


def _load() -> dict[str, Device]:
    read_devices = [device_of(contents(path)) for path in sorted(FOLDER.glob("*.json"))]
    return {device.name: device for device in read_devices}


MACHINES: Mapping[str, Device] = MappingProxyType(_load())
#: TPUs: chips with links along axes.
DEVICES: Mapping[str, Model] = MappingProxyType(
    {name: device.model for name, device in MACHINES.items() if device.model.axes}
)
#: GPUs on a switch, and networks between hosts.
SWITCHES: Mapping[str, Model] = MappingProxyType(
    {name: device.model for name, device in MACHINES.items() if not device.model.axes}
)
#: The names of the TPUs by `device.device_kind`.
KINDS: Mapping[str, str] = MappingProxyType(
    {kind: name for name in DEVICES for kind in MACHINES[name].aliases if kind.startswith("TPU")}
)


def _plain(name: str) -> str:
    """A name without case, blanks and signs, so that different spellings are equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_NAMES = {_plain(n): one.name for one in MACHINES.values() for n in (one.name, *one.aliases)}


def _named(name: str) -> str:
    """The machine that a name means, in any spelling; "" if there is none."""
    name = re.sub(r"\b(v\d\w*)-\d+\b", r"\1", name.lower())  # v5p-8 is a slice of v5p
    return _NAMES.get(_plain(name), "")


def find(name: str) -> Device:
    """A machine by its name, by an alias in its file, or by the path of a file.

    Raises:
        ValueError: there is no such machine.

    >>> machines.find("NVIDIA H100 80GB HBM3").name
    'h100'
    """
    if isinstance(name, str):
        if known := _named(name):
            return MACHINES[known]
        if name.endswith(".json"):
            return read(name)
    raise ValueError(
        f"no machine is named {name!r}; {choose(name, MACHINES)}; "
        "python -m ringcoll machine --fit makes a file of one from measurements"
    )


def path_of(name: str) -> Path:
    """The path of a machine's file; `name` is as for `find`."""
    known = _named(name)
    return FOLDER / f"{known}.json" if known else Path(name)


def read(path: str) -> Device:
    """Read a machine from a file.

    Raises:
        ValueError: there is no such file, or it is not the file of a machine.
    """
    try:
        data = contents(Path(path))
        _check_types(data)
        return _checked(device_of(data))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{path} is not the file of a machine ({error}); python -m ringcoll machine --fit "
            "writes one"
        ) from None


def _check_types(data: Mapping[str, Any]) -> None:
    """Refuse a machine's file with values of wrong types.

    Raises:
        ValueError, TypeError, LookupError: there is one.
    """
    counts = {name: data.get(name, 0) for name in ("axes", "ranks_a_host")}
    for name, count in counts.items():
        if type(count) is not int or count < 0:
            raise ValueError(f"{name} is {count!r}, not a whole number from 0")
    for name, (value, _source) in data["rates"].items():
        if type(value) not in (int, float):
            raise ValueError(f"rates: {name} is {value!r}, not a number")
        if name == "devices_a_chip" and (type(value) is not int or value < 1):
            raise ValueError(f"{name} is {value!r}, not a whole number from 1")
    sources = [one["source"] for kind in ("curves", "matmuls") for one in data.get(kind, ())]
    if not all(isinstance(text, str) for text in (*data["aliases"], *sources)):
        raise ValueError("a name in `aliases`, or a source, is not text")


def _checked(device: Device) -> Device:
    """Refuse a machine whose figures make no sense.

    Raises:
        ValueError: a rate is negative or infinite, or a curve falls or has one rank.
    """
    model = device.model
    rates = (model.beta, model.gamma, model.delta, model.hop)
    is_known = model.alpha >= 0 and all(0 <= rate < inf for rate in rates)
    if not is_known:
        raise ValueError("a rate is not above 0")
    for name, share in (("built_in", model.built_in), ("built_in_sum", model.built_in_sum)):
        if not 0 < share <= 1:
            raise ValueError(f"{name}_share is {share!r}, not a share above 0, up to 1")
    if any(ranks < 2 for _, ranks, _ in device.curves):
        raise ValueError("a curve is of fewer than 2 ranks")
    for curve in device.curves.values():
        for size, taken in curve.knots:
            is_nothing = size == taken == 0  # a fit may find no start
            if not (is_nothing or (size >= 0 and 0 < taken < inf)):
                raise ValueError(f"a curve has {size:g} bytes in {taken:g} seconds")
        if any(a >= c or b > d for (a, b), (c, d) in pairwise(curve.knots)):
            raise ValueError("the knots of a curve do not rise")
    return device
