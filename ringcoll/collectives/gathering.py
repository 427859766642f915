"""Your own work under the messages of a schedule: `gather` visits shards, `reduce` produces them.

A collective matmul is three lines (inside `jax.shard_map`):

    def all_gather_matmul(x, w, axis):      # x: [m/n, k], w: [k, f] -> [m, f]
        def visit(y, arrived):              # runs while the next shards travel
            return arrived.place(y, arrived.value @ w)
        n = lax.axis_size(axis)
        return gather(x, axis, visit, jax.ShapeDtypeStruct((n * len(x), w.shape[1]), x.dtype))

    def matmul_reduce_scatter(x, w, axis):  # x: [m, k/n], w: [k/n, f] -> [m/n, f]
        return reduce(lambda wanted: wanted.take(x) @ w, axis)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ringcoll.choose.plan import NAMED, NOTHING_HIDES, Plan, cheapest
from ringcoll.choose.table import Algorithm
from ringcoll.choose.under_work import gather_plans, hides, scatter_plans, tour_plans
from ringcoll.collectives import choice
from ringcoll.collectives.axes import AxisName, Groups, as_tuples, axes_of
from ringcoll.collectives.counting import holders, work_of
from ringcoll.collectives.front_door import wide_dtype
from ringcoll.collectives.public import integer, public
from ringcoll.collectives.visits import Arrived, CutShards, Rounds, Wanted
from ringcoll.collectives.wide_gradients import with_wide_gradients
from ringcoll.costs.model import Model
from ringcoll.costs.under_work import Work, nbytes
from ringcoll.runtime.scopes import record_plan_at_lowering
from ringcoll.runtime.value_types import device_kind, empty, type_in_words, varying, varying_like
from ringcoll.schedules.registry import LAX


@public()
def gather(
    x: Any,
    axis_name: AxisName,
    visit: Callable[[Any, Arrived], Any],
    carry: Any,
    *,
    dim: int = 0,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
    work: Work | None = None,
) -> Any:
    """Visit the shards of all ranks, while the next ones travel.

    x: [m/n, ...] on each rank. `visit(carry, arrived)` is called once a round, first with this
    rank's own shard. It gets all that arrived in the round, end to end along `dim`: one large
    product is faster than several small ones. `per_shard` makes such a visit from one of single
    shards.

    Steps and bytes: those of `all_gather` by the algorithm. By "lax" there is one visit, of all
    shards, after the all_gather.

    Gradient: JAX's, through the rounds. It keeps what the visits keep, in all rounds together as
    much as a gathered x. For one that keeps less, write a `jax.custom_vjp` with a `reduce`.

    Args:
        x: an array or a pytree of arrays, which all have the same length along `dim`.
        axis_name: a name, or several.
        visit: returns a carry of the same shapes and dtypes. It must not depend on the order of
            visits: each algorithm has its own. It is traced more often than it runs.
        carry: a pytree of arrays. A `jax.ShapeDtypeStruct` is a buffer that is not filled, for
            visits that `place` every row.
        dim: the dimension along which shards are joined, of each array.
        axis_index_groups: as for `all_gather`, but of one size.
        algorithm: as for `all_gather`, but no `Table`. "auto" is the cheapest by price on TPUs, if
            the work is known, and elsewhere "lax".
        work: all the work of the visits, for "auto"; None: the products in `visit` are counted.

    Raises:
        NameError: an axis is not bound.
        TypeError: x has no array; a visit returns a carry of a different shape or dtype.
        ValueError: arrays of x have different lengths; there is no such dimension or algorithm;
            `arrived.place` or `arrived.take` gets an array with a wrong number of rows.

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in
    Large Deep Learning Models" (ASPLOS 2023).

    >>> def rows(x, w):
    ...     def visit(y, arrived):
    ...         return arrived.place(y, arrived.value @ w)
    ...     return ringcoll.gather(x, "x", visit, jax.ShapeDtypeStruct((8, 3), x.dtype))
    >>> y = ranks(rows, (P("x"), P()), P("x"))(jnp.ones((8, 2)), jnp.ones((2, 3)))
    >>> y.shape, float(y[0, 0])  # every rank has all 8 rows
    ((32, 3), 2.0)
    """
    rounds = _rounds("gather", visit, axis_name, axis_index_groups, dim, algorithm, "all_gather")
    _, shard_bytes = _checked_rows("x", x, dim)
    x, checked = jax.tree.map(jnp.asarray, x), _keeping_carry(visit)
    try:
        carry, program = _typed_as_visited(rounds, checked, carry, rounds.own(x))
    except CutShards:
        rounds = replace(rounds, whole=True)
        carry, program = _typed_as_visited(rounds, checked, carry, rounds.own(x))
    shapes = [leaf.shape for leaf in jax.tree.leaves(carry)]
    if work is None:
        work = work_of(program.jaxpr, len(jax.tree.leaves(x)), rounds.ranks().size, shapes)

    def plans(work: Work, sizes: tuple[int, ...], model: Model) -> list[Plan]:
        return gather_plans([work], shard_bytes, sizes, model, whole=rounds.whole)

    plan = _planned(rounds, work, plans)
    x = record_plan_at_lowering("gather", rounds.axes, x, lambda platform: plan)
    adds = work is not None and work.accumulated > 0
    checked = with_wide_gradients(checked, program)
    return replace(rounds, algorithm=plan.algorithm).gather(x, checked, carry, adds=adds)


@public()
def reduce(
    produce: Callable[[Wanted], Any],
    axis_name: AxisName,
    *,
    dim: int = 0,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
    accumulate_dtype: DTypeLike | None = None,
    work: Work | None = None,
) -> Any:
    """Sum what all ranks produce; each rank gets its shard of the sum. `gather` run backward.

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
    rounds = _rounds("reduce", produce, axis_name, axis_index_groups, dim, algorithm)

    def widened(wanted: Wanted) -> Any:
        return _widened(accumulate_dtype, produce(wanted))

    program, out = jax.make_jaxpr(widened, return_shape=True)(rounds.wanted())
    size, block_bytes = _checked_sums("what is produced", out, dim)
    # A function that forgets `wanted` makes the same rows for any; on a ring nobody would see it.
    every, rows = jax.eval_shape(produce, rounds.wanted_all(size)), rounds.ranks().size * size
    if wrong := {x.shape[dim] for x in jax.tree.leaves(every)} - {rows}:
        raise ValueError(
            f"produce makes {min(wrong)} rows where {rows} are wanted, and {size} where {size} "
            "are; make a row for each, as wanted.take does"
        )
    if work is None:
        work = work_of(program.jaxpr, 0, rounds.ranks().size)
    plan = _planned(rounds, work, lambda work, *on: scatter_plans(work, block_bytes, *on))
    rounds = replace(rounds, algorithm=plan.algorithm)
    widened = with_wide_gradients(widened, program)
    total = _with_dtypes(rounds.reduce(widened, size, by_turns=plan.by_turns), every)
    return record_plan_at_lowering("reduce", rounds.axes, total, lambda platform: plan)


