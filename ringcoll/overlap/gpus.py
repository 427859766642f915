"""GPUs without a GPU: the description that XLA's compiler needs, and devices to compile for.

The plugin (the extra gpu) has the compiler. It needs neither CUDA nor a driver, because this file
tells it what a driver would. It cannot time kernels to choose among them. So the order of the
program is the real one, but its matmul kernels may not be.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jax.experimental import topologies

#: Bytes of memory, and bytes a second. Published at nvidia.com/data-center/h100, h200 (SXM).
MEMORY: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"h100": (80 * 10**9, 3350 * 10**9), "h200": (141 * 10**9, 4800 * 10**9)}
)

#: An XLA `GpuTargetConfigProto`. The values that all SXM chips of compute capability 9.0 share are
#: from NVIDIA's Hopper tuning guide and the tables of its CUDA programming guide.
_TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA {name}"
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  device_memory_size: {size}
  memory_bandwidth: {rate}
}}
"""


def is_named(topology: str) -> bool:
    """Whether a topology is of GPUs, such as "h200:8"."""
    return topology.partition(":")[0] in MEMORY


def devices(topology: str) -> list[Any]:
    """The devices of one host of GPUs, to compile for; you need not have them.

    Args:
        topology: a key of `MEMORY` and a number, such as "h200:8".

    Raises:
        ModuleNotFoundError: the plugin is not installed, or not for this version of JAX.
        ValueError: the number of devices is missing.
    """
    kind, _, count = topology.partition(":")
    if not (count.isdecimal() and int(count)):
        raise ValueError(f"overlap: {topology!r} says not how many; name such as h200:8")
    size, rate = MEMORY[kind]
    asked = {
        "target_config": _TARGET.format(name=kind.upper(), size=size, rate=rate),
        "topology": f"1x1x{count}",  # slices x hosts of each x devices of each
    }
    # Without this the plugin loads only with CUDA, or if JAX_PLATFORMS leaves GPUs out.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        return list(topologies.get_topology_desc("", platform="cuda", **asked).devices)
    except NotImplementedError as error:  # no plugin is registered
        raise ModuleNotFoundError(
            f"overlap: to compile for {topology!r} needs XLA's compiler for GPUs, of the version "
            "of JAX: pip install 'ringcoll[gpu]' (no GPU and no CUDA are needed; where JAX was "
            "started before, set JAX_PLATFORMS=cpu)"
        ) from error
