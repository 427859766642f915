"""In which form a matmul with a collective runs: named where it is traced, chosen where it is
lowered, for platform and hosts are not known before.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from jax import lax

from ringcoll import quickest
from ringcoll.hosts import by_hosts
from ringcoll.table import LAX

T = TypeVar("T")


class Form(NamedTuple):
    """By which algorithm, and the numbers of the products that are made late."""

    algorithm: str
    late: tuple[int, ...] = ()


def by_platform(
    axes: tuple[Hashable, ...],
    form: Form,
    between: Form,
    run: Callable[..., T],
    *operands: Any,
) -> T:
    """`run(form, *operands)`, in the form that is the quickest where the program runs.

    Args:
        axes: over which the collective is.
        form: of TPUs; the algorithms of other platforms are those of `quickest.BY_PLATFORM`.
        between: of CPUs where the ranks are on several hosts.
        run: the matmul in a form.
        operands: of it.
    """
    others = {}
    if form.algorithm != LAX:
        for platform, algorithm in quickest.BY_PLATFORM.items():
            others[platform] = partial(run, form._replace(algorithm=algorithm))
    if between.algorithm != LAX:
        plain, hidden = (partial(run, one) for one in (Form(LAX), between))
        others["cpu"] = partial(by_hosts, axes, plain, hidden)
    if not others:
        return run(form, *operands)
    return lax.platform_dependent(*operands, default=partial(run, form), **others)
