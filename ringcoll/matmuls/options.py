"""The options of a matmul with a collective: its axes, algorithm and precision."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ringcoll.collectives.by_schedule import built
from ringcoll.collectives.table import Algorithm
from ringcoll.runtime.hop import Ranks
from ringcoll.schedules.schedule import Schedule


@dataclass(frozen=True)
class Options:
    """The ranks, the algorithm and the precision of a matmul with a collective."""

    axes: tuple[Hashable, ...]
    algorithm: Algorithm
    precision: Any = None
    accumulate_dtype: np.dtype | None = None
    saves: bool = False  # whether what was gathered is kept for the gradient

    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes, without axes of one rank."""
        return Ranks.over(self.axes, None).shape

    def schedule(self) -> tuple[Schedule, Ranks]:
        """The schedule of the gather, and the ranks cut into its digits."""
        return built("all_gather", self.algorithm, self.axes, None)

    def einsum(self, spec: str, a: Array, b: Array, dtype: Any, sharding: Any = None) -> Array:
        """The einsum, in `accumulate_dtype` if `dtype` is floating or complex, else in `dtype`."""
        wide = (self.accumulate_dtype if jnp.issubdtype(dtype, jnp.inexact) else None) or dtype
        exact = {"precision": self.precision, "preferred_element_type": wide}
        return jnp.einsum(spec, a, b, out_sharding=sharding, **exact)
