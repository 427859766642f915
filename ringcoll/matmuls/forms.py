"""The form in which a matmul with a collective runs.

The forms are fixed when the matmul is traced. Which of them runs is chosen when it is lowered,
because platform and hosts are not known before.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from jax import lax

from ringcoll.collectives.table import LAX
from ringcoll.matmuls import auto
from ringcoll.runtime.hosts import are_cpu_processes, by_hosts

T = TypeVar("T")


class Form(NamedTuple):
    """An algorithm, and which products (by number) are computed late, from the whole operand."""

    algorithm: str
    late: tuple[int, ...] = ()


def by_platform(
    axes: tuple[Hashable, ...],
    form: Form,
    between: Form,
    run: Callable[..., T],
    *operands: Any,
) -> T:
    """`run(form, *operands)`, in the form that is quickest where the program runs.

    Args:
        axes: the axes of the collective.
        form: for TPUs; `auto.BY_PLATFORM` has the algorithms of other platforms.
        between: for CPUs, if the ranks are on several hosts.
        run: computes the matmul in a form.
        operands: of `run`.
    """
    others = {}
    if form.algorithm != LAX:
        for platform, algorithm in auto.BY_PLATFORM.items():
            others[platform] = partial(run, form._replace(algorithm=algorithm))
    if between.algorithm != LAX and are_cpu_processes():
        plain, hidden = (partial(run, one) for one in (Form(LAX), between))
        others["cpu"] = partial(by_hosts, axes, plain, hidden)
    if not others:
        return run(form, *operands)
    return lax.platform_dependent(*operands, default=partial(run, form), **others)
