"""Make eight ranks on any machine, and put arrays on them."""

from contextlib import suppress
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def start(devices: int = 8) -> None:
    """Make JAX use this many CPU devices. A lesson uses them as ranks.

    Call it before anything is computed, because JAX makes its devices only once.

    Raises:
        RuntimeError: JAX has already started, with fewer devices.

    >>> learn.start(4)
    """
    with suppress(RuntimeError):  # JAX has already started: its devices are counted below
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    if (there := len(jax.devices())) < devices:
        raise RuntimeError(
            f"start: JAX has started with {there} {jax.default_backend()} device(s), and "
            f"{devices} are needed; restart it (Jupyter: Kernel, Restart; Colab: Runtime, Restart "
            "session; a script: call start before anything is computed), then run from the top"
        )


def make_mesh(explicit: bool = False, **sizes: int) -> Mesh:
    """A mesh of the first devices: `make_mesh(x=2, y=4)`.

    >>> learn.make_mesh(x=2, y=2).axis_names
    ('x', 'y')
    """
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = jax.devices()[: prod(sizes.values())]
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices
    )


def place(mesh: Mesh, x: Any, spec: PartitionSpec) -> jax.Array:
    """Put an array on a mesh, sharded by a spec.

    >>> x = learn.place(learn.make_mesh(x=4), jnp.arange(8.0), P("x"))
    >>> print(x.addressable_shards[1].data)
    [2. 3.]
    """
    return jax.device_put(x, NamedSharding(mesh, spec))


def integers(*shape: int, seed: int = 0, largest: int = 4) -> np.ndarray:
    """Integers from -largest to largest as float32, so that small sums and products are exact.

    >>> x = learn.integers(2, 3)
    >>> x.dtype, x.shape, bool((abs(x) <= 4).all())
    (dtype('float32'), (2, 3), True)
    """
    values = np.random.default_rng(seed).integers(-largest, largest, shape, endpoint=True)
    return values.astype(np.float32)
