"""The base of all collectives that run by a schedule. It chooses the algorithm, and rounds sums.

Each collective is a primitive in the form that neither adds nor removes a dimension
(`tiled=True`). Its public function brings each call into that form.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType

from ringcoll import algorithms
from ringcoll.choose import collectives
from ringcoll.choose.plan import BY_HAND, NAMED, SYMBOLIC, Plan
from ringcoll.choose.table import Algorithm, Table, default_table
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.hosts import Where, on_hosts
from ringcoll.runtime.primitive import Collective
from ringcoll.runtime.scopes import record_plan, scope, send_through_hook
from ringcoll.runtime.tree_sums import added, rounded
from ringcoll.runtime.value_types import empty
from ringcoll.schedules.registry import LAX, algorithms_of
from ringcoll.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class ScheduledCollective(Collective):
    """A collective that runs by a schedule. It chooses the schedule when the platform is known."""

    algorithm: Algorithm = "auto"
    accumulate_dtype: np.dtype | None = None
    by_tree: bool = False  # whether floats are added by the balanced tree
    gradient_by_tree: bool = False  # the same for the sums of its transpose
    called: str = ""  # the name of the user's function, if it is not that of the primitive
    collective: ClassVar[str]  # its name in `algorithms` and in the table
    tree_fields: ClassVar[tuple[str, ...]] = ("by_tree",)  # the fields that `order` sets
    #: Whether JAX can lower its own collective beside an explicit axis.
    lowers_beside_explicit: ClassVar[bool] = True

    def lower(self, where: Where, *xs: Array, plan: Plan | None = None) -> list[Array]:
        algorithm = (plan or self.plan(xs, where)).algorithm
        by = replace(self, algorithm=algorithm)
        (x,), call = xs, self.primitive.name.removeprefix("ringcoll_")
        if self.by_tree:
            x = rounded(x, where.platform)
        with named(call, algorithm, self.collective):
            if 0 in x.shape:  # there is nothing to send, and lax's psum_scatter cannot compile it
                return [empty(jax.eval_shape(self.by_lax, x).shape, x, self.axes)]
            if self.wire:
                y = by.encoded(x, algorithm)
            elif algorithm == LAX and self.by_tree:
                y = by.exchanged(x) if Ranks.over(self.axes, self.groups).size > 1 else x
            elif algorithm == LAX:
                send: Callable[[Array], Array] = partial(self.builtin, platform=where.platform)
                y = send_through_hook(send, self.widen(x), self.axes, self.groups)
            else:
                y = by.run(x, *built(self.collective, algorithm, self.axes, self.groups))
            return [y.astype(x.dtype)]

    def encoded(self, x: Array, algorithm: Algorithm) -> Array:
        """One operand's result, with a wire. A single rank sends nothing, so it rounds nothing."""
        ranks = Ranks.over(self.axes, self.groups)
        if self.wire is None or ranks.size == 1:
            return x
        if algorithm == LAX:
            send = partial(self.run, schedule=self.wire, ranks=ranks)
            return send_through_hook(send, x, self.axes, self.groups)
        return self.run(x, *built(self.collective, algorithm, self.axes, self.groups))

    def plan(self, xs: Sequence[Any], where: Where) -> Plan:
        """The plan for operands that share messages: by the user's choice, or by the table."""
        elements = sum(math.prod(x.shape) for x in xs)
        algorithm = default_table() if self.algorithm == "auto" else self.algorithm
        if not isinstance(elements, int):  # a symbolic shape cannot be cut
            decided = SYMBOLIC
        elif isinstance(algorithm, Table):
            decided = collectives.plan(
                self.collective,
                algorithm,
                where.platform,
                Ranks.over(self.axes, self.groups).shape,
                elements,
                xs[0].dtype,
                jax.__version__,
                wire=self.wire,
                by_tree=self.by_tree,
                **on_hosts(where.axes, self.axes, self.groups)._asdict(),
            )
        else:
            decided = Plan(algorithm, why=NAMED)
        may_fail = not (self.lowers_beside_explicit or self.by_tree or self.wire)
        if decided.algorithm == LAX and algorithm != LAX and may_fail:
            axis_types = jax.typeof(xs[0]).sharding.mesh.axis_types
            decided = BY_HAND if AxisType.Explicit in axis_types else decided
        call = self.called or self.primitive.name.removeprefix("ringcoll_")
        record_plan(call, self.axes, xs, decided, self.line, self.groups)
        return decided

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

    def within(self, axis: Any, x: Array, dim: int | None, out: int | None) -> Array:
        if self.by_tree and len(self.axes) > 1:
            raise NotImplementedError(
                f"{self.primitive.name} over {self.axes} with order=Tree(...): {axis.name!r} is "
                "the axis of a vmap, and the others are not; sum over them in separate calls"
            )
        wide = self.widen(x)
        if wide.dtype == x.dtype:  # a cast would lose a weak type
            return super().within(axis, x, dim, out)
        return super().within(axis, wide, dim, out).astype(x.dtype)

    def run(self, x: Array, schedule, ranks: Ranks) -> Array:
        """Run a schedule. The result may still have the dtype of partial sums.

        If `schedule` is a wire, lax's own collectives send encoded bytes.
        """
        raise NotImplementedError

    def exchanged(self, x: Array) -> Array:
        """Exchange raw contributions by built-in collectives, and add them by the tree."""
        raise NotImplementedError

    def builtin(self, x: Array, platform: str) -> Array:
        """Run the built-in collective of the platform."""
        return self.by_lax(x)

    def widen(self, x: Array) -> Array:
        """x in the dtype of partial sums: `accumulate_dtype`, or else the dtype of x.

        Integers keep their dtype, because their sums are exact. With a wire, values are added in
        float32 or wider.
        """
        wide = self.accumulate_dtype if jnp.issubdtype(x.dtype, jnp.inexact) else None
        if self.wire and wide is None:
            wide = jnp.promote_types(x.dtype, jnp.float32)
        return x.astype(wide or x.dtype)

    def combine(self, received: Array, mine: Array) -> Array:
        """The sum of a partial result that arrived and this rank's contribution.

        It is rounded once, to the dtype of `widen`. The schedule decides how many sums follow.
        """
        add = added if self.by_tree else lax.add
        return add(self.widen(received), self.widen(mine))

    def for_transpose(self) -> dict[str, Any]:
        """The arguments that a collective shares with its transpose."""
        names = ("axes", "groups", "algorithm", "accumulate_dtype", "wire", "line")
        shared = {name: getattr(self, name) for name in names}
        shared |= {"by_tree": self.gradient_by_tree, "gradient_by_tree": self.by_tree}
        return shared


