"""Run a matmul with a collective by the plan of the platform on which the program runs.

Plans are made when the matmul is traced. Which of them runs is decided when the program is lowered,
because the platform and the hosts are not known before.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

from jax import lax

from ringcoll.choose.plan import Plan
from ringcoll.choose.table import LAX
from ringcoll.runtime.hosts import are_cpu_processes, by_hosts
from ringcoll.runtime.scopes import noted_when_lowered

T = TypeVar("T")

#: Here the built-in collective runs. The devices of a CPU share its cores, so within a process
#: nothing can be hidden; GPUs send slowly by permutes.
PLAIN_ON = ("cpu", "cuda", "rocm")
PLAIN = Plan(LAX, why="CPUs and GPUs hide no messages under matmuls")


def by_plan(
    call: str, axes: tuple[Hashable, ...], plan: Plan, run: Callable[..., T], *operands: Any
) -> T:
    """`run(plan, *operands)`, on every platform; arguments as for `by_platform`."""
    return run(plan, *noted_when_lowered(call, axes, operands, lambda platform, hosts: plan))


def by_platform(
    call: str,
    axes: tuple[Hashable, ...],
    plan: Plan,
    between: Plan,
    run: Callable[..., T],
    *operands: Any,
) -> T:
    """`run(plan, *operands)`, by the plan for the platform on which the program runs.

    Args:
        call: the name of the function, for `ringcoll.explain`.
        axes: the axes of the collective.
        plan: the plan for TPUs.
        between: the plan for CPUs if the ranks are on several hosts. Ranks of one process share its
            cores, so they use the built-in collective.
        run: computes the matmul by a plan.
        operands: the operands of `run`.
    """

    may_be_between = are_cpu_processes()

    def plan_on(platform: str, hosts: int) -> Plan:
        if may_be_between and hosts > 1:
            return between
        return PLAIN if platform in PLAIN_ON else plan

    operands = noted_when_lowered(call, axes, operands, plan_on)
    is_plain = plan.algorithm == LAX and plan.in_place is None
    others = {} if is_plain else dict.fromkeys(PLAIN_ON, partial(run, PLAIN))
    if between.algorithm != LAX and may_be_between:
        others["cpu"] = partial(by_hosts, axes, partial(run, PLAIN), partial(run, between))
    if not others:
        return run(plan, *operands)
    return lax.platform_dependent(*operands, default=partial(run, plan), **others)
