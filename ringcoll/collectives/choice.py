"""Choose the algorithm of a call: the one it names or, if it says "auto", the one set around it.

`with ringcoll.algorithm("ring"):` sets it for calls that are traced inside. If it is not set, or
the call cannot run by that algorithm, it stays "auto".
"""

import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from math import prod
from typing import Any

import jax

from ringcoll.choose.plan import NAMED, NOTHING_HIDES, SYMBOLIC, Plan, cheapest
from ringcoll.choose.table import Algorithm, Table, choices, runs
from ringcoll.choose.under_work import hides, machine
from ringcoll.collectives.axes import Grouped, check_ranks
from ringcoll.collectives.public import public
from ringcoll.costs.model import Model
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.value_types import device_kind
from ringcoll.schedules.registry import COLLECTIVES, LAX, build, listed_name, unknown
from ringcoll.schedules.schedule import Schedule

#: Makes plans, with prices, on axes of these sizes on this machine.
PlansOn = Callable[[tuple[int, ...], Model], Sequence[Plan]]
#: The algorithm set around a call. User contexts are a part of `jit`'s key, so `jit` compiles once
#: for each value.
_around = jax.make_user_context(default_value=None)


@public()
def algorithm(algorithm: str | Table) -> AbstractContextManager[None]:
    """Collectives and matmuls with "auto" run by this algorithm: `with algorithm("ring"):`.

    It applies to all calls that are traced inside, on this thread. `jit` compiles once for each
    choice. A gradient uses the algorithm of its function, even if it is traced later. (But calls
    in the backward pass of a `custom_vjp` are traced later, and choose their algorithm then.) If
    a collective does not have this algorithm ("ring" for an `all_to_all`), or cannot run by it on
    its number of ranks, the call stays "auto". The innermost `with` wins. "auto" sets no algorithm.

    Args:
        algorithm: the name of an algorithm of `ringcoll.algorithms`, "lax" or "auto"; or a `Table`,
            which picks the algorithm of each collective, and of no matmul.

    Raises:
        TypeError: it is neither a string nor a `Table`.
        ValueError: no collective has an algorithm of this name.

    >>> total = ranks(lambda x: ringcoll.psum(x, "x"), out_specs=P())
    >>> with ringcoll.algorithm("ring"):
    ...     program = total.lower(jnp.arange(4.0)).as_text()
    >>> program.count("collective_permute")  # 3 rounds of a reduce-scatter, 3 of an all-gather
    6
    """
    check_name_or_table(algorithm)
    return _around(algorithm)


def resolve_algorithm(
    algorithm: Algorithm,
    collective: str,
    axes: Sequence[Hashable],
    groups: Grouped | None = None,
    *,
    takes_table: bool = False,
) -> Algorithm:
    """The algorithm of a call with this `algorithm=`; a name becomes the listed name.

    With `takes_table` it may be a Table that is set around the call.

    It is refused if the collective cannot run by it on the ranks over these axes or in groups.

    Raises:
        TypeError: it is not a name, a Table, a Schedule, a tuple or a function.
        ValueError: there is no algorithm of this name, it cannot run on these ranks, or the
            function raises an exception.
    """
    shape = Ranks.over(axes, groups, all_axes=not isinstance(algorithm, str)).shape
    if not isinstance(algorithm, str):
        _check(algorithm, collective, shape)
    if algorithm != "auto":
        return _listed(algorithm, collective, shape) if isinstance(algorithm, str) else algorithm
    around = _around.value or "auto"
    if isinstance(around, Table):
        return around if takes_table else "auto"
    return _if_it_runs(around, collective, shape)


def algorithm_of(
    algorithm: Algorithm,
    axes: Sequence[Hashable],
    groups: Grouped | None = None,
    collective: str = "psum_scatter",
) -> Algorithm:
    """The algorithm of a call that has work under a collective, with its ranks checked.

    A gather and a sum have the same algorithms: a sum is a gather that is run backward.
    """
    check_ranks(axes, groups)
    if isinstance(algorithm, Table):
        raise ValueError("algorithm: a Table is only for collectives; pass a name or a Schedule")
    return resolve_algorithm(algorithm, collective, axes, groups)


