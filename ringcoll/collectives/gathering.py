"""Your own work under the messages of a schedule: `gather` visits shards, `reduce` produces them.

A collective matmul is one line (inside `jax.shard_map`):

    def all_gather_matmul(x, w, axis):      # x: [m/n, k], w: [k, f] -> [m, f]
        return all_gather_map(lambda rows: rows @ w, x, axis)

    def matmul_reduce_scatter(x, w, axis):  # x: [m, k/n], w: [k/n, f] -> [m/n, f]
        return map_reduce_scatter(lambda rows: rows @ w, x, axis)
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ringcoll.choose.plan import Plan
from ringcoll.choose.table import Algorithm
from ringcoll.choose.under_work import gather_plans, scatter_plans, tour_plans
from ringcoll.collectives import choice
from ringcoll.collectives.axes import AxisName, Groups, as_tuples, axes_of
from ringcoll.collectives.counting import work_of
from ringcoll.collectives.public import check_function, integer, public
from ringcoll.collectives.sums import Plain, wide_dtype
from ringcoll.collectives.visits import (
    CutShards,
    Rounds,
    Rows,
    all_rows,
    any_rows,
    own_rows,
    pair,
    row_count,
)
from ringcoll.collectives.wide_gradients import with_wide_gradients
from ringcoll.costs.model import Model
from ringcoll.costs.under_work import Work, nbytes
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.scopes import record_plan_at_lowering
from ringcoll.runtime.value_types import type_in_words, varying, varying_like

#: `(carry, arrived) -> (carry, rows)`, as the body of a `jax.lax.scan`.
RowVisit = Callable[[Any, Rows], tuple[Any, Any]]


@public()
def all_gather_map(
    f: Callable[[Any], Any],
    x: Any,
    axis_name: AxisName,
    *,
    dim: int = 0,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
    work: Work | None = None,
) -> Any:
    """f of the rows of all ranks, computed for each shard while the next ones travel.

    `x: [m/n, ...] -> [m, ...]`: f makes a row of each row: `f(all_gather(x, tiled=True))`, but f
    is called once a round, for the rows that arrived.

    Steps and bytes, gradient: as `gather`, of which this is the shortest use.

    Args:
        f: a function of rows: an array, or a pytree of arrays, with as many rows along `dim` as it
            gets. What it makes of a row must not depend on other rows.
        x, axis_name, dim, axis_index_groups, algorithm, work: as for `gather`.

    Raises: as `gather`.

    Source: as for `gather`.

    >>> matmul = lambda x, w: ringcoll.all_gather_map(lambda rows: rows @ w, x, "x")
    >>> y = ranks(matmul, (P("x"), P()), P("x"))(jnp.ones((8, 2)), jnp.ones((2, 3)))
    >>> y.shape, float(y[0, 0])  # every rank has all 8 rows
    ((32, 3), 2.0)
    """
    check_function("f", f)
    options: Any = {"dim": dim, "axis_index_groups": axis_index_groups, "algorithm": algorithm}
    visit: RowVisit = lambda carry, arrived: (carry, _mapped(f, arrived.value, dim))  # noqa: E731
    return gather(x, axis_name, visit, None, work=work, **options)[1]


@public()
def map_reduce_scatter(
    f: Callable[[Any], Any],
    x: Any,
    axis_name: AxisName,
    *,
    dim: int = 0,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
    accumulate_dtype: DTypeLike | None = None,
    work: Work | None = None,
) -> Any:
    """The sum over ranks of f of their rows; each rank gets its shard of the sum.

    `x: [m, ...] -> [m/n, ...]`: `psum_scatter(f(x), tiled=True)`, but f is called once a round, for
    the rows whose sums leave next, while the sums before travel.

    Steps and bytes, gradient: as `reduce`, of which this is the shortest use.

    Args:
        f: as for `all_gather_map`.
        x: an array, or a pytree of arrays, with the rows of all ranks.
        axis_name, dim, axis_index_groups, algorithm, accumulate_dtype, work: as for `reduce`.

    Raises: as `reduce`.

    Source: as for `gather`.

    >>> matmul = lambda x, w: ringcoll.map_reduce_scatter(lambda rows: rows @ w, x, "x")
    >>> y = ranks(matmul, (P(None, "x"), P("x")))(jnp.ones((8, 4)), jnp.ones((4, 3)))
    >>> y.shape, float(y[0, 0])
    ((8, 3), 4.0)
    """
    check_function("f", f)
    options: Any = {"dim": dim, "axis_index_groups": axis_index_groups, "algorithm": algorithm}
    options |= {"accumulate_dtype": accumulate_dtype, "work": work}
    return reduce(lambda wanted: _mapped(f, wanted.take(x), dim), axis_name, **options)


@public()
def gather(
    x: Any,
    axis_name: AxisName,
    visit: RowVisit,
    carry: Any,
    *,
    dim: int = 0,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
    work: Work | None = None,
) -> tuple[Any, Any]:
    """All-gather, and visit what arrives in a round while the next shards travel.

    x: [m/n, ...] on each rank. `visit(carry, arrived)` returns `(carry, rows)`, as the body of a
    `jax.lax.scan`. It is called once a round, first with this rank's own shard, and gets all that
    arrived in the round, end to end along `dim`: one large product is faster than several small
    ones. `per_shard` makes such a visit from one of single shards. The rows of all visits end up
    in order: [m, ...].

    Steps and bytes: those of `all_gather` by the algorithm. By "lax" there is one visit, of all
    shards, after the all_gather.

    Gradient: JAX's, through the rounds. It keeps what the visits keep, in all rounds together as
    much as a gathered x. For one that keeps less, write a `jax.custom_vjp` with a `reduce`.

    Args:
        x: an array or a pytree of arrays, which all have the same length along `dim`.
        axis_name: a name, or several.
        visit: returns a carry of the same shapes and dtypes, and rows: an array, or a pytree of
            arrays, with as many rows along `dim` as arrived; or None. What it makes of rows must
            not depend on the order of visits: each algorithm has its own. It is traced more often
            than it runs.
        carry: a pytree of arrays.
        dim: the dimension along which shards are joined, of each array.
        axis_index_groups: as for `all_gather`, but of one size.
        algorithm: as for `all_gather`, but no `Table`. "auto" is the cheapest by price on TPUs, if
            the work is known, and elsewhere "lax".
        work: all the work of the visits, for "auto"; None: the products in `visit` are counted.

    Returns:
        The last carry, and the rows of all visits.

    Raises:
        NameError: an axis is not bound.
        TypeError: x has no array; a visit returns no pair, or a carry of a different shape or
            dtype.
        ValueError: arrays of x have different lengths; there is no such dimension or algorithm;
            a visit returns a wrong number of rows, or `arrived.take` gets such an array.

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in
    Large Deep Learning Models" (ASPLOS 2023).

    >>> def normed(x, w):  # the largest product, beside all products
    ...     def visit(largest, arrived):
    ...         y = arrived.value @ w
    ...         return jnp.maximum(largest, y.max()), y
    ...     largest, y = ringcoll.gather(x, "x", visit, -jnp.inf)
    ...     return y / largest
    >>> y = ranks(normed, (P("x"), P()), P("x"))(jnp.arange(1.0, 9.0)[:, None], jnp.ones((1, 1)))
    >>> print(y[:8, 0])
    [0.125 0.25  0.375 0.5   0.625 0.75  0.875 1.   ]
    """
    given = visit, axis_name, axis_index_groups, dim, algorithm
    call = _Call.of("gather", "visit", *given, collective="all_gather")
    _, shard_bytes = _checked_rows("x", x, dim)
    x, visit = jax.tree.map(jnp.asarray, x), _checked_visit(visit, dim)
    whole = False
    try:
        carry, program, rows = _typed(call, visit, carry, own_rows(x, call.ranks, dim, whole=False))
    except CutShards:
        whole = True
        carry, program, rows = _typed(call, visit, carry, own_rows(x, call.ranks, dim))
    if work is None:
        shapes = [leaf.shape for leaf in jax.tree.leaves(carry)]
        work = work_of(program.jaxpr, len(jax.tree.leaves(x)), call.ranks.size, shapes)
    plan = call.plan(x, work, lambda one, *on: gather_plans([one], shard_bytes, *on, whole=whole))
    x = record_plan_at_lowering("gather", call.axes, x, plan)
    adds = work is not None and work.accumulated > 0
    visit = with_wide_gradients(visit, program)
    return call.rounds(plan, whole=whole).gather(x, visit, carry, rows, adds=adds)


@public()
def reduce(
    produce: Callable[[Rows], Any],
    axis_name: AxisName,
    *,
    dim: int = 0,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
    accumulate_dtype: DTypeLike | None = None,
    work: Work | None = None,
) -> Any:
    """Reduce-scatter of what all ranks produce, while sums travel. `gather` run backward.

    `produce(wanted)` gives this rank's contributions to the rows that leave next, while the sums
    before travel: [m, ...] in all, and [m/n, ...] of the sum on each rank.

    Steps and bytes: those of `psum_scatter` by the algorithm. By "lax" everything is produced at
    once, and the psum_scatter follows.

    Gradient: JAX's, through the rounds; see `gather`.

    Args:
        produce: returns an array, or a pytree of arrays, with the rows of `wanted` along `dim`.
        axis_name: a name, or several.
        dim: the dimension of the rows, of each array that is produced.
        axis_index_groups, algorithm, work: as for `gather`.
        accumulate_dtype: the dtype in which contributions travel and are added; None for their own.
            With float32, messages of bfloat16 are twice as long.

    Raises:
        NameError: an axis is not bound.
        TypeError: nothing is produced, or booleans are.
        ValueError: arrays that are produced have a wrong number of rows; there is no such
            dimension or algorithm; `wanted.take` gets an array with a wrong number of rows.

    Source: as for `gather`.

    >>> def rows(x, w):
    ...     return ringcoll.reduce(lambda wanted: wanted.take(x) @ w, "x")
    >>> y = ranks(rows, (P(None, "x"), P("x")))(jnp.ones((8, 4)), jnp.ones((4, 3)))
    >>> y.shape, float(y[0, 0])
    ((8, 3), 4.0)
    """
    call = _Call.of("reduce", "produce", produce, axis_name, axis_index_groups, dim, algorithm)

    def widened(wanted: Rows) -> Any:
        return _widened(accumulate_dtype, produce(wanted))

    program, out = jax.make_jaxpr(widened, return_shape=True)(any_rows(call.ranks, dim))
    size, block_bytes = _checked_sums("what is produced", out, dim)
    # A function that forgets `wanted` makes the same rows for any; on a ring nobody would see it.
    every = jax.eval_shape(produce, all_rows(call.ranks, dim, size))
    rows = call.ranks.size * size
    if wrong := {x.shape[dim] for x in jax.tree.leaves(every)} - {rows}:
        raise ValueError(
            f"produce makes {min(wrong)} rows where {rows} are wanted, and {size} where {size} "
            "are; make a row for each, as wanted.take does"
        )
    if work is None:
        work = work_of(program.jaxpr, 0, call.ranks.size)
    plan = call.plan(out, work, lambda one, *on: scatter_plans(one, block_bytes, *on))
    produced = with_wide_gradients(widened, program)
    total = _with_dtypes(call.rounds(plan).reduce(produced, size), every)
    return record_plan_at_lowering("reduce", call.axes, total, plan)


@public()
def tour(
    x: Any,
    axis_name: AxisName,
    visit: RowVisit,
    carry: Any,
    *,
    dim: int = 0,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
    accumulate_dtype: DTypeLike | None = None,
    work: Work | None = None,
) -> tuple[Any, Any]:
    """All-gather and reduce-scatter in step: the sum of what ranks make of a shard comes home.

    x: [m/n, ...] on each rank. `visit(carry, arrived)` returns the next carry and, for the rows
    that arrived, as many rows of results. The sum of all ranks' results for a shard follows it, one
    round later, and returns to its owner: [m/n, ...]. While a round is visited, the next shards and
    the sums of the round before travel. A rank's own shard is visited in two halves: one first, one
    last.

    Steps and bytes: those of an `all_gather` of x and a `psum_scatter` of the results, at the same
    time: two rounds more than a ring alone. By "lax" they run before and after one visit of all
    shards.

    Gradient: JAX's, through the rounds; see `gather`.

    Args:
        x, axis_name, carry, dim, axis_index_groups, algorithm, work: as for `gather`.
        accumulate_dtype: as for `reduce`.
        visit: as for `gather`, but it returns a carry and results: an array, or a pytree of arrays.

    Returns:
        The last carry, and the sum of the results for this rank's shard.

    Raises: as `gather`; and
        ValueError: there are not as many rows of results as arrived.

    Source: the backward pass of Liu et al., "Ring Attention with Blockwise Transformers" (2023).

    >>> def squares(x):
    ...     number = 1 + jax.lax.axis_index("x")
    ...     return ringcoll.tour(x, "x", lambda _, arrived: (None, number * arrived.value), None)[1]
    >>> print(ranks(squares)(jnp.arange(4.0)))  # each number times 1 + 2 + 3 + 4
    [ 0. 10. 20. 30.]
    """
    call = _Call.of("tour", "visit", visit, axis_name, axis_index_groups, dim, algorithm)
    size, shard_bytes = _checked_rows("x", x, dim)
    x, checked = jax.tree.map(jnp.asarray, x), _checked_visit(visit, dim)
    result_types: Any = None

    def widened(carry: Any, arrived: Rows) -> tuple[Any, Any]:
        nonlocal result_types
        carry, rows = checked(carry, arrived)
        result_types = jax.tree.map(jax.typeof, rows)
        return carry, _widened(accumulate_dtype, rows)

    carry, program, rows = _typed(call, widened, carry, own_rows(x, call.ranks, dim))
    _, sum_bytes = _checked_sums("what a visit makes", rows, dim, size)
    if work is None:
        work = work_of(program.jaxpr, len(jax.tree.leaves(x)), call.ranks.size)
    plan = call.plan(x, work, lambda one, *on: tour_plans(one, shard_bytes, sum_bytes, *on))
    x = record_plan_at_lowering("tour", call.axes, x, plan)
    visit = with_wide_gradients(widened, program)
    carry, total = call.rounds(plan).tour(x, visit, carry, halved=True)
    return carry, _with_dtypes(total, result_types)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What a call says about its rounds, checked.

    Attributes:
        name: the name of the function.
        axes, groups, ranks: the ranks that take part.
        dim: the dimension of the rows.
        algorithm: the algorithm that it names, or "auto".
    """

    name: str
    axes: tuple[Hashable, ...]
    groups: tuple[tuple[int, ...], ...] | None
    ranks: Ranks
    dim: int
    algorithm: Algorithm

    @staticmethod
    def of(
        name: str,
        argument: str,
        function: Any,
        axis_name: AxisName,
        axis_index_groups: Groups,
        dim: int,
        algorithm: Algorithm,
        collective: str = "psum_scatter",
    ) -> "_Call":
        check_function(argument, function)
        axes, groups = axes_of(axis_name), as_tuples(axis_index_groups)
        algorithm = choice.algorithm_of(algorithm, axes, groups, collective)
        where: Any = {"axes": axes, "groups": groups, "ranks": Ranks.over(axes, groups)}
        return _Call(name=name, **where, dim=integer("dim", dim), algorithm=algorithm)

    def plan(
        self,
        arrays: Any,
        work: Work | None,
        plans_on: Callable[[Work, tuple[int, ...], Model], list[Plan]],
    ) -> Plan:
        """The plan; `plans_on` gives those of the work, on axes of sizes, on a machine."""
        if not isinstance(work, Work | None):
            raise TypeError(f"work={work!r}; pass a ringcoll.costs.Work(flops)")
        unpriced = "" if work else "no product was counted; give its work"
        unpriced = "groups have no price" if self.groups else unpriced
        plans = partial(plans_on, work or Work(0))
        return choice.plan_under_work(self.algorithm, self.axes, arrays, plans, unpriced)

    def rounds(self, plan: Plan, *, whole: bool = False) -> Rounds:
        """The rounds of a plan. By "lax", the collective is "auto", unless the call names "lax"."""
        return Rounds(
            name=self.name,
            axes=self.axes,
            groups=self.groups,
            algorithm=plan.algorithm,
            collective=self.algorithm,
            dim=self.dim,
            whole=whole,
        )


