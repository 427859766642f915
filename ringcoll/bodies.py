"""The collectives: each in lax, by hand, transposed and under `vmap`.

Every one is here in the form that neither adds nor removes a dimension (`tiled=True`);
`ringcoll.collectives` brings each call of the public functions into it.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll import algorithms
from ringcoll.manual import empty, is_checked, sharded_dims, varying
from ringcoll.primitive import Collective
from ringcoll.schedule import Schedule
from ringcoll.table import Algorithm, Table, default_table
from ringcoll.visitors import all_to_all_along, by_stages, gather_along, reduce_along
from ringcoll.wire import Ranks, as_bits


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
        algorithm = default_table() if self.algorithm == "auto" else self.algorithm
        if not isinstance(algorithm, Table):
            return algorithm
        if not isinstance(nbytes, int):  # a symbolic shape
            return "lax"
        n = Ranks.over(self.axes, self.groups).size
        return algorithm.pick(self.collective, platform, n, nbytes, dtype.name)

    def by(self, algorithm: Algorithm, x: Array, platform: str) -> Array:
        """By an algorithm that has been chosen."""
        if 0 in x.shape:  # nothing to send, and lax's psum_scatter cannot be compiled for it
            return empty(jax.eval_shape(self.by_lax, x).shape, x, self.axes)
        if algorithm == "lax":
            return self.builtin(self.widen(x), platform).astype(x.dtype)
        ranks = Ranks.over(self.axes, self.groups, all_axes=not isinstance(algorithm, str))
        schedule = algorithms.build(self.collective, algorithm, ranks.shape)
        if isinstance(schedule, Schedule):
            ranks = ranks.cut(schedule.shape)
        return self.run(x, schedule, ranks).astype(x.dtype)

    def over(self, axes: tuple[Hashable, ...], x: Array) -> Array:
        fits = axes == self.axes or isinstance(self.algorithm, str | Table)
        fitting = self if fits else replace(self, algorithm="auto")  # not made for fewer axes
        return Collective.over(fitting, axes, x)

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


@dataclass(frozen=True, kw_only=True)
class AllGather(Scheduled, name="all_gather"):
    """`dims` is the one along which the shards are put together."""

    collective = "all_gather"
    to: str = "varying"

    def by_lax(self, x: Array) -> Array:
        (dim,) = self.dims
        return lax.all_gather(
            x, self.axes, axis_index_groups=self.groups, axis=dim, tiled=True, to=self.to
        )

    def widen(self, x: Array) -> Array:
        return x  # nothing is summed here; the gradient is

    def run(self, x: Array, schedule: Schedule, ranks: Ranks) -> Array:
        return gather_along(x, self.dims[0], schedule, ranks)

    def transpose(self, ct: Array) -> Array:
        if self.to == "invarying" and is_checked():  # every rank has the same cotangent
            ranks = Ranks.over(self.axes, self.groups)
            size = ct.shape[self.dims[0]] // ranks.size
            return lax.dynamic_slice_in_dim(
                varying(ct, self.axes), ranks.number() * size, size, self.dims[0]
            )
        return PsumScatter(**_shared(self), dims=self.dims)(ct)

    def under_vmap(self, x: Array, dim: int, axis: Any) -> tuple[Array, None]:
        before, after = self.around(axis)  # the minor axes first
        x = self.batched(dim).over(after, x)
        return self.over(before, self.within(axis, x, dim, None)), None


@dataclass(frozen=True, kw_only=True)
class PsumScatter(Scheduled, name="psum_scatter"):
    """`dims` is the one along which the sum is scattered."""

    collective = "psum_scatter"

    def by_lax(self, x: Array) -> Array:
        (dim,) = self.dims
        return lax.psum_scatter(
            x, self.axes, scatter_dimension=dim, axis_index_groups=self.groups, tiled=True
        )

    def run(self, x: Array, schedule: Schedule, ranks: Ranks) -> Array:
        return reduce_along(x, self.dims[0], schedule, ranks, self.combine)

    def transpose(self, ct: Array) -> Array:
        return AllGather(**_shared(self), dims=self.dims)(ct)

    def under_vmap(self, x: Array, dim: int, axis: Any) -> tuple[Array, int]:
        before, after = self.around(axis)  # the major axes first
        x = self.batched(dim).over(before, x)
        return self.batched(0).over(after, self.within(axis, x, dim, 0)), 0


@dataclass(frozen=True, kw_only=True)
class AllReduce(Scheduled):
    """By a gather's schedule, run backward and then forward; or stage by stage."""

    collective = "psum"

    def run(self, x: Array, schedule: Schedule | algorithms.Stages, ranks: Ranks) -> Array:
        if ranks.size == 1:
            return x
        if not isinstance(schedule, Schedule):
            return by_stages(x, schedule, ranks, self.combine)
        dims = [d for d in range(x.ndim) if d not in sharded_dims(x)]
        dim = next((d for d in dims if x.shape[d] % ranks.size == 0), None)
        if dim is not None:
            return self._chunked(x, dim, schedule, ranks)
        if len(dims) == x.ndim:
            flat = self._padded(x.reshape(-1), 0, schedule, ranks)
            return flat.reshape(x.shape)
        if dims:
            return self._padded(x, max(dims, key=lambda d: x.shape[d]), schedule, ranks)
        return by_stages(x, (schedule,), ranks, self.combine)  # nothing can be cut

    def by_hand_jointly(self, xs: Sequence[Array], platform: str) -> list[Array]:
        """Small operands of one dtype share their messages, end to end."""
        nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in xs)
        algorithm = self.chosen(nbytes, xs[0].dtype, platform)
        if len(xs) == 1 or algorithm == "lax":
            return [self.by(algorithm, x, platform) for x in xs]
        whole = self.by(algorithm, jnp.concatenate([x.reshape(-1) for x in xs]), platform)
        parts = jnp.split(whole, list(itertools.accumulate(x.size for x in xs[:-1])))
        return [part.reshape(x.shape) for x, part in zip(xs, parts, strict=True)]

    def _padded(self, x: Array, dim: int, schedule: Schedule, ranks: Ranks) -> Array:
        size = x.shape[dim]
        padding = [(0, -size % ranks.size if d == dim else 0, 0) for d in range(x.ndim)]
        whole = self._chunked(lax.pad(x, jnp.zeros((), x.dtype), padding), dim, schedule, ranks)
        return lax.slice_in_dim(whole, 0, size, axis=dim)

    def _chunked(self, x: Array, dim: int, schedule: Schedule, ranks: Ranks) -> Array:
        """Rounded once, by the owner of each chunk, so that all ranks hold the same bits."""
        mine = reduce_along(x, dim, schedule, ranks, self.combine)
        return gather_along(mine.astype(x.dtype), dim, schedule, ranks)

    def under_vmap(self, x: Array, dim: int, axis: Any) -> tuple[Array, None]:
        before, after = self.around(axis)
        return self.over(before + after, self.within(axis, x, dim, None)), None


