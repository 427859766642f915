"""The options of a matmul with a collective: its axes, algorithm and precision."""

from collections.abc import Hashable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringcoll.collectives.by_schedule import built
from ringcoll.collectives.table import Algorithm
from ringcoll.costs.model import Model
from ringcoll.matmuls import auto
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.value_types import device_kind
from ringcoll.schedules.schedule import Schedule


@dataclass(frozen=True)
class Options:
    """The ranks, the algorithm and the precision of a matmul with a collective."""

    axes: tuple[Hashable, ...]
    algorithm: Algorithm
    precision: Any = None
    accumulate_dtype: np.dtype | None = None
    saves: bool = False  # whether the gathered factor is kept for the gradient

    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes, without axes of one rank."""
        return Ranks.over(self.axes, None).shape

    def model(self) -> Model:
        """The model of the devices and of the links between these ranks."""
        mesh_sizes = jax.sharding.get_abstract_mesh().axis_sizes
        return auto.machine(device_kind(), prod(self.sizes()), prod(mesh_sizes))

    def schedule(self) -> tuple[Schedule, Ranks]:
        """The schedule of the gather, and the ranks as the schedule's digits."""
        return built("all_gather", self.algorithm, self.axes, None)

    def einsum(self, spec: str, a: Array, b: Array, dtype: Any, sharding: Any = None) -> Array:
        """The einsum, in `accumulate_dtype` if `dtype` is floating or complex, else in `dtype`."""
        wide = (self.accumulate_dtype if jnp.issubdtype(dtype, jnp.inexact) else None) or dtype
        return _einsum(spec, a, b, wide, self.precision, sharding)


def _einsum(spec: str, a: Array, b: Array, dtype: Any, precision: Any, sharding: Any) -> Array:
    """An einsum in a dtype. If that is real and a factor is complex, it is the real part.

    Such is the gradient of a real factor beside a complex one.
    """
    is_complex = any(jnp.iscomplexobj(x) for x in (a, b))
    is_part = is_complex and not jnp.issubdtype(dtype, jnp.complexfloating)
    wide = jnp.promote_types(dtype, jnp.complex64) if is_part else dtype
    exact = {"precision": precision, "preferred_element_type": wide, "out_sharding": sharding}
    y = jnp.einsum(spec, a, b, **exact)
    return y.real.astype(dtype) if is_part else y
