"""The plans of a program: how each of its calls runs, and why."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh

from ringcoll.choose.plan import Plan
from ringcoll.io.text import aligned, folded, seconds_in_words
from ringcoll.runtime.scopes import takes_plans
from ringcoll.schedules.registry import LAX


@dataclass(frozen=True)
class Explanation:
    """The plans of a program. It prints a table with a row for each call.

    Attributes:
        plans: each call in words, and its plan, in the order in which they are lowered. Equal
            calls on one line with equal plans are listed once.
        lines: for each call its line of source, "train.py:41".
    """

    plans: tuple[tuple[str, Plan], ...]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        if not self.plans:
            return "the program calls no collective, matmul or layer of ringcoll"
        rows = [("line", "call", "form", "us", "next best", "the built-in")]
        for line, (call, plan) in zip(self.lines, self.plans, strict=True):
            forms = {one.name: _us(one) for one in (plan, *plan.others)}
            form = plan.name if plan.seconds else str(plan)  # with the reason
            next_best = next((f"{one.name} {_us(one)}" for one in plan.others), "-")
            rows.append((line, call, form, _us(plan), next_best, forms.get(LAX, "-")))
        return "\n".join(aligned(folded(rows), left=3))


def _us(plan: Plan) -> str:
    """The price of a plan in microseconds; "-" if it has none."""
    return seconds_in_words(plan.seconds, like=0.0).removesuffix(" us") if plan.seconds else "-"


def explain(function: Callable[..., Any]) -> Callable[..., Explanation]:
    """A function that takes the same operands, runs nothing, and returns the plans of the program.

    It prints as a table: the line of source, the collective or matmul with its axes and the
    operands of a rank, and its form. Then the prices of this form, of the next best and of the
    built-in; or, where no price decided, why it has this form: a row of the table, or the caller.
    For an `overlapped` function these are also the gathers and sums that it left.

    Args:
        function: a function, jitted or not. Its operands may be `jax.ShapeDtypeStruct`s.

    Raises:
        TypeError: it is no function that can be traced, but was lowered or compiled.
        Exception: whatever `function` or JAX raises when the program is traced and lowered.

    >>> total = ranks(lambda x: ringcoll.psum(x, "x"), out_specs=P())
    >>> for call, plan in ringcoll.explain(total)(jnp.arange(8.0)).plans:
    ...     print(f"{call}: {plan}")
    psum over x=4, float32[2]: lax: no row covers it: the built-in
    """
    traceable = jitted("explain", function)

    def explained(*operands: Any, **named: Any) -> Explanation:
        _, _, plans = lowered(traceable, operands, named)
        lines = tuple(line for line, _, _ in plans)
        return Explanation(tuple((call, plan) for _, call, plan in plans), lines)

    return explained


def jitted(name: str, function: Callable[..., Any]) -> jax.stages.Wrapped:
    """A function that can be traced, for the function `name` of ringcoll."""
    if not callable(function) or isinstance(function, jax.stages.Traced | jax.stages.Compiled):
        words = f"{type(function).__name__} is no function that can be traced"
        raise TypeError(f"ringcoll.{name}: {words}; pass the function that it was made from")
    return function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)


def lowered(
    function: jax.stages.Wrapped, operands: tuple[Any, ...], named: dict[str, Any]
) -> tuple[jax.stages.Traced, jax.stages.Lowered, tuple[tuple[str, str, Plan], ...]]:
    """A function as it is traced and lowered, and its calls: the line, the words and the plan."""
    plans: dict[tuple[str, str, Plan], None] = {}

    def take(*told: Any) -> None:
        plans[told] = None

    with takes_plans(take):
        traced = function.trace(*operands, **named)
        program = traced.lower(lowering_platforms=_platforms((operands, named)))
    return traced, program, tuple(plans)


def _platforms(operands: Any) -> tuple[str, ...] | None:
    """The platform of operands on a mesh of abstract devices, which JAX asks for; else None."""
    for leaf in jax.tree.leaves(operands):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, AbstractMesh) and mesh.abstract_device is not None:
            return (mesh.abstract_device.platform,)
    return None
