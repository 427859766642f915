"""The plans of a program: how each of its calls runs, and why."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh

from ringcoll.choose.plan import Plan
from ringcoll.runtime.scopes import takes_plans


@dataclass(frozen=True)
class Explanation:
    """The plans of a program. It prints a line for each call.

    Attributes:
        plans: each call in words, and its plan, in the order in which they are lowered. Equal
            calls with equal plans are listed once.
    """

    plans: tuple[tuple[str, Plan], ...]

    def __str__(self) -> str:
        return "\n".join(f"{call}: {plan}" for call, plan in self.plans)


def explain(function: Callable[..., Any]) -> Callable[..., Explanation]:
    """A function that takes the same operands, runs nothing, and returns the plans of the program.

    A line has the collective or the matmul, its axes, the operands of a rank, the algorithm, and
    why: the price and that of the runner-up, the row of the table, or that the call names it.

    Args:
        function: a function, jitted or not. Its operands may be `jax.ShapeDtypeStruct`s.

    Raises:
        Exception: whatever `function` or JAX raises when the program is traced and lowered.

    >>> total = ranks(lambda x: ringcoll.psum(x, "x"), out_specs=P())
    >>> print(ringcoll.explain(total)(jnp.arange(8.0)))
    psum over x=4, float32[2]: lax: no row covers it: the built-in
    """

    def explained(*operands: Any, **named: Any) -> Explanation:
        _, _, plans = lowered(function, operands, named)
        return Explanation(plans)

    return explained


def lowered(
    function: Callable[..., Any], operands: tuple[Any, ...], named: dict[str, Any]
) -> tuple[jax.stages.Traced, jax.stages.Lowered, tuple[tuple[str, Plan], ...]]:
    """A function as it is traced and lowered, and the plans of an `Explanation`."""
    plans: dict[tuple[str, Plan], None] = {}

    def take(call: str, plan: Plan) -> None:
        plans[call, plan] = None

    jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
    with takes_plans(take):
        traced = jitted.trace(*operands, **named)
        program = traced.lower(lowering_platforms=_platforms((operands, named)))
    return traced, program, tuple(plans)


def _platforms(operands: Any) -> tuple[str, ...] | None:
    """The platform of operands on a mesh of abstract devices, which JAX asks for; else None."""
    for leaf in jax.tree.leaves(operands):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, AbstractMesh) and mesh.abstract_device is not None:
            return (mesh.abstract_device.platform,)
    return None
