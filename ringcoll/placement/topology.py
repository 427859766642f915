"""Devices of a topology, which need not be here, and their places on its network."""

import os
import re
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from jax.experimental import topologies

from ringcoll.costs.machines import DEVICES, KINDS
from ringcoll.costs.slices import closed
from ringcoll.placement import gpus
from ringcoll.placement.network import Network

#: Variables with which libtpu starts without a TPU and without output. They are set only where
#: the environment does not have them.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

#: Kinds of chips that are linked along two axes.
FLAT = tuple(kind for kind, model in DEVICES.items() if model.axes == 2)
#: Kinds by the names that Google Cloud has for them, where these differ.
_CLOUD = {"v5litepod": "v5e"}
_CURE = (
    "name a kind and a size, such as v5e:4x2, v5p:2x2x2, h200:8 (of GPUs there are "
    f"{', '.join(gpus.TARGETS)})"
)


def devices(topology: str) -> list[Any]:
    """The devices of a topology, to compile for; they need not be here.

    Args:
        topology: a kind and a size, such as "v5e:4x2", "v5p:2x2x2" or "tpu7x:2x2x1"; or a kind and
            a number of devices, such as "v5e:8" or "v5litepod-8" (with a hyphen, as Google Cloud
            counts: v5p-8 has 8 cores, which are 4 devices). For GPUs, a kind and a number, such as
            "h200:8": see `gpus.devices`. Capital letters are the same.

    Raises:
        ModuleNotFoundError: libtpu, or the plugin for GPUs, is not installed.
        ValueError: libtpu does not know the topology.
    """
    if gpus.is_named(topology.lower()):
        return gpus.devices(topology.lower())
    exact = _libtpu_name(topology)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            f"ringcoll.mesh: to compile for {topology!r} needs the TPU compiler: "
            "pip install -e '.[tpu]' in ringcoll's checkout (no TPU is needed; with it, set "
            "JAX_PLATFORMS=cpu to run programs on the CPU)"
        )
    try:
        kind, _, sides = exact.partition(":")
        sizes = [*map(int, re.findall(r"\d+", sides)), 1, 1][:3]
        rings = closed(_axes(kind), sizes)
        options = {"wrap": tuple(rings)} if any(rings) else {}  # by itself, libtpu takes lines
        return list(topologies.get_topology_desc(exact, platform="tpu", **options).devices)
    except Exception as error:  # its type differs between versions of libtpu
        raise ValueError(
            f"ringcoll.mesh: libtpu has no topology {topology!r} ({error}); {_CURE}"
        ) from error


def _axes(kind: str) -> int:
    return 2 if kind in FLAT else 3


def _libtpu_name(topology: str) -> str:
    """The name that libtpu has for a topology: "v5e:4x2" for "v5litepod-8".

    Raises:
        ValueError: with this name, libtpu would abort the process or use a different topology.
    """
    match = re.fullmatch(
        r"(\w+?)([:=_-])(\d+(?:x\d+)*)((?:_twisted|_untwisted)?)", topology.lower()
    )
    sizes = [int(n) for n in match[3].split("x")] if match else []
    if match is None or 0 in sizes:
        raise ValueError(
            f"ringcoll.mesh: {topology!r} must be a kind of chip and a size, such as v5e:4x2 or "
            "v5e:8"
        )
    kind = _CLOUD.get(match[1], match[1])
    axes = _axes(kind)
    if any(n != 1 for n in sizes[2:]) and axes == 2:
        words = f"{topology!r}: {kind} has two axes; name such as {kind}:4x2"
        raise ValueError(f"ringcoll.mesh: {words}")
    is_short = any(known.startswith(kind) for known in DEVICES)  # libtpu takes a v5 for a v5p
    if kind not in DEVICES and (is_short or len(sizes) == 1):
        raise ValueError(
            f"ringcoll.mesh: {topology!r}: there is no {kind} of {match[3]} to compile for; {_CURE}"
        )
    if len(sizes) == 1:
        counts_cores = kind == "tpu7x" or (kind == "v5p" and match[2] == "-")
        chips, rest = divmod(sizes[0], 2 if counts_cores else 1)
        if rest or chips & (chips - 1):
            name = f"{kind}:{'4x2' if axes == 2 else '2x2x1'}"
            words = "an even power of two" if counts_cores else "a power of two"
            raise ValueError(f"ringcoll.mesh: {topology!r} must be {words}; name such as {name}")
        # As equal as they can be: 8 chips are 4x2 or 2x2x2.
        power = chips.bit_length() - 1
        sizes = [2 ** ((power + axes - 1 - axis) // axes) for axis in range(axes)]
    return f"{kind}:{'x'.join(map(str, sizes))}{match[4]}"


def network(devices: Iterable[Any]) -> Network | None:
    """The places of devices, and which axes are rings; None if they are not one slice of TPUs.

    A place has the coordinates of the chip, then the core, which is one hop from the others.
    """
    flat = list(devices)
    # A GPU's coords are its slice, host and number. They are not a place on a network.
    if not all(hasattr(device, "coords") and device.platform == "tpu" for device in flat):
        return None
    if not flat or len({getattr(device, "slice_index", 0) for device in flat}) > 1:
        return None
    places = [(*device.coords, getattr(device, "core_on_chip", 0)) for device in flat]
    first = [min(axis) for axis in zip(*places, strict=True)]
    placed = tuple(tuple(n - least for n, least in zip(p, first, strict=True)) for p in places)
    size = [max(axis) + 1 for axis in zip(*placed, strict=True)]
    kind = KINDS.get(flat[0].device_kind, "")
    rings = *closed(_axes(kind), size[:3]), False  # the cores of a chip are no ring
    # Of a slice that begins elsewhere, the devices are a part.
    wrap = tuple(ring and not n for ring, n in zip(rings, first, strict=True))
    return Network(placed, wrap, cores=True)