def plan_under_work(
    algorithm: Algorithm,
    axes: Sequence[Hashable],
    arrays: Any,
    plans_on: PlansOn,
    unpriced: str = "",
) -> Plan:
    """The algorithm that a call names; by "auto" the cheapest plan, where work hides messages.

    Args:
        algorithm: what `algorithm_of` returned.
        axes: the axes of the ranks.
        arrays: a pytree of what the price depends on.
        plans_on: makes the plans.
        unpriced: why the built-in runs without a look at prices; "" if it does not.
    """
    if algorithm != "auto":
        return Plan(algorithm, why=NAMED)
    if not hides(kind := device_kind()):
        return Plan(LAX, why=NOTHING_HIDES)
    if not all(isinstance(size, int) for x in jax.tree.leaves(arrays) for size in x.shape):
        unpriced = SYMBOLIC
    if unpriced:
        return Plan(LAX, why=unpriced)
    sizes = Ranks.over(axes, None).shape
    model = machine(kind, prod(sizes), jax.sharding.get_abstract_mesh().size)
    return cheapest(plans_on(sizes, model))


@lru_cache(maxsize=1024)
def _if_it_runs(name: str, collective: str, shape: tuple[int, ...]) -> str:
    """The listed name of an algorithm; "auto" if a collective cannot run by it on this shape."""
    name = listed_name(collective, name)
    return name if name in choices(collective) and runs(collective, name, shape) else "auto"


@lru_cache(maxsize=1024)
def _listed(name: str, collective: str, shape: tuple[int, ...]) -> str:
    """The listed name of an algorithm; an error if a collective cannot run by it on this shape."""
    known, listed = ("auto", *choices(collective)), listed_name(collective, name)
    if listed not in known:
        raise ValueError(_unknown(name, known))
    if listed != LAX:
        _check(name, collective, shape)
    return listed


def _check(algorithm: Algorithm, collective: str, shape: tuple[int, ...]) -> None:
    """Refuse an algorithm by which a collective cannot run on axes of `shape`."""
    if not isinstance(algorithm, str | Schedule | tuple | Table) and not callable(algorithm):
        raise TypeError(
            f"algorithm={algorithm!r} is not an algorithm; pass a name, a Table, a Schedule, a "
            "tuple of Schedules, or a function that makes one from the sizes of the axes"
        )
    if isinstance(algorithm, Table):
        return
    try:
        hash(algorithm)
    except TypeError as error:
        raise TypeError(f"algorithm={algorithm!r}: {error}; pass something hashable") from error
    try:
        build(collective, algorithm, shape)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        own = algorithm if isinstance(algorithm, str) else type(algorithm).__name__
        shown = getattr(algorithm, "__name__", own)
        raise kind(f"algorithm={shown}: {error}") from error


def _unknown(name: str, known: tuple[str, ...]) -> str:
    if name.endswith(".json") or os.sep in name:
        return f"no algorithm {name!r}; a table is passed as ringcoll.Table.load({name!r})"
    return unknown(name, known)


@lru_cache(maxsize=1)
def _known() -> tuple[str, ...]:
    """The names of all algorithms, in the order in which they are listed."""
    return tuple(dict.fromkeys(name for kind in COLLECTIVES for name in ("auto", *choices(kind))))


def check_name_or_table(algorithm: Any) -> None:
    """Refuse what is neither a Table nor the name of an algorithm.

    Raises:
        TypeError: it is neither a string nor a Table.
        ValueError: no collective has an algorithm of this name.
    """
    if isinstance(algorithm, Table):
        return
    if not isinstance(algorithm, str):
        raise TypeError(
            f"algorithm={algorithm!r} is neither a name nor a Table; pass a Schedule or a function "
            "to the call itself, as algorithm="
        )
    if not any(listed_name(collective, algorithm) in _known() for collective in COLLECTIVES):
        raise ValueError(_unknown(algorithm, _known()))