def named(call: str, algorithm: Algorithm, collective: str) -> AbstractContextManager[None]:
    """Name the operations that are traced in this block, for profiles: `ringcoll.psum(ring)`."""
    name = algorithm if isinstance(algorithm, str) else name_of(algorithm, collective)
    return scope(f"ringcoll.{call}({name})")


def name_of(algorithm: Algorithm, collective: str) -> str:
    """The name of an algorithm that was given as an object; "given" if it has no name."""
    for name, function in algorithms_of(collective).items():
        if function is algorithm:  # a gather may have a different name as an all-reduce
            return name
    return getattr(algorithm, "__name__", "given")


def built(
    collective: str,
    algorithm: Algorithm,
    axes: Sequence[Hashable],
    groups: tuple[tuple[int, ...], ...] | None,
) -> tuple[Any, Ranks]:
    """The schedule (or stages) of an algorithm, and its ranks as the schedule's digits.

    An algorithm of ringcoll skips axes of size 1. A user's schedule or function gets all axes, in
    the order in which they were written.
    """
    ranks = Ranks.over(axes, groups, all_axes=not isinstance(algorithm, str))
    schedule = algorithms.build(collective, algorithm, ranks.shape)
    return schedule, ranks if isinstance(schedule, tuple) else replace(ranks, shape=schedule.shape)
