"""The options of a matmul with a collective: its axes, algorithm and precision."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ringcoll.collectives.by_schedule import built, ranks_of
from ringcoll.collectives.table import LAX, Algorithm
from ringcoll.runtime.hop import Ranks
from ringcoll.schedules.schedule import Schedule


@dataclass(frozen=True)
class Options:
    """By which ranks, by which algorithm, and how exactly."""

    axes: tuple[Hashable, ...]
    algorithm: Algorithm
    precision: Any = None
    accumulate_dtype: np.dtype | None = None
    saves: bool = False  # whether what was gathered is kept for the gradient

    def sizes(self) -> tuple[int, ...]:
        """Those of the axes, without axes of one rank."""
        return ranks_of(LAX, self.axes, None).shape

    def schedule(self) -> tuple[Schedule, Ranks]:
        """The gather that is run, and the ranks cut into its digits."""
        return built("all_gather", self.algorithm, self.axes, None)

    def einsum(self, spec: str, a: Array, b: Array, dtype: Any, sharding: Any = None) -> Array:
        """In the dtype of accumulation, if `dtype` is one of the kind it is for."""
        wide = (self.accumulate_dtype if jnp.issubdtype(dtype, jnp.inexact) else None) or dtype
        how = {"precision": self.precision, "preferred_element_type": wide}
        return jnp.einsum(spec, a, b, out_sharding=sharding, **how)
