"""All-reduces: the sum, mean, maximum or minimum of all ranks' x, the same on every rank."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ringcoll import algorithms
from ringcoll.choose.plan import Plan
from ringcoll.choose.table import Algorithm, Table
from ringcoll.collectives.axes import AxisName, Groups, as_tuples, axes_of
from ringcoll.collectives.by_schedule import ScheduledCollective
from ringcoll.collectives.front_door import Pytree, bind_leaves, is_small
from ringcoll.collectives.placing import by_stages, gather_along, reduce_along
from ringcoll.collectives.public import public
from ringcoll.collectives.sums import Exchanged, Tree, WireLike, gathered, sums_of
from ringcoll.runtime.hop import Ranks, is_narrow
from ringcoll.runtime.hosts import Where
from ringcoll.runtime.scopes import scope
from ringcoll.runtime.value_types import is_checked, sharded_dims, varying
from ringcoll.schedules.registry import LAX
from ringcoll.schedules.schedule import Schedule

#: A reduce-scatter or an all-gather along a dimension.
Along = Callable[[Array, int], Array]


@dataclass(frozen=True, kw_only=True)
class AllReduce(ScheduledCollective):
    """Runs a gather's schedule backward and then forward, or runs stage by stage."""

    collective = "psum"
    packs = True
    gathers_by_lax: bool = False  # after a reduce-scatter by the algorithm

    def lower(self, where: Where, *xs: Array, plan: Plan | None = None) -> list[Array]:
        """Small operands of one dtype share the messages of a schedule, end to end."""
        plan = plan or self.plan(xs, where)
        is_picked = self.algorithm == "auto" or isinstance(self.algorithm, Table)
        # There the built-in gather of integers is faster than the ring's.
        by_lax = (
            is_picked and plan.algorithm == "ring" and where.platform == "cpu" and is_narrow(xs[0])
        )
        by = replace(self, gathers_by_lax=by_lax)
        of_one = partial(ScheduledCollective.lower, by, where, plan=plan)
        if len(xs) == 1 or plan.algorithm == LAX:
            return [y for x in xs for y in of_one(x)]
        (joined,) = of_one(jnp.concatenate([x.reshape(-1) for x in xs]))
        parts = jnp.split(joined, list(itertools.accumulate(x.size for x in xs[:-1])))
        return [part.reshape(x.shape) for x, part in zip(xs, parts, strict=True)]

    def run(self, x: Array, schedule: Schedule | algorithms.Stages, ranks: Ranks) -> Array:
        if isinstance(schedule, tuple):
            return self._staged(x, schedule, ranks) if ranks.size > 1 else x
        if schedule.size == 1:
            return x
        if x.ndim and len(sharded_dims(x)) == x.ndim:  # no dimension can be cut into chunks
            return self._staged(x, (schedule,), ranks)
        wire = self.sums.wire
        reduce = partial(
            reduce_along, schedule=schedule, ranks=ranks, combine=self.combine, wire=wire
        )
        gather = partial(gather_along, schedule=schedule, ranks=ranks, wire=wire)
        if self.gathers_by_lax:
            gather = partial(gathered, ranks=ranks)
        return _by_chunks(x, schedule.size, reduce, gather)

    def _staged(self, x: Array, stages: algorithms.Stages, ranks: Ranks) -> Array:
        """Gather whole vectors and combine them, stage by stage."""
        return by_stages(x, stages, ranks, partial(self.sums.fold, self.combine), self.sums.wire)

    def by_owners(self, x: Array, ranks: Ranks, sums: Exchanged) -> Array:
        if sums.adds_whole and (is_small(x) or sharded_dims(x)):
            every = sums.widen(sums.gather(x[None], 0, ranks))
            return sums.fold(self.combine, [every[i] for i in range(ranks.size)])
        steps = sums.reduce_scatter, sums.gather
        return _by_chunks(x, ranks.size, *(partial(step, ranks=ranks) for step in steps))

    def under_vmap(self, x: Array, dim: int | None, axis: Any) -> tuple[Array, None]:
        before, after = self.axes_around(axis)
        return self.over(before + after, self.within(axis, x, dim, None)), None


