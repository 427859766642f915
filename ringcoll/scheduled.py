"""What all collectives that run by a schedule have in common: who chooses it, and where.

Every one is a primitive in the form that neither adds nor removes a dimension
(`tiled=True`); its public function, in the same file, brings each call into that form.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll import algorithms
from ringcoll.hosts import OnHosts, on_hosts
from ringcoll.manual import empty
from ringcoll.marks import marked, scope
from ringcoll.primitive import Collective
from ringcoll.schedule import Schedule
from ringcoll.table import LAX, LAX_AS_BITS, Algorithm, Table, default_table
from ringcoll.wire import Ranks, moved_as_bits


@dataclass(frozen=True, kw_only=True)
class Scheduled(Collective):
    """A collective that runs by a schedule, chosen here, where the platform is known."""

    algorithm: Algorithm = "auto"
    accumulate_dtype: np.dtype | None = None
    collective: ClassVar[str]  # under which name algorithms and table know it

    def by_hand(self, x: Array, platform: str) -> Array:
        algorithm = self.chosen(math.prod(x.shape) * x.dtype.itemsize, x.dtype, platform)
        return self.by(algorithm, x, platform)

    def chosen(self, nbytes: Any, dtype: np.dtype, platform: str) -> Algorithm:
        """The algorithm for an operand of so many bytes: the user's, or the table's."""
        if not isinstance(nbytes, int):  # a symbolic shape cannot be cut
            return LAX
        algorithm = default_table() if self.algorithm == "auto" else self.algorithm
        if not isinstance(algorithm, Table):
            return algorithm
        n = Ranks.over(self.axes, self.groups).size
        lie = on_hosts(self.mesh, self.axes, self.groups) if self.mesh else OnHosts(1, n)
        call = self.collective, platform, n, nbytes, dtype.name, jax.__version__
        return algorithm.pick(*call, **lie._asdict())

    def by(self, algorithm: Algorithm, x: Array, platform: str) -> Array:
        """By an algorithm that has been chosen."""
        with named(self.primitive.name.removeprefix("ringcoll_"), algorithm):
            return self._by(algorithm, x, platform)

    def _by(self, algorithm: Algorithm, x: Array, platform: str) -> Array:
        if 0 in x.shape:  # nothing to send, and lax's psum_scatter cannot be compiled for it
            return empty(jax.eval_shape(self.by_lax, x).shape, x, self.axes)
        if algorithm == LAX:
            send: Callable[[Array], Array] = partial(self.builtin, platform=platform)
            return marked(send, self.widen(x), self.axes, self.groups).astype(x.dtype)
        if algorithm == LAX_AS_BITS:
            return marked(partial(moved_as_bits, self), x, self.axes, self.groups)
        ranks = ranks_of(algorithm, self.axes, self.groups)
        schedule = algorithms.build(self.collective, algorithm, ranks.shape)
        if isinstance(schedule, Schedule):
            ranks = ranks.cut(schedule.shape)
        return self.run(x, schedule, ranks).astype(x.dtype)

    def over(self, axes: tuple[Hashable, ...], x: Array) -> Array:
        ranks = math.prod(map(lax.axis_size, axes))
        fits = ranks == math.prod(map(lax.axis_size, self.axes))
        if isinstance(self.algorithm, Schedule | tuple) and axes and not fits:
            raise ValueError(
                f"{self.primitive.name} over {self.axes}: algorithm is a schedule for all their "
                f"ranks, but only {axes} are axes of a mesh, the rest of a vmap; pass a name, or "
                "a function that makes a schedule of the sizes of the axes"
            )
        return super().over(axes, x)

    def within(self, axis: Any, x: Array, dim: int, out: int | None) -> Array:
        return super().within(axis, self.widen(x), dim, out).astype(x.dtype)

    def run(self, x: Array, schedule, ranks: Ranks) -> Array:
        """By a schedule; the result may still be in the dtype of accumulation."""
        raise NotImplementedError

    def builtin(self, x: Array, platform: str) -> Array:
        """By what JAX has for it on the platform."""
        return self.by_lax(x)

    def widen(self, x: Array) -> Array:
        """x in the dtype in which sums are accumulated. (Those of integers are exact.)"""
        wide = self.accumulate_dtype if jnp.issubdtype(x.dtype, jnp.inexact) else None
        return x.astype(wide or x.dtype)

    def combine(self, received: Array, mine: Array) -> Array:
        """What a partial result that came makes with this rank's contribution."""
        return lax.add(self.widen(received), self.widen(mine))

    def for_transpose(self) -> dict[str, Any]:
        """What a collective and its transpose have in common."""
        names = ("axes", "groups", "algorithm", "accumulate_dtype")
        shared = {name: getattr(self, name) for name in names}
        if self.algorithm == LAX_AS_BITS:  # it only moves, and a transpose may add
            shared["algorithm"] = "auto"
        return shared


def named(call: str, algorithm: Algorithm) -> AbstractContextManager[None]:
    """Under which name profiles have what is traced within: `ringcoll.psum(ring)`."""
    return scope(f"ringcoll.{call}({name_of(algorithm)})")


def name_of(algorithm: Algorithm) -> str:
    """What an algorithm that was chosen is called; a schedule is just given."""
    return algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "given")


def ranks_of(
    algorithm: Algorithm, axes: Sequence[Hashable], groups: tuple[tuple[int, ...], ...] | None
) -> Ranks:
    """The ranks that an algorithm runs on.

    One of ours has nothing to do along an axis of size 1; a user's schedule or function is
    made for the axes as they were written.
    """
    return Ranks.over(axes, groups, all_axes=not isinstance(algorithm, str))