@public()
def tour(
    x: Any,
    axis_name: AxisName,
    visit: Callable[[Any, Arrived], tuple[Any, Any]],
    carry: Any,
    *,
    dim: int = 0,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
    accumulate_dtype: DTypeLike | None = None,
    work: Work | None = None,
) -> tuple[Any, Any]:
    """Send this rank's shard round all ranks; the sum of what they make of it comes home.

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
    rounds = _rounds("tour", visit, axis_name, axis_index_groups, dim, algorithm)
    size, shard_bytes = _checked_rows("x", x, dim)
    x = jax.tree.map(jnp.asarray, x)
    result_types, sum_bytes = None, 0

    def checked(carry: Any, arrived: Arrived) -> tuple[Any, Any]:
        nonlocal result_types
        both = visit(carry, arrived)
        if not isinstance(both, tuple) or len(both) != 2:
            raise TypeError(
                f"visit returns {type(both).__name__}, and no pair; return (carry, results)"
            )
        result_types = jax.tree.map(jax.typeof, both[1])
        return _like_carry(carry, both[0]), _widened(accumulate_dtype, both[1])

    def visit_own(carry: Any, own: Arrived) -> Any:
        nonlocal sum_bytes
        carry, results = checked(carry, own)
        _, sum_bytes = _checked_sums("what a visit makes", results, dim, size)
        return carry

    carry, program = _typed_as_visited(rounds, visit_own, carry, rounds.own(x))
    if work is None:
        work = work_of(program.jaxpr, len(jax.tree.leaves(x)), rounds.ranks().size)
    plan = _planned(rounds, work, lambda work, *on: tour_plans(work, shard_bytes, sum_bytes, *on))
    x = record_plan_at_lowering("tour", rounds.axes, x, lambda platform: plan)
    checked = with_wide_gradients(checked, program)
    rounds = replace(rounds, algorithm=plan.algorithm)
    carry, total = rounds.tour(x, checked, carry, halved=True)
    return carry, _with_dtypes(total, result_types)


@public()
def exchange(
    x: Any,
    axis_name: AxisName,
    visit: Callable[[Any, Arrived], Any],
    carry: Any,
    *,
    dim: int = 0,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
) -> Any:
    """Send each rank its block of x, and visit the blocks for this rank as they arrive.

    x: [m, ...] on each rank; block j of its rows, [m/n, ...], is for rank j.
    `visit(carry, arrived)` is called once a round, first with this rank's own block, while the next
    blocks travel.

    Steps and bytes: those of `all_to_all` by the algorithm. By "lax", and "auto", there is one
    visit, of all blocks, after the all_to_all.

    Gradient: JAX's, through the rounds; see `gather`.

    Args:
        x, axis_name, visit, carry, dim, axis_index_groups: as for `gather`.
        algorithm: as for `all_to_all`. "auto" is "lax": an exchange has no price under work.

    Raises: as `gather`; and
        ValueError: n does not divide the rows of x.

    Source: as for `all_to_all`.

    >>> def placed(x):
    ...     y = jax.ShapeDtypeStruct(x.shape, x.dtype)
    ...     return ringcoll.exchange(x, "x", lambda y, arrived: arrived.place(y, arrived.value), y,
    ...                              algorithm="pairwise")
    >>> print(ranks(placed)(jnp.arange(16)))
    [ 0  4  8 12  1  5  9 13  2  6 10 14  3  7 11 15]
    """
    rounds = _rounds("exchange", visit, axis_name, axis_index_groups, dim, algorithm, "all_to_all")
    rounds = replace(rounds, whole=True)  # blocks are never cut
    rows, _ = _checked_rows("x", x, dim)
    x = jax.tree.map(jnp.asarray, x)
    if rows % (n := rounds.ranks().size):
        raise ValueError(f"x has {rows} rows, not divisible by {n}; pad it")
    checked = _keeping_carry(visit)
    own = rounds.own(rounds.blocks(x, rounds.ranks())[0])
    carry, program = _typed_as_visited(rounds, checked, carry, own)
    plan = Plan(rounds.collective, why=NAMED)
    if rounds.collective == "auto":
        plan = Plan(LAX, why="an exchange has no price under work")
    x = record_plan_at_lowering("exchange", rounds.axes, x, lambda platform: plan)
    checked = with_wide_gradients(checked, program)
    return replace(rounds, algorithm=plan.algorithm).exchange(x, checked, carry)


def _rounds(
    name: str,
    function: Callable[..., Any],
    axis_name: AxisName,
    axis_index_groups: Groups,
    dim: int,
    algorithm: Algorithm,
    collective: str = "psum_scatter",
) -> Rounds:
    """The rounds of a call, before there is a plan; its ranks and its algorithm are checked."""
    if not callable(function):
        what = "produce" if name == "reduce" else "visit"
        raise TypeError(f"{what} is a {type(function).__name__}, no function; pass a function")
    axes, groups = axes_of(axis_name), as_tuples(axis_index_groups)
    algorithm = choice.algorithm_of(algorithm, axes, groups, collective)
    ranks: dict[str, Any] = {"axes": axes, "groups": groups}
    return Rounds(name=name, **ranks, algorithm=LAX, collective=algorithm, dim=integer("dim", dim))


def _checked_rows(name: str, tree: Any, dim: int, rows: int | None = None) -> tuple[int, int]:
    """The number of rows of all arrays of a tree, which must be equal, and their bytes."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise TypeError(f"{name} has no array; give one, or a pytree of arrays")
    counts = []
    for leaf in leaves:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            jax.typeof(leaf)  # refuses what is no array
        counts.append(jnp.shape(leaf)[integer("dim", dim, jnp.ndim(leaf))])
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


