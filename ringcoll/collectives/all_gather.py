"""All-gather and reduce-scatter. Each is the transpose of the other, by the same schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ringcoll.choose.table import Algorithm
from ringcoll.collectives.axes import AxisName, Groups, as_tuples, axes_of
from ringcoll.collectives.by_schedule import ScheduledCollective
from ringcoll.collectives.front_door import Pytree, bind_leaves
from ringcoll.collectives.placing import gather_along, reduce_along
from ringcoll.collectives.public import public
from ringcoll.collectives.sums import Exchanged, Tree, WireLike, sums_of
from ringcoll.runtime.hop import Ranks, moved
from ringcoll.runtime.slicing import LONG, dynamic_slice_in_dim, start_of
from ringcoll.runtime.value_types import is_checked, varying
from ringcoll.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class AllGather(ScheduledCollective, name="all_gather"):
    """`dims` is the dimension along which the shards are joined."""

    collective = "all_gather"
    adds_dim = True
    to: str = "varying"  # the type of the result, as in `jax.lax`

    def __call__(self, *xs: Array) -> list[Array]:
        if not self.tiled:
            return replace(self, tiled=True)(*(jnp.expand_dims(x, self.dims[0]) for x in xs))
        return super().__call__(*xs)

    def by_lax(self, x: Array) -> Array:
        (dim,) = self.dims
        return lax.all_gather(
            x, self.axes, axis_index_groups=self.groups, axis=dim, tiled=self.tiled, to=self.to
        )

    def builtin(self, x: Array, platform: str) -> Array:
        return moved(self, x, platform)

    def run(self, x: Array, schedule: Schedule, ranks: Ranks) -> Array:
        return gather_along(x, self.dims[0], schedule, ranks, self.sums.wire)

    def by_owners(self, x: Array, ranks: Ranks, sums: Exchanged) -> Array:
        return sums.gather(x, self.dims[0], ranks)

    def transpose(self, cts: Sequence[Array]) -> list[Array]:
        if self.to != "invarying" or not is_checked():
            return PsumScatter(**self.for_transpose(), dims=self.dims)(*cts)
        (ct,), (dim,) = cts, self.dims  # every rank has the same cotangent
        ranks = Ranks.over(self.axes, self.groups)
        length, rank = ct.shape[dim], ranks.number()
        size = length // ranks.size
        # Not `start_of` for all, so that the lowered text of short ones does not change.
        start = start_of(rank, size, 0, length) if length >= LONG else rank * size
        return [dynamic_slice_in_dim(varying(ct, self.axes), start, size, dim)]

    def under_vmap(self, x: Array, dim: int, axis: Any) -> tuple[Array, None]:
        before, after = self.axes_around(axis)  # gather over the minor axes first
        x = self.batched(dim).over(after, x)
        return self.over(before, self.within(axis, x, dim, None)), None


@dataclass(frozen=True, kw_only=True)
class PsumScatter(ScheduledCollective, name="psum_scatter"):
    """`dims` is the dimension along which the sum is scattered."""

    collective = "psum_scatter"
    adds_numbers = True
    lowers_beside_explicit = False

    def by_lax(self, x: Array) -> Array:
        (dim,) = self.dims
        return lax.psum_scatter(
            x, self.axes, scatter_dimension=dim, axis_index_groups=self.groups, tiled=self.tiled
        )

    def __call__(self, *xs: Array) -> list[Array]:
        if not self.tiled:  # a block that is not of size 1 cannot be squeezed
            return [y.squeeze(self.dims[0]) for y in replace(self, tiled=True)(*xs)]
        return super().__call__(*xs)

    def run(self, x: Array, schedule: Schedule, ranks: Ranks) -> Array:
        return reduce_along(x, self.dims[0], schedule, ranks, self.combine, self.sums.wire)

    def by_owners(self, x: Array, ranks: Ranks, sums: Exchanged) -> Array:
        return sums.reduce_scatter(x, self.dims[0], ranks)

    def transpose(self, cts: Sequence[Array]) -> list[Array]:
        return AllGather(**self.for_transpose(), dims=self.dims)(*cts)

    def parts(self, total: Array, ranks: int) -> Array:
        at = self.dims[0]
        shape = (*total.shape[:at], ranks, total.shape[at] // ranks, *total.shape[at + 1 :])
        return jnp.moveaxis(total.reshape(shape), at, 0)

    def under_vmap(self, x: Array, dim: int, axis: Any) -> tuple[Array, int]:
        before, after = self.axes_around(axis)  # scatter over the major axes first
        x = self.batched(dim).over(before, x)
        return self.batched(0).over(after, self.within(axis, x, dim, 0)), 0


@public()
def all_gather(
    x: Pytree,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    algorithm: Algorithm = "auto",
    accumulate_dtype: DTypeLike | None = None,
    order: Tree | None = None,
    wire: WireLike | None = None,
) -> Pytree:
    """Every rank's x on every rank, stacked (or, tiled, end to end) along `axis`.

    `x: [a, b] -> [n, a, b]`, tiled `[n a, b]`. Block r is rank r's; ranks of several axes
    are counted row-major. `to="invarying"` types the result as the same on all ranks.

    Ring: n-1 rounds of s bytes. With every algorithm, a rank sends (n-1) s bytes; "bruck" takes
    ceil(log2 n) rounds, "two_ended" ceil((n-1)/2).

    With a `wire` each shard is encoded once, by its owner, and all ranks hold the same bits.

    Gradient: `psum_scatter` by the same algorithm and wire, summed in `accumulate_dtype`; for
    `to="invarying"` a slice.

    Raises:
        ValueError: `axis` is out of bounds, or `to` is unknown.

    Source: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication:
    theory, practice, and experience", Concurrency Computat.: Pract. Exper. 19 (2007).

    n, s, `algorithm` and what all of them raise: see `ringcoll.lax`.

    >>> whole = ranks(
    ...     lambda x: ringcoll.all_gather(x, "x", tiled=True, to="invarying", algorithm="bruck"),
    ...     out_specs=P(),
    ... )
    >>> print(whole(jnp.arange(8)))
    [0 1 2 3 4 5 6 7]
    """
    gather = AllGather(
        axes=axes_of(axis_name),
        groups=as_tuples(axis_index_groups),
        tiled=tiled,
        to=to,
        is_only_lax=to == "reduced",
        algorithm=algorithm,
        sums=sums_of(accumulate_dtype, order, wire),
    )
    return bind_leaves(x, axis_name, gather, [("axis", axis)])


@public()
def psum_scatter(
    x: Pytree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    algorithm: Algorithm = "auto",
    accumulate_dtype: DTypeLike | None = None,
    order: Tree | None = None,
    wire: WireLike | None = None,
) -> Pytree:
    """The sum of all ranks' x; rank r keeps block r along `scatter_dimension`.

    `x: [n, a, b] -> [a, b]`, tiled `[n a, b] -> [a, b]`.

    Ring: n-1 rounds of s/n bytes, with an addition in each. A schedule rounds every addition to
    the dtype of x or, if it is given, to `accumulate_dtype`; "lax" rounds as XLA does. With a wider
    `accumulate_dtype` the first message of a ring is narrow, and the others are wide. "direct"
    sends only narrow messages, n-1 of them in one round, and rounds the sum once. The code for
    this is `Plain.add` in `ringcoll/collectives/sums.py`.

    With a `wire`, "auto" encodes every contribution once, sends it straight to its rank, and adds
    in float32. With an algorithm that adds on the way, such as "ring", every message is a partial
    sum that is encoded again.

    Gradient: `all_gather` by the same algorithm and wire.

    Raises:
        ValueError: the dimension is out of bounds; it is not n or, tiled, not a multiple of n.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", J. Parallel Distrib. Comput. 69 (2009).

    n, s, `algorithm` and what all of them raise: see `ringcoll.lax`.

    >>> x = jnp.repeat(jnp.array([256, 1, 1, 1], jnp.bfloat16), 4)  # every sum is 259
    >>> for dtype in jnp.bfloat16, jnp.float32:
    ...     sums = partial(ringcoll.psum_scatter, axis_name="x", tiled=True, accumulate_dtype=dtype)
    ...     print(ranks(partial(sums, algorithm="direct"))(x))
    [256 260 260 256]
    [260 260 260 260]
    """
    scatter = PsumScatter(
        axes=axes_of(axis_name),
        groups=as_tuples(axis_index_groups),
        tiled=tiled,
        algorithm=algorithm,
        sums=sums_of(accumulate_dtype, order, wire),
    )
    return bind_leaves(x, axis_name, scatter, [("scatter_dimension", scatter_dimension)])