def _by_chunks(x: Array, n: int, reduce: Along, gather: Along) -> Array:
    """Reduce-scatter and all-gather of chunks for n ranks. The owner of a chunk rounds it, once.

    So all ranks hold the same bits.
    """
    dims = [d for d in range(x.ndim) if d not in sharded_dims(x)]
    dim = next((d for d in dims if x.shape[d] % n == 0), None)
    whole = x
    if dim is None and len(dims) == x.ndim:
        # A flat array needs the least padding. Sharded arrays keep their shape: a reshape would
        # unshard them.
        whole, dim = x.reshape(-1), 0
    elif dim is None:
        dim = max(dims, key=lambda d: x.shape[d])
    size = whole.shape[dim]
    if size % n:
        padding = [(0, -size % n if d == dim else 0, 0) for d in range(whole.ndim)]
        whole = lax.pad(whole, jnp.zeros((), x.dtype), padding)
    with scope("reduce_scatter"):
        mine = reduce(whole, dim).astype(x.dtype)
    with scope("all_gather"):
        total = gather(mine, dim)
    if size % n:
        total = lax.slice_in_dim(total, 0, size, axis=dim)
    return total.reshape(x.shape)


@dataclass(frozen=True, kw_only=True)
class Psum(AllReduce, name="psum"):
    """The sum. Its transpose sends nothing if types say that all ranks hold the same value."""

    adds_numbers = True
    bools_as_int32 = True
    folds_constants = True

    def by_lax(self, x: Array) -> Array:
        return lax.psum(x, self.axes, axis_index_groups=self.groups)

    def transpose(self, cts: Sequence[Array]) -> list[Array]:
        if is_checked():
            return [varying(ct, self.axes) for ct in cts]
        return self(*cts)


@dataclass(frozen=True, kw_only=True)
class Pmean(Psum):
    """The mean: it binds a `Psum`, and divides the sum."""

    adds_numbers = False  # lax refuses keys at once, because it cannot divide them

    def by_lax(self, x: Array) -> Array:
        return lax.pmean(x, self.axes, axis_index_groups=self.groups)

    def __call__(self, *xs: Array) -> list[Array]:
        total = Psum(**self.for_transpose(), called="pmean")
        n = Ranks.over(self.axes, self.groups).size
        xs = tuple(self.sums.prepare(x) for x in xs)  # before it is widened
        if self.sums.dtype is None or not jnp.issubdtype(xs[0].dtype, jnp.inexact):
            return [total / n for total in total(*xs)]
        totals = total(*(x.astype(self.sums.dtype) for x in xs))
        return [(total / n).astype(xs[0].dtype) for total in totals]  # rounded once


@dataclass(frozen=True, kw_only=True)
class Pmax(AllReduce, name="pmax", differentiable=False):
    """The maximum; like lax's, without a derivative."""

    adds_numbers = True

    def by_lax(self, x: Array) -> Array:
        return lax.pmax(x, self.axes, axis_index_groups=self.groups)

    def combine(self, received: Array, mine: Array) -> Array:
        return lax.max(received, mine)


@dataclass(frozen=True, kw_only=True)
class Pmin(AllReduce, name="pmin", differentiable=False):
    """The minimum; like lax's, without a derivative."""

    adds_numbers = True

    def by_lax(self, x: Array) -> Array:
        return lax.pmin(x, self.axes, axis_index_groups=self.groups)

    def combine(self, received: Array, mine: Array) -> Array:
        return lax.min(received, mine)


