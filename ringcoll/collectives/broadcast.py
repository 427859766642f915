"""Broadcast: an all-reduce in which only the source contributes nonzero bits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringcoll import algorithms
from ringcoll.choose.table import Algorithm
from ringcoll.collectives.all_reduce import AllReduce, Psum
from ringcoll.collectives.axes import AxisName, axes_of, rank_count
from ringcoll.collectives.front_door import Pytree, bind_leaves
from ringcoll.collectives.public import integer, public
from ringcoll.runtime.hop import Ranks, as_bits
from ringcoll.runtime.value_types import varying
from ringcoll.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Pbroadcast(AllReduce, name="pbroadcast"):
    """The bits of the source, combined by bitwise or with the zeros of the other ranks.

    A bitwise or is exact for every dtype, also for -0.0 and NaN. lax's own broadcast exists only on
    GPU. Elsewhere the built-in is the psum of the bits, which is exact too.

    A primitive cannot hold a traced source. If there is one, the bits of the other ranks are
    cleared before the primitive is bound, and `source` is None.
    """

    collective = "pbroadcast"
    source: Any  # an int; None if all other ranks' bits have been set to zero
    traced: Array | None = field(default=None, hash=False, compare=False)

    def __call__(self, *xs: Array) -> list[Array]:
        if self.traced is None:
            return super().__call__(*xs)
        rest, is_source = self.traced, jnp.bool_(True)
        on_mesh = jax.sharding.get_abstract_mesh().manual_axes
        for axis in reversed(self.axes):
            rest, place = jnp.divmod(rest, lax.axis_size(axis))
            if axis in on_mesh:
                is_source &= lax.axis_index(axis) == place
            else:  # the axis of a vmap
                every = [lax.all_gather(x, axis) for x in xs]
                xs = tuple(lax.dynamic_index_in_dim(x, place, keepdims=False) for x in every)
        masked = [varying(_or_zero_bits(is_source & (rest == 0), x), self.axes) for x in xs]
        axes = tuple(axis for axis in self.axes if axis in on_mesh)
        return replace(self, axes=axes, traced=None)(*masked) if axes else masked

    def by_lax(self, x: Array) -> Array:
        return lax.pbroadcast(x, self.axes, self.source or 0)  # None: only the type counts

    def builtin(self, x: Array, platform: str) -> Array:
        if platform == "gpu" and self.source is not None:
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
        return back(reduce(self._at_source(bits)))

    def _at_source(self, x: Array) -> Array:
        if self.source is None:
            return x
        return jnp.where(lax.axis_index(self.axes) == self.source, x, jnp.zeros_like(x))

    def transpose(self, cts: Sequence[Array]) -> list[Array]:
        # Give it the type of the operand: `where` returns an empty array with a different type.
        totals = [varying(total, self.axes) for total in Psum(**self.for_transpose())(*cts)]
        return [self._at_source(total) for total in totals]

    def under_vmap(self, x: Array, dim: int | None, axis: Any) -> tuple[Array, None]:
        before, after = self.axes_around(axis)  # not by lax: its batching rule fails
        stride = math.prod(map(lax.axis_size, after))
        major, place = divmod(self.source // stride, axis.size)
        source = major * stride + self.source % stride
        sent = x if dim is None else lax.index_in_dim(x, place, dim, keepdims=False)
        return replace(self, source=source).over(before + after, sent), None


@jax.custom_jvp
def _or_zero_bits(is_source: Array, x: Array) -> Array:
    """x on the source, and bits that are all 0 elsewhere.

    Not every narrow float has a zero, and a select of narrow floats may change the bits of a NaN.
    """
    bits, back = as_bits(x)
    return back(jnp.where(is_source, bits, jnp.zeros_like(bits)))


@_or_zero_bits.defjvp
def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Array, Any]:
    is_source, t = primals[0], tangents[1]
    if t.dtype != jax.dtypes.float0:
        t = jnp.where(is_source, t, jnp.zeros_like(t))
    return _or_zero_bits(*primals), t


@public()
def pbroadcast(
    x: Pytree, axis_name: AxisName, source: int | Array, *, algorithm: Algorithm = "auto"
) -> Pytree:
    """The source rank's x on every rank, bit by bit.

    `x: [a, b] -> [a, b]`. This runs on every platform; lax's runs only on GPU. `source` counts
    from 0, or from the last rank with -1. A traced source must be the same on all ranks. With it,
    "lax" is the psum of the bits on every platform. One that is not a rank gives zeros.

    Steps and bytes: as `psum`. It is a psum to which all ranks but one contribute zeros. It
    sends as many bytes as van de Geijn's scatter and all-gather.

    Gradient: the sum of the cotangents, at the source.

    Raises:
        ValueError: x does not vary over the axis (under `check_vma=True`), as in lax; or
            there is no such source, unless it is traced.
        TypeError: `source` is not an integer.

    Source: Chan et al. (2007).

    n, s, `algorithm` and what all of them raise: see `ringcoll.lax`.

    >>> send = ranks(lambda x: ringcoll.pbroadcast(x, "x", source=2, algorithm="ring"))
    >>> print(send(jnp.array([3, 1, 4, 1])))
    [4 4 4 4]
    """
    if not jax.tree.leaves(x):
        return x  # as lax, which then does not look at the axis
    axes, n = axes_of(axis_name), rank_count(axis_name)
    if isinstance(source, jax.core.Tracer):
        if source.shape or not jnp.issubdtype(source.dtype, jnp.integer):
            raise TypeError(f"source is {source.dtype.name}{list(source.shape)}; pass one integer")
        source = jnp.int32(source)
        counted = jnp.where(source < 0, source + n, source)
        of: Any = {"source": None, "traced": counted}
    else:
        rank = integer("source", source)
        if not -n <= rank < n:
            raise ValueError(f"source={rank} is not a rank; pass 0 to {n - 1}, or -1 for the last")
        of = {"source": rank % n}
    return bind_leaves(x, axis_name, Pbroadcast(axes=axes, algorithm=algorithm, **of))
