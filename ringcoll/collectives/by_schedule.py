"""The base of all collectives that run by a schedule. It chooses the algorithm, and rounds sums.

Each collective is a primitive in the form that neither adds nor removes a dimension
(`tiled=True`). Its public function brings each call into that form.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Self

import jax
from jax import Array, lax
from jax.sharding import AxisType

from ringcoll import algorithms
from ringcoll.choose.plan import BY_HAND, NAMED, SYMBOLIC, Plan, by_table
from ringcoll.choose.table import Algorithm, Table, default_table
from ringcoll.collectives.choice import resolve_algorithm
from ringcoll.collectives.sums import PLAIN, Exchanged, Pick, Plain
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.hosts import Where, on_hosts
from ringcoll.runtime.primitive import Collective
from ringcoll.runtime.scopes import record_plan, scope, send_through_hook, takes_plans
from ringcoll.runtime.value_types import empty
from ringcoll.schedules.registry import LAX, algorithms_of
from ringcoll.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class ScheduledCollective(Collective):
    """A collective that runs by a schedule. It chooses the schedule when the platform is known."""

    algorithm: Algorithm = "auto"
    sums: Plain = PLAIN  # how it adds; if it only moves data, how its transpose does
    called: str = ""  # the name of the user's function, if it is not that of the primitive
    collective: ClassVar[str]  # its name in `algorithms` and in the table
    #: Whether JAX can lower its own collective beside an explicit axis.
    lowers_beside_explicit: ClassVar[bool] = True

    def lower(self, where: Where, *xs: Array, plan: Plan | None = None) -> list[Array]:
        algorithm = (plan or self.plan(xs, where)).algorithm
        (x,), call = xs, self.primitive.name.removeprefix("ringcoll_")
        adding = self.sums if self.adds_numbers or self.sums.wire else PLAIN
        with scope(title(call, algorithm, self.collective)):
            if 0 in x.shape:  # there is nothing to send, and lax's psum_scatter cannot compile it
                return [empty(jax.eval_shape(self.by_lax, x).shape, x, self.axes, x)]
            if isinstance(adding, Exchanged):
                x, ranks = adding.prepare(x, where.platform), Ranks.over(self.axes, self.groups)
                if ranks.size == 1:  # it sends nothing, so it rounds nothing
                    return [x]
            if algorithm != LAX:
                y = self.run(x, *built(self.collective, algorithm, self.axes, self.groups))
            elif isinstance(adding, Exchanged):
                y = self.by_owners(x, ranks, adding)
            else:
                send: Callable[[Array], Array] = partial(self.builtin, platform=where.platform)
                wide = x.astype(adding.wide(x.dtype))
                y = send_through_hook(send, wide, self.axes, self.groups)
            return [y.astype(x.dtype)]

    def plan(self, xs: Sequence[Any], where: Where) -> Plan:
        """The plan for operands that share messages: by the user's choice, or by the table."""
        elements = sum(math.prod(x.shape) for x in xs)
        algorithm = default_table() if self.algorithm == "auto" else self.algorithm
        if not isinstance(elements, int):  # a symbolic shape cannot be cut
            decided = Plan(LAX, why=SYMBOLIC)
        elif isinstance(algorithm, Table):
            shape, dtype = Ranks.over(self.axes, self.groups).shape, xs[0].dtype
            place = where.platform, math.prod(shape)
            hosts = on_hosts(where.axes, self.axes, self.groups)._asdict()
            pick: Pick = lambda collective, *message: by_table(  # noqa: E731
                algorithm, collective, *place, *message, jax.__version__, **hosts
            )
            if isinstance(self.sums, Exchanged):
                decided = self.sums.plan(pick, self.collective, shape, elements, dtype)
            else:
                decided = pick(self.collective, elements * dtype.itemsize, dtype.name)
        else:
            decided = Plan(algorithm, why=NAMED)
        may_fail = not (self.lowers_beside_explicit or isinstance(self.sums, Exchanged))
        if decided.algorithm == LAX and algorithm != LAX and may_fail:
            axis_types = jax.typeof(xs[0]).sharding.mesh.axis_types
            decided = BY_HAND if AxisType.Explicit in axis_types else decided
        if takes_plans.value is not None:
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
        by_lax = partial(super().within, axis, dim=dim, out=out)
        return self.sums.within(self, axis, x, dim, by_lax) if self.adds_numbers else by_lax(x)

    def parts(self, total: Array, ranks: int) -> Array:
        """What the ranks of a vmap have of a sum."""
        return total

    def resolved(self, leaves: Sequence[Any], only_lax: Sequence[bool]) -> Self:
        if self.sums != PLAIN:
            self.sums.check(self, leaves, only_lax)
        if all(only_lax):
            return self
        request = self.algorithm, self.collective, self.axes, self.groups
        algorithm = resolve_algorithm(*request, takes_table=True)
        if isinstance(self.sums, Exchanged):
            shape = Ranks.over(self.axes, self.groups).shape
            if refusal := self.sums.refusal(algorithm, self.collective, shape):
                if self.algorithm != "auto":
                    raise ValueError(refusal)
                algorithm = "auto"  # another one is set around the call
        return replace(self, algorithm=algorithm)

    def by_lax_alone(self, leaf: Any, axis_name: Any) -> Any:
        return self.sums.widened(partial(super().by_lax_alone, axis_name=axis_name), leaf)

    def run(self, x: Array, schedule, ranks: Ranks) -> Array:
        """Run a schedule. The result may still have the dtype of partial sums."""
        raise NotImplementedError

    def by_owners(self, x: Array, ranks: Ranks, sums: Exchanged) -> Array:
        """By built-ins that move contributions, which the owner of a sum adds."""
        raise NotImplementedError

    def builtin(self, x: Array, platform: str) -> Array:
        """Run the built-in collective of the platform."""
        return self.by_lax(x)

    def combine(self, received: Array, mine: Array) -> Array:
        """What a rank makes of a partial result that arrived and its own contribution."""
        return self.sums.add(received, mine)

    def for_transpose(self) -> dict[str, Any]:
        """The arguments that a collective shares with its transpose."""
        names = ("axes", "groups", "algorithm", "sums", "line")
        return {name: getattr(self, name) for name in names}


@lru_cache(maxsize=1024)
def title(call: str, algorithm: Algorithm, collective: str) -> str:
    """The name of a call: `ringcoll.psum(ring)`; "given" for an algorithm without a name."""
    name = algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "given")
    for listed, function in algorithms_of(collective).items():
        if function is algorithm:  # a gather may have a different name as an all-reduce
            name = listed
    return f"ringcoll.{call}({name})"


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