@public()
def psum(
    x: Pytree,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
    accumulate_dtype: DTypeLike | None = None,
    order: Tree | None = None,
    wire: WireLike | None = None,
) -> Pytree:
    """The sum of all ranks' x, on every rank, with the same bits.

    `x: [a, b] -> [a, b]`; replicated under `check_vma=True`. Booleans are summed as int32.
    If n does not divide a size, it is padded, and the padding is cut off again. Small leaves of one
    dtype share their messages: 200 biases are one ring. (With a `wire` they do not: in one message
    they would share scales.)

    Ring: a reduce-scatter and an all-gather, 2(n-1) rounds of s/n bytes. "recursive_doubling"
    and "one_shot" send whole vectors in ceil(log2 n) rounds: they are best for few bytes.
    "halving_doubling" is Rabenseifner's: as few bytes as the ring, in 2 log2 n rounds. With a
    wider `accumulate_dtype`, messages of partial sums have that dtype, and messages of finished
    sums have the dtype of x.

    With a `wire`, "auto" is a `psum_scatter` and an `all_gather` with that wire: contributions are
    encoded once and added in float32 by the owner of the sum, and each sum is encoded once by its
    owner. Any other algorithm encodes everything again at each hop. So "torus" has a larger
    error, but sends less over a TPU's links; the model says that it is faster than "auto" there for
    large operands.

    Gradient: under `check_vma=True`, where the cotangent is known to be the same on all
    ranks, the cotangent itself; otherwise its psum, by the same wire.

    Raises:
        NotImplementedError: `axis_index_groups` under `check_vma=True`, as in lax.

    Source: Patarasuk and Yuan (2009); Thakur, Rabenseifner and Gropp, "Optimization of
    collective communication operations in MPICH", IJHPCA 19 (2005).

    n, s, `algorithm` and what all of them raise: see `ringcoll.lax`.

    >>> total = ranks(lambda x: ringcoll.psum(x, "x", algorithm="ring"), out_specs=P())
    >>> print(total(jnp.arange(8.0)))  # each rank holds two numbers
    [12. 16.]
    """
    total = Psum(
        axes=axes_of(axis_name),
        groups=as_tuples(axis_index_groups),
        algorithm=algorithm,
        sums=sums_of(accumulate_dtype, order, wire),
    )
    return bind_leaves(x, axis_name, total)


@public()
def pmean(
    x: Pytree,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
    accumulate_dtype: DTypeLike | None = None,
    order: Tree | None = None,
    wire: WireLike | None = None,
) -> Pytree:
    """The mean of all ranks' x: a `psum`, divided by n.

    `x: [a, b] -> [a, b]`. The mean of integers is a float, as in lax. With a wider
    `accumulate_dtype`, messages of finished sums have that dtype too, and are rounded once, after
    the division.

    Steps and bytes, gradient, raises, source: as `psum`.

    n, s, `algorithm` and what all of them raise: see `ringcoll.lax`.

    >>> mean = ranks(lambda x: ringcoll.pmean(x, "x", accumulate_dtype="float32"), out_specs=P())
    >>> print(mean(jnp.array([256, 1, 1, 1], jnp.bfloat16)))
    [65]
    """
    mean = Pmean(
        axes=axes_of(axis_name),
        groups=as_tuples(axis_index_groups),
        algorithm=algorithm,
        sums=sums_of(accumulate_dtype, order, wire),
    )
    return bind_leaves(x, axis_name, mean)


@public()
def pmax(
    x: Pytree,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
) -> Pytree:
    """The maximum of all ranks' x, element by element, on every rank.

    `x: [a, b] -> [a, b]`. Steps, bytes, raises and source: as `psum`.

    Gradient: none, as in lax.

    n, s, `algorithm` and what all of them raise: see `ringcoll.lax`.

    >>> greatest = ranks(lambda x: ringcoll.pmax(x, "x", algorithm="one_shot"), out_specs=P())
    >>> print(greatest(jnp.array([3, 1, 4, 1])))
    [4]
    """
    axes, groups = axes_of(axis_name), as_tuples(axis_index_groups)
    return bind_leaves(x, axis_name, Pmax(axes=axes, groups=groups, algorithm=algorithm))


@public()
def pmin(
    x: Pytree,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
) -> Pytree:
    """The minimum of all ranks' x, element by element, on every rank.

    `x: [a, b] -> [a, b]`. Steps, bytes, raises and source: as `psum`.

    Gradient: none, as in lax.

    n, s, `algorithm` and what all of them raise: see `ringcoll.lax`.

    >>> least = ranks(lambda x: ringcoll.pmin(x, "x", algorithm="one_shot"), out_specs=P())
    >>> print(least(jnp.array([3, 1, 4, 1])))
    [1]
    """
    axes, groups = axes_of(axis_name), as_tuples(axis_index_groups)
    return bind_leaves(x, axis_name, Pmin(axes=axes, groups=groups, algorithm=algorithm))
