"""Run a matmul with a collective by the plan of the platform on which the program runs.

Plans are made when the matmul is traced. Which of them runs is decided when the program is lowered,
because the platform is not known before.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

from jax import lax

from ringcoll.choose.plan import Plan
from ringcoll.choose.table import LAX
from ringcoll.runtime.scopes import noted_when_lowered

T = TypeVar("T")

#: Here the plain form runs. XLA:CPU starts operations in no fixed order, and its devices share
#: cores, so nothing is hidden; GPUs send slowly by permutes.
PLAIN_ON = ("cpu", "cuda", "rocm")
PLAIN = Plan(LAX, why="CPUs and GPUs hide no messages under matmuls")


def by_plan(
    call: str, axes: tuple[Hashable, ...], plan: Plan, run: Callable[..., T], *operands: Any
) -> T:
    """`run(plan, *operands)`, on every platform; arguments as for `by_platform`."""
    return run(plan, *noted_when_lowered(call, axes, operands, lambda platform, hosts: plan))


def by_platform(
    call: str, axes: tuple[Hashable, ...], plan: Plan, run: Callable[..., T], *operands: Any
) -> T:
    """`run(plan, *operands)`, by the plan for the platform on which the program runs.

    Args:
        call: the name of the function, for `ringcoll.explain`.
        axes: the axes of the collective.
        plan: the plan for TPUs.
        run: computes the matmul by a plan.
        operands: the operands of `run`.
    """

    def plan_on(platform: str, hosts: int) -> Plan:
        return PLAIN if platform in PLAIN_ON else plan

    operands = noted_when_lowered(call, axes, operands, plan_on)
    if plan.algorithm == LAX and plan.in_place is None:
        return run(plan, *operands)
    others = dict.fromkeys(PLAIN_ON, partial(run, PLAIN))
    return lax.platform_dependent(*operands, default=partial(run, plan), **others)
