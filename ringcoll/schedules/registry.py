"""The registry in which collectives find algorithms by name."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, wraps
from inspect import signature
from math import prod
from typing import Any, TypeVar

from ringcoll.io.text import choose
from ringcoll.schedules.schedule import AllToAllSchedule, Schedule, ScheduleError, product

#: Several gathers that run one after the other, each along one digit of the ranks, major first.
Stages = tuple[Schedule, ...]
#: An algorithm as callers give it: a name, a schedule or stages, or a function from a shape to one.
ScheduleLike = str | Schedule | Stages | Callable[..., Schedule | Stages]

#: The name of the built-in collective, which is no schedule.
LAX = "lax"

# Algorithms by name. Only `listed` adds to these.
#: All-gathers. Backward they are reduce-scatters; backward and then forward, all-reduces.
GATHERS: dict[str, Callable[..., Schedule]] = {}
#: All-reduces of whole vectors: in each stage, gather along one digit of the ranks, then add.
STAGED: dict[str, Callable[..., Stages]] = {}
#: All-to-alls.
ALL_TO_ALLS: dict[str, Callable[..., AllToAllSchedule]] = {}
#: The name of a gather's all-reduce, by the name of the gather, if the two differ.
AS_ALL_REDUCE: dict[str, str] = {}

Kind = TypeVar("Kind", bound=Schedule)
Function = TypeVar("Function", bound=Callable[..., Any])


def listed(
    kind: dict[str, Any],
    name: str | None = None,
    *,
    all_reduce: str | None = None,
) -> Callable[[Function], Function]:
    """Add an algorithm to the registry.

    Args:
        kind: `GATHERS`, `STAGED` or `ALL_TO_ALLS`.
        name: its name; None: the name of the function.
        all_reduce: the name of a gather's all-reduce; None: the name of the gather.
    """

    def add(function: Function) -> Function:
        its_name = name or function.__name__
        kind[its_name] = function
        if all_reduce:
            AS_ALL_REDUCE[its_name] = all_reduce
        return function

    return add


def along_each_axis(one_axis: Callable[..., Kind]) -> Callable[..., Kind]:
    """Extend an algorithm for one axis to several axes, as a product."""

    @wraps(one_axis)
    def several(*shape: int, **options: int) -> Kind:
        return product([one_axis(n, **options) for n in shape])

    of_one = signature(one_axis)  # `help` shows the signature for several axes
    n, *options = of_one.parameters.values()
    shape = n.replace(name="shape", kind=n.VAR_POSITIONAL)
    vars(several)["__signature__"] = of_one.replace(parameters=[shape, *options])
    return several


ALL_REDUCES = ("psum", "pmean", "pmax", "pmin", "pbroadcast")
#: The collectives that exchange blocks. They run by the same schedules.
EXCHANGES = ("all_to_all", "ragged_all_to_all")
#: A gather in which a partial result follows each shard and returns to its owner: see
#: `schedules.tour`. It is drawn and priced as a collective is; layers run it.
TOUR = "tour"
#: The collectives that run by schedules.
COLLECTIVES = ("all_gather", "psum_scatter", *ALL_REDUCES, *EXCHANGES)
#: Names in the literature, and the names of the same collectives in `jax.lax`.
ALIASES: Mapping[str, str] = {"all_reduce": "psum", "reduce_scatter": "psum_scatter"}


def in_lax(collective: str) -> str:
    """The name of a collective in `jax.lax`.

    >>> algorithms.in_lax("reduce_scatter")
    'psum_scatter'
    """
    return ALIASES.get(collective, collective)


def names(collective: str) -> tuple[str, ...]:
    """The names of the algorithms of a collective.

    Raises:
        ValueError: there is no such collective.

    >>> "one_shot" in algorithms.names("psum"), "one_shot" in algorithms.names("all_gather")
    (True, False)
    """
    return tuple(algorithms_of(collective))


def algorithms_of(collective: str) -> Mapping[str, Callable[..., Schedule | Stages]]:
    """The algorithms of a collective by name.

    Raises:
        ValueError: there is no such collective.
    """
    if collective not in (*COLLECTIVES, TOUR):
        raise ValueError(f"no collective {collective!r}; {choose(collective, COLLECTIVES)}")
    if collective in ALL_REDUCES:
        return {AS_ALL_REDUCE.get(name, name): gather for name, gather in GATHERS.items()} | STAGED
    return ALL_TO_ALLS if collective in EXCHANGES else GATHERS


def listed_name(collective: str, name: str) -> str:
    """The name that `names` lists for an algorithm that has several names.

    The name of a gather's all-reduce also means the gather. Any other string is returned unchanged.

    >>> algorithms.listed_name("all_gather", "halving_doubling")
    'recursive_doubling'
    """
    if collective in (*ALL_REDUCES, *EXCHANGES):
        return name
    gathers = {all_reduce: gather for gather, all_reduce in AS_ALL_REDUCE.items()}
    return gathers.get(name, name)


def unknown(name: str, known: Iterable[str]) -> str:
    """Say that there is no algorithm of a name, and what to write."""
    return f"no algorithm {name!r}; {choose(name, known)}"


@lru_cache(maxsize=1024)
def build(collective: str, algorithm: ScheduleLike, shape: tuple[int, ...]) -> Schedule | Stages:
    """The checked schedule (or stages) of a collective on axes of `shape`, major first.

    Args:
        collective: one of `COLLECTIVES`; or `TOUR`, which gives the gather of a tour.
        algorithm: a name (see `listed_name`), a `Schedule`, a tuple of stages, or a
            function that makes one when called as `algorithm(*shape)`. It must be hashable.
        shape: the sizes of the axes; a schedule may cut them into finer digits.

    Raises:
        ValueError: there is no such collective or algorithm, a size is below 1, or the schedule
            has the wrong kind or the wrong number of ranks.
        ScheduleError: (a ValueError) the schedule is wrong; a SizeError: the algorithm has no
            schedule for this shape.
        TypeError, ScheduleError: the function that makes the schedule raised an exception, which
            is the cause.

    >>> algorithms.build("all_gather", "ring", (4,)) == algorithms.ring(4)
    True
    >>> len(algorithms.build("psum", "recursive_doubling", (12,)))  # stages of 2, 2 and 3 ranks
    3
    """
    library = algorithms_of(collective)
    if isinstance(algorithm, str) and listed_name(collective, algorithm) not in library:
        raise ValueError(f"{collective}: {unknown(algorithm, library)}")
    if not shape or min(shape) < 1:
        raise ValueError(f"{collective}: axes of sizes {shape}; give one or more, each at least 1")
    if isinstance(algorithm, str):
        algorithm = library[listed_name(collective, algorithm)]
    if not callable(algorithm):
        return _checked(collective, algorithm, shape)
    call = f"{getattr(algorithm, '__name__', algorithm)}({', '.join(map(str, shape))})"
    built = _called(call, algorithm, shape)
    try:
        return _checked(collective, built, shape)
    except ValueError as error:
        raise type(error)(f"{error} ({call} returned it)") from error


def _checked(collective: str, built: Any, shape: tuple[int, ...]) -> Schedule | Stages:
    """A schedule, or stages, if it is one of a collective on axes of `shape`."""
    # The type is Any because the loop below checks what a caller's function returned.
    stages: tuple[Any, ...] = (
        built if isinstance(built, tuple) and collective in ALL_REDUCES else (built,)
    )
    kind = AllToAllSchedule if collective in EXCHANGES else Schedule
    for stage in stages:
        if type(stage) is not kind:
            raise ValueError(
                f"{collective}: takes an instance of {kind.__name__}, got {type(stage).__name__}; "
                f"return {kind.__name__}((n,), rounds)"
            )
        if stage.lanes > 1 and kind is AllToAllSchedule:
            raise ValueError(f"{collective}: lanes={stage.lanes}; leave lanes out")
        stage.check()
    if prod(stage.size for stage in stages) != prod(shape):
        sizes = " x ".join(str(stage.size) for stage in stages) or "no"
        raise ValueError(
            f"{collective}: a schedule of {sizes} ranks on axes of sizes {shape}; "
            f"make one of {prod(shape)}, or pass a function of n"
        )
    return built


def _called(call: str, algorithm: Callable[..., Any], shape: tuple[int, ...]) -> Any:
    """The result of an algorithm; an error that it raises names the call."""
    try:
        return algorithm(*shape)
    except ScheduleError:  # its message is enough
        raise
    except Exception as error:
        kind = TypeError if isinstance(error, TypeError) else ScheduleError
        cure = "; it is called with the size of each axis" if kind is TypeError else ""
        raise kind(f"{call} raised {type(error).__name__}: {error}{cure}") from error
