"""The form in which a matmul with a collective runs.

The form for each kind of platform is fixed when the matmul is traced. Which of these forms runs is
chosen when it is lowered, because the platform and the hosts are not known before.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from jax import lax

from ringcoll.collectives.table import LAX, Algorithm
from ringcoll.runtime.hosts import are_cpu_processes, by_hosts

T = TypeVar("T")

#: Here the built-in collective runs. The devices of a CPU share its cores, so within a process
#: nothing can be hidden; GPUs send slowly by permutes.
PLAIN_ON = ("cpu", "cuda", "rocm")


class Form(NamedTuple):
    """An algorithm, and the indices of the products that are computed late, from the whole x."""

    algorithm: Algorithm
    late: tuple[int, ...] = ()


def by_platform(
    axes: tuple[Hashable, ...], form: Form, between: Form, run: Callable[..., T], *operands: Any
) -> T:
    """`run(form, *operands)`, in the form for the platform on which the program runs.

    Args:
        axes: the axes of the collective.
        form: the form for TPUs.
        between: the form for CPUs if the ranks are on several hosts. Ranks of one process share its
            cores, so they use the built-in collective.
        run: computes the matmul in a form.
        operands: the operands of `run`.
    """
    plain = form._replace(algorithm=LAX)
    others = dict.fromkeys(PLAIN_ON, partial(run, plain)) if plain != form else {}
    if between.algorithm != LAX and are_cpu_processes():
        others["cpu"] = partial(by_hosts, axes, partial(run, plain), partial(run, between))
    if not others:
        return run(form, *operands)
    return lax.platform_dependent(*operands, default=partial(run, form), **others)
