"""How an algorithm is put into the list of its kind, and written for one axis serves several."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, Protocol, TypeVar

from ringcoll.schedule import AllToAllSchedule, Schedule, product

#: One gather after the other, each along its digit of the ranks, major first.
Stages = tuple[Schedule, ...]
#: What may be given as an algorithm: a name, a schedule or what makes one of a shape.
Algorithm = str | Schedule | Stages | Callable[..., Schedule | Stages]

# By name, each kind filled by `listed` and by nothing else.
#: All-gather; backward, reduce-scatter; one after the other, all-reduce.
GATHERS: dict[str, Callable[..., Schedule]] = {}
#: All-reduce of whole vectors: gather along a part of the ranks, add, and so on.
STAGED: dict[str, Callable[..., Stages]] = {}
#: All-to-all.
ALL_TO_ALLS: dict[str, Callable[..., AllToAllSchedule]] = {}

Kind = TypeVar("Kind", bound=Schedule, covariant=True)
Function = TypeVar("Function", bound=Callable[..., Any])


class OnSeveralAxes(Protocol[Kind]):
    """An algorithm, of the sizes of its axes, major first, and what options it has."""

    def __call__(self, *shape: int, **options: int) -> Kind: ...


def listed(kind: dict[str, Any], name: str | None = None) -> Callable[[Function], Function]:
    """Put an algorithm into the list of its kind, under its own name or another."""

    def add(function: Function) -> Function:
        kind[name or function.__name__] = function
        return function

    return add


def along_each_axis(one_axis: Callable[..., Kind]) -> OnSeveralAxes[Kind]:
    """Let an algorithm for one axis serve several, as a product."""

    @wraps(one_axis)
    def several(*shape: int, **options: int) -> Kind:
        return product([one_axis(n, **options) for n in shape])

    of_one = signature(one_axis)  # what `help` shows is of several
    n, *options = of_one.parameters.values()
    shape = n.replace(name="shape", kind=n.VAR_POSITIONAL)
    vars(several)["__signature__"] = of_one.replace(parameters=[shape, *options])
    return several
