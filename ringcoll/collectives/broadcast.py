"""Broadcast: an all-reduce to which all but the source contribute no bits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringcoll import algorithms
from ringcoll.collectives.all_reduce import AllReduce, Psum
from ringcoll.collectives.axes import AxisName
from ringcoll.collectives.call import Call
from ringcoll.collectives.front_door import Pytree, each
from ringcoll.collectives.table import Algorithm
from ringcoll.costs.wire import Wire
from ringcoll.runtime import built_in
from ringcoll.runtime.hop import Ranks, as_bits
from ringcoll.runtime.value_types import varying
from ringcoll.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Pbroadcast(AllReduce, name="pbroadcast"):
    """The bits of the source, combined by bitwise or with the zeros of the other ranks.

    A bitwise or is exact for every dtype, also for -0.0 and NaN. lax's own broadcast exists only on
    GPU. Elsewhere the built-in is the psum of the bits, which is exact too.
    """

    collective = "pbroadcast"
    source: Any

    def by_lax(self, x: Array) -> Array:
        if isinstance(self.source, int) and not 0 <= self.source < lax.axis_size(self.axes):
            raise ValueError(f"source={self.source} is not a rank of the axis")
        return built_in.pbroadcast(x, self.axes, self.source)

    def builtin(self, x: Array, platform: str) -> Array:
        if platform == "gpu":
            return self.by_lax(x)
        return self._by_bits(x, lambda bits: built_in.psum(bits, self.axes))

    def combine(self, received: Array, mine: Array) -> Array:
        return lax.bitwise_or(received, mine)

    def run(self, x: Array, schedule: Schedule | algorithms.Stages | Wire, ranks: Ranks) -> Array:
        return self._by_bits(x, lambda bits: AllReduce.run(self, bits, schedule, ranks))

    def _by_bits(self, x: Array, reduce: Callable[[Array], Array]) -> Array:
        if jnp.iscomplexobj(x):
            return lax.complex(*(self._by_bits(part, reduce) for part in (x.real, x.imag)))
        bits, back = as_bits(x, floats=None)
        is_source = lax.axis_index(self.axes) == self.source
        return back(reduce(jnp.where(is_source, bits, jnp.zeros_like(bits))))

    def transpose(self, cts: Sequence[Array]) -> list[Array]:
        # Give it the type of the operand: `where` returns an empty array with another type.
        totals = [varying(total, self.axes) for total in Psum(**self.for_transpose())(*cts)]
        is_source = lax.axis_index(self.axes) == self.source
        return [jnp.where(is_source, total, jnp.zeros_like(total)) for total in totals]

    def under_vmap(self, x: Array, dim: int | None, axis: Any) -> tuple[Array, None]:
        before, after = self.axes_around(axis)  # not by lax: its batching rule fails
        stride = math.prod(map(lax.axis_size, after))
        major, place = divmod(self.source // stride, axis.size)
        source = major * stride + self.source % stride
        sent = x if dim is None else lax.index_in_dim(x, place, dim, keepdims=False)
        return replace(self, source=source).over(before + after, sent), None


def pbroadcast(
    x: Pytree, axis_name: AxisName, source: Any, *, algorithm: Algorithm = "auto"
) -> Pytree:
    """The source rank's x on every rank, bit by bit.

    `x: [a, b] -> [a, b]`. This runs on every platform; lax's runs only on GPU. If `source`
    is traced, lax does the whole call.

    Steps and bytes: as `psum`. It is a psum to which all ranks but one contribute zeros. It
    sends as many bytes as van de Geijn's scatter and all-gather.

    Gradient: the sum of the cotangents, at the source.

    Raises:
        ValueError: x does not vary over the axis (under `check_vma=True`), as in lax; or
            there is no such source.

    Source: Chan et al. (2007).

    n, s, `algorithm` and what all of them raise: see `ringcoll.lax`.

    >>> send = ranks(lambda x: ringcoll.pbroadcast(x, "x", source=2, algorithm="ring"))
    >>> print(send(jnp.array([3, 1, 4, 1])))
    [4 4 4 4]
    """
    call = Call("pbroadcast", axis_name, arguments={"source": source})
    is_traced = isinstance(source, jax.core.Tracer)
    source = source if is_traced else call.integer("source")
    broadcast = Pbroadcast(axes=call.axes, source=source)
    return each(call, x, broadcast, algorithm=algorithm, is_only_lax_s=is_traced)