@dataclass(frozen=True, kw_only=True)
class Psum(AllReduce, name="psum"):
    """The sum; its transpose is free where types say that all ranks hold the same."""

    def by_lax(self, x: Array) -> Array:
        return lax.psum(x, self.axes, axis_index_groups=self.groups)

    def transpose_jointly(self, cts: Sequence[Array]) -> list[Array]:
        if is_checked():
            return [varying(ct, self.axes) for ct in cts]
        return self.joint(*cts) if cts else []


@dataclass(frozen=True, kw_only=True)
class Pmax(AllReduce, name="pmax", differentiable=False):
    """The maximum; like lax's, without a derivative."""

    def by_lax(self, x: Array) -> Array:
        return lax.pmax(x, self.axes, axis_index_groups=self.groups)

    def combine(self, received: Array, mine: Array) -> Array:
        return lax.max(received, mine)


@dataclass(frozen=True, kw_only=True)
class Pmin(AllReduce, name="pmin", differentiable=False):
    """The minimum; like lax's, without a derivative."""

    def by_lax(self, x: Array) -> Array:
        return lax.pmin(x, self.axes, axis_index_groups=self.groups)

    def combine(self, received: Array, mine: Array) -> Array:
        return lax.min(received, mine)


@dataclass(frozen=True, kw_only=True)
class Pbroadcast(AllReduce, name="pbroadcast"):
    """An all-reduce to which all but the source contribute no bits.

    Reduce-scatter and all-gather move what scatter and all-gather would (van de Geijn's
    broadcast), and or-ing bits is exact for every dtype, -0.0 and NaN included. lax's own
    exists on GPU only; elsewhere the built-in is the psum of the bits, as exact.
    """

    collective = "pbroadcast"
    source: int

    def by_lax(self, x: Array) -> Array:
        return lax.pbroadcast(x, self.axes, self.source)

    def builtin(self, x: Array, platform: str) -> Array:
        if platform == "gpu":
            return self.by_lax(x)
        return self._by_bits(x, lambda bits: lax.psum(bits, self.axes))

    def combine(self, received: Array, mine: Array) -> Array:
        return lax.bitwise_or(received, mine)

    def run(self, x: Array, schedule: Schedule | algorithms.Stages, ranks: Ranks) -> Array:
        return self._by_bits(x, lambda bits: AllReduce.run(self, bits, schedule, ranks))

    def _by_bits(self, x: Array, reduce: Callable[[Array], Array]) -> Array:
        if jnp.iscomplexobj(x):
            return lax.complex(*(self._by_bits(part, reduce) for part in (x.real, x.imag)))
        bits, back = as_bits(x, floats=None)
        is_source = lax.axis_index(self.axes) == self.source
        return back(reduce(jnp.where(is_source, bits, jnp.zeros_like(bits))))

    def transpose(self, ct: Array) -> Array:
        total = Psum(**_shared(self))(ct)
        is_source = lax.axis_index(self.axes) == self.source
        return jnp.where(is_source, total, jnp.zeros_like(total))

    def under_vmap(self, x: Array, dim: int, axis: Any) -> tuple[Array, None]:
        before, after = self.around(axis)  # not by lax, whose own rule fails
        stride = math.prod(map(lax.axis_size, after))
        major, place = divmod(self.source // stride, axis.size)
        source = major * stride + self.source % stride
        sent = lax.index_in_dim(x, place, dim, keepdims=False)
        return replace(self, source=source).over(before + after, sent), None


@dataclass(frozen=True, kw_only=True)
class AllToAll(Scheduled, name="all_to_all"):
    """`dims` are the one that is split and the one along which blocks are put together."""

    collective = "all_to_all"

    def by_lax(self, x: Array) -> Array:
        split, concat = self.dims
        return lax.all_to_all(
            x, self.axes, split, concat, axis_index_groups=self.groups, tiled=True
        )

    def run(self, x: Array, schedule: algorithms.AllToAll, ranks: Ranks) -> Array:
        split, concat = self.dims
        return all_to_all_along(x, split, concat, schedule, ranks)

    def transpose(self, ct: Array) -> Array:
        return replace(self, dims=self.dims[::-1])(ct)


def _shared(collective: Scheduled) -> dict[str, Any]:
    """What a collective and its transpose have in common."""
    names = ("axes", "groups", "algorithm", "accumulate_dtype")
    return {name: getattr(collective, name) for name in names}
