"""The options of a matmul with a collective: its axes, algorithm and precision."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.collectives.by_schedule import built
from ringcoll.collectives.table import Algorithm
from ringcoll.costs.model import Model
from ringcoll.matmuls import auto
from ringcoll.runtime.apart import compiled_apart
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.slicing import concatenated
from ringcoll.runtime.tree_sums import rounded, summed
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
    leaves: int | None = None  # the leaves of the tree by which it adds; None for any order

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

    def einsum(
        self, spec: str, a: Array, b: Array, dtype: Any, sharding: Any = None, cut: str = ""
    ) -> Array:
        """The einsum, in `accumulate_dtype` if `dtype` is floating or complex, else in `dtype`.

        With `leaves`, it is computed in this rank's blocks of the label `cut`, if there is one.
        """
        wide = (self.accumulate_dtype if jnp.issubdtype(dtype, jnp.inexact) else None) or dtype
        if self.leaves is not None and jnp.issubdtype(dtype, jnp.inexact):
            multiplied = product(spec, jnp.dtype(wide), self.precision, sharding)
            factors = zip(*self.in_blocks(spec, a, b, cut), strict=True)
            terms = [multiplied(x, y) for x, y in factors]
            _, out = spec.split("->")
            return concatenated(terms, out.index(cut)) if cut in out and cut else summed(terms)
        return _einsum(spec, a, b, wide, self.precision, sharding)

    def in_blocks(self, spec: str, a: Array, b: Array, cut: str) -> tuple[list[Array], list[Array]]:
        """Both factors, cut into this rank's blocks of a label."""
        count = self.blocks() if cut else 1
        a_labels, b_labels = spec.split("->")[0].split(",")
        return cut_along(a, a_labels, cut, count), cut_along(b, b_labels, cut, count)

    def blocks(self) -> int:
        """How many leaves of the tree a rank has."""
        return (self.leaves or 1) // prod(self.sizes())

    def by_whole_operands(self) -> bool:
        """Whether products are computed from whole operands, although a schedule moves shards.

        XLA:CPU adds in another order if a product has another number of rows.
        """
        return self.leaves is not None and device_kind() in (None, "cpu")


def cut_along(x: Array, labels: str, label: str, count: int) -> list[Array]:
    """x in `count` blocks along a label; if it does not have the label, x itself for each block."""
    if count == 1 or label not in labels:
        return [x] * count
    dim = labels.index(label)
    return list(lax.split(x, [x.shape[dim] // count] * count, axis=dim))


@lru_cache(maxsize=1024)
def product(
    spec: str, dtype: np.dtype, precision: Any, sharding: Any
) -> Callable[[Array, Array], Array]:
    """A function: one einsum of two factors, rounded to its dtype before it is added to others."""
    wide = jnp.promote_types(dtype, jnp.float32) if dtype == jnp.bfloat16 else dtype

    def multiplied(a: Array, b: Array) -> Array:
        return rounded(_einsum(spec, a, b, wide, precision, sharding).astype(dtype))

    return compiled_apart(multiplied)


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
