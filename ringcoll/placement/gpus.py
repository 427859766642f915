"""Compile for GPUs that need not be here: a description for XLA's compiler, and the devices.

The plugin (the extra gpu) has the compiler. It needs neither CUDA nor a driver, because this file
gives it the facts that a driver would give. It cannot measure kernels to choose among them. So a
program has the same order as on the real GPU, but perhaps different matmul kernels.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from jax.experimental import topologies


@dataclass(frozen=True, slots=True)
class Target:
    """What the compiler must know about a GPU.

    Attributes:
        major: the major number of its compute capability.
        cores: the number of cores.
        clock: gigahertz.
        l2: bytes of the cache.
        size: bytes of the memory.
        rate: bytes per second from the memory.
    """

    major: int
    cores: int
    clock: float
    l2: int
    size: int
    rate: int


#: Memory as published at nvidia.com/data-center; the rest as in XLA's own descriptions of these
#: GPUs (`xla/backends/gpu/target_config/specs`), which are also inside the plugin.
TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "h100": Target(9, 132, 1.98, 52428800, 80 * 10**9, 3350 * 10**9),
        "h200": Target(9, 132, 1.98, 52428800, 141 * 10**9, 4800 * 10**9),
        "b200": Target(10, 148, 1.965, 132644864, 180 * 10**9, 8000 * 10**9),
        "gb200": Target(10, 152, 2.062, 135528448, 186 * 10**9, 8000 * 10**9),
    }
)

#: An XLA `GpuTargetConfigProto`. The values that all these GPUs share are from NVIDIA's tuning
#: guides and the tables of its CUDA programming guide.
_TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA {name}"
gpu_device_info {{
  cuda_compute_capability {{ major: {major} }}
  core_count: {cores}
  fpus_per_core: 128
  clock_rate_ghz: {clock}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: {l2}
  device_memory_size: {size}
  memory_bandwidth: {rate}
}}
"""


def is_named(topology: str) -> bool:
    """Whether a topology names GPUs, such as "h200:8"."""
    return topology.partition(":")[0] in TARGETS


def devices(topology: str) -> list[Any]:
    """The devices of one host of GPUs, to compile for; they need not be here.

    Args:
        topology: a key of `TARGETS` and a number, such as "h200:8".

    Raises:
        ModuleNotFoundError: the plugin is not installed, or not for this version of JAX.
        ValueError: the number of devices is missing.
    """
    kind, _, count = topology.partition(":")
    if not (count.isdecimal() and int(count)):
        raise ValueError(
            f"ringcoll.mesh: {topology!r} does not give their number; name such as h200:8"
        )
    options = {
        "target_config": _TARGET.format(name=kind.upper(), **asdict(TARGETS[kind])),
        "topology": f"1x1x{count}",  # slices x hosts of a slice x devices of a host
    }
    # Without this, the plugin loads only if CUDA is here or JAX_PLATFORMS excludes GPUs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        return list(topologies.get_topology_desc("", platform="cuda", **options).devices)
    except NotImplementedError as error:  # no plugin is registered
        raise ModuleNotFoundError(
            f"ringcoll.mesh: to compile for {topology!r} needs XLA's compiler for GPUs, of the "
            "version of JAX: pip install -e '.[gpu]' in ringcoll's checkout (no GPU, no CUDA is "
            "needed; where JAX was started before, set JAX_PLATFORMS=cpu)"
        ) from error