def _mapped(f: Callable[[Any], Any], rows: Any, dim: int) -> Any:
    """f of some rows, if it makes a row of each."""
    results = f(rows)
    _checked_rows("what f returns", results, dim, row_count(rows, dim))
    return results


def _checked_rows(name: str, tree: Any, dim: int, rows: int | None = None) -> tuple[int, int]:
    """The number of rows of all arrays of a tree, which must be equal, and their bytes."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise TypeError(f"{name} has no array; give one, or a pytree of arrays")
    counts = []
    for leaf in leaves:
        if not isinstance(leaf, jax.ShapeDtypeStruct | jax.core.ShapedArray):
            jax.typeof(leaf)  # refuses what is no array
        counts.append(jnp.shape(leaf)[integer(f"{name}: dim", dim, jnp.ndim(leaf))])
    rows = counts[0] if rows is None else rows
    if wrong := [count for count in counts if count != rows]:
        raise ValueError(
            f"{name} has {wrong[0]} rows along dim, in place of {rows}; make them equal"
        )
    return rows, sum(map(nbytes, leaves))


def _checked_sums(name: str, tree: Any, dim: int, rows: int | None = None) -> tuple[int, int]:
    """As `_checked_rows`, of what will be added."""
    found = _checked_rows(name, tree, dim, rows)
    if any(jnp.issubdtype(leaf.dtype, jnp.bool_) for leaf in jax.tree.leaves(tree)):
        raise TypeError(f"{name} is bool; cast it to int32 first")
    return found


def _checked_visit(visit: RowVisit, dim: int) -> RowVisit:
    """The visit, whose carry is checked and keeps its types, and whose rows are counted."""

    def checked(carry: Any, arrived: Rows) -> tuple[Any, Any]:
        after, rows = pair(visit(carry, arrived))
        if jax.tree.leaves(rows):
            _checked_rows("what is returned", rows, dim, sum(n for _, n in arrived.rows))
        return _like_carry(carry, after), rows

    return checked


def _widened(dtype: DTypeLike | None, rows: Any) -> Any:
    """Rows that are added up, in the dtype of sums."""
    if dtype is None:
        return rows
    sums = Plain(dtype=wide_dtype(dtype, *map(jax.typeof, jax.tree.leaves(rows))))
    return jax.tree.map(lambda x: sums.widen(jnp.asarray(x)), rows)


def _with_dtypes(rows: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, one: x.astype(one.dtype), rows, like)


def _like_carry(before: Any, after: Any) -> Any:
    """The carry that a visit returned, with the types of the carry that it got."""
    after = jax.tree.map(jnp.asarray, after)
    got, returned = (jax.tree.map(type_in_words, carry) for carry in (before, after))
    kinds: list[Any] = [jax.tree.structure(carry) for carry in (before, after)]
    if got != returned or kinds[0] != kinds[1]:
        raise TypeError(
            f"visit returns a carry of {returned}, in place of {got}; keep its structure, shapes "
            "and dtypes"
        )

    def typed(before: Array, after: Array) -> Array:
        return varying(after, tuple(jax.typeof(before).mat.varying))

    return jax.tree.map(typed, before, after)


def _typed(call: _Call, visit: RowVisit, carry: Any, own: Rows) -> tuple[Any, Any, Any]:
    """The carry for the first visit, typed as visits return it; their program; the rows' types."""
    leaves, structure = jax.tree.flatten(carry)
    leaves = [varying(jnp.asarray(leaf), call.axes) for leaf in leaves]
    while True:
        carry, before = jax.tree.unflatten(structure, leaves), [*map(jax.typeof, leaves)]
        program, out = jax.make_jaxpr(visit, return_shape=True)(carry, own)
        after, rows = program.out_avals[: len(leaves)], program.out_avals[len(leaves) :]
        leaves = list(map(varying_like, leaves, after))
        if [*map(jax.typeof, leaves)] == before:
            return carry, program, jax.tree.unflatten(jax.tree.structure(out[1]), rows)