def _keeping_carry(visit: Callable[[Any, Arrived], Any]) -> Callable[..., Any]:
    """The visit, whose carry is checked and keeps its types."""
    return lambda carry, arrived: _like_carry(carry, visit(carry, arrived))


def _widened(dtype: DTypeLike | None, rows: Any) -> Any:
    """Rows that are added up, in the dtype of sums."""
    if dtype is None:
        return rows
    types = list(map(jax.typeof, jax.tree.leaves(rows)))
    wide, arrays = wide_dtype(dtype, *types), jax.tree.map(jnp.asarray, rows)

    def widened(x: Array) -> Array:
        return x.astype(wide) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(widened, arrays)


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


def _typed_as_visited(
    rounds: Rounds, visit: Callable[..., Any], carry: Any, own: Arrived
) -> tuple[Any, Any]:
    """The carry for the first visit, with the types that it returns, and the visit's program."""

    def allocated(leaf: Any) -> Array:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            aval = jax.core.ShapedArray(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            return empty(leaf.shape, aval, rounds.axes, marked=True)
        return varying(jnp.asarray(leaf), rounds.axes)

    def typed(given: Any, leaf: Array, aval: Any) -> Array:
        is_moved = jax.typeof(leaf).sharding.spec != aval.sharding.spec
        is_buffer = is_moved and isinstance(given, jax.ShapeDtypeStruct)
        return empty(leaf.shape, aval, (), marked=True) if is_buffer else varying_like(leaf, aval)

    given, structure = jax.tree.flatten(carry)
    leaves = list(map(allocated, given))
    while True:
        carry = jax.tree.unflatten(structure, leaves)
        program = jax.make_jaxpr(visit)(carry, own)
        before, leaves = leaves, list(map(typed, given, leaves, program.out_avals))
        if list(map(jax.typeof, leaves)) == list(map(jax.typeof, before)):
            _check_buffers(given, program.jaxpr)
            return carry, program


def _check_buffers(given: Sequence[Any], jaxpr: Any) -> None:
    """Refuse a buffer that is not filled if a visit computes with it, or places nothing in it."""
    for i, leaf in enumerate(given):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        is_read = holders(jaxpr, {i}) is None
        if is_read or jaxpr.outvars[i] is jaxpr.invars[i]:
            what = "computes with" if is_read else "places no rows in"
            raise ValueError(
                f"visit {what} a carry of {type_in_words(leaf)} that is a ShapeDtypeStruct, not "
                "filled; pass an array, such as jnp.zeros"
            )


def _planned(
    rounds: Rounds,
    work: Work | None,
    plans_on: Callable[[Work, tuple[int, ...], Model], list[Plan]],
) -> Plan:
    """The plan of a call. `plans_on` gives those of its work, on axes of sizes, on a machine."""
    if not isinstance(work, Work | None):
        raise TypeError(f"work={work!r}; pass a ringcoll.costs.Work(flops)")
    if rounds.collective != "auto":
        return Plan(rounds.collective, why=NAMED)
    if rounds.groups or not hides(device_kind()):
        return Plan(LAX, why=f"{NOTHING_HIDES}, and only without groups")
    if work is None:
        return Plan(LAX, why="no product was counted; give its work")
    sizes = rounds.ranks().shape
    return cheapest(plans_on(work, sizes, choice.model_of(sizes)))
