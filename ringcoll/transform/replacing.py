"""`replaced`: the collectives of a function, in any library it calls, by ringcoll's."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from ringcoll import lax
from ringcoll.choose.table import Table
from ringcoll.collectives import choice
from ringcoll.collectives.public import check_function, public
from ringcoll.transform.overlapping import checked_names
from ringcoll.transform.programs import COLLECTIVES, Call, transformed


@public()
def replaced(
    f: Callable[..., Any],
    *,
    algorithm: str | Table = "auto",
    accumulate_dtype: DTypeLike | None = None,
    only: str | Iterable[str] | None = None,
) -> Callable[..., Any]:
    """f, with all its collectives of jax.lax by ringcoll's.

    Use it for code that you do not own, such as a batch norm or an optimizer:
    `step = ringcoll.replaced(step, algorithm="ring")`. Whatever library calls them, collectives of
    f's program are found as `overlapped` finds them. They are known by their primitives: `pmean` is
    a `psum`, `pshuffle` a `ppermute`, `pswapaxes` an `all_to_all`. A function with its own
    derivative (`custom_vjp`, `custom_jvp`) is left whole, and a sum that JAX itself adds for a
    gradient is replaced if the gradient is taken inside f.

    Shapes, steps, bytes, gradients and source: those of the functions.

    Args:
        f: a function of arrays or pytrees of arrays.
        algorithm: a name or a `Table`. If a collective cannot run by that name ("ring" for an
            `all_to_all`), it is "auto".
        accumulate_dtype: the dtype of partial sums, for functions that add floats or whose gradient
            does.
        only: the names of the functions to replace; None for all.

    Raises:
        TypeError: f is no function; the algorithm is neither a name nor a `Table`; the dtype is not
            a dtype.
        ValueError: there is no algorithm, or collective, of a name.

    >>> def from_a_library(x):
    ...     return jax.lax.pmean(x, "x")
    >>> mean = ranks(ringcoll.replaced(from_a_library, algorithm="ring"), out_specs=P())
    >>> program = mean.lower(jnp.arange(4.0)).as_text()
    >>> program.count("collective_permute")  # 3 rounds of a reduce-scatter, 3 of an all-gather
    6
    """
    check_function("f", f)
    choice.check_name_or_table(algorithm)
    dtype = None if accumulate_dtype is None else jnp.dtype(accumulate_dtype)
    names = checked_names(only, tuple(dict.fromkeys(COLLECTIVES.values())))

    def calls(jaxpr: Any, stored: Any) -> dict[int, Call]:
        return {
            i: Call(eqn, eqn.invars, eqn.outvars, partial(_run, eqn, algorithm, dtype))
            for i, eqn in enumerate(jaxpr.eqns)
            if COLLECTIVES.get(eqn.primitive.name) in names
        }

    return transformed(f, calls)


def _run(eqn: Any, algorithm: str | Table, dtype: Any, needed: Any, *xs: Any) -> Sequence[Any]:
    """A collective by ringcoll's function of its name, with its arguments."""
    name, given = COLLECTIVES[eqn.primitive.name], dict(eqn.params)
    ours, axes = getattr(lax, name), given.pop("axes", None) or given.pop("axis_name")
    given.pop("axis_size", None)
    if name == "all_gather":
        given["axis"] = given.pop("all_gather_dimension")
        given["to"] = "invarying" if eqn.primitive.name == "all_gather_invariant" else "varying"
    if name == "all_to_all":  # an untiled call is a tiled one between a reshape and a squeeze
        given["tiled"] = True
    is_inexact = jnp.issubdtype(xs[0].dtype, jnp.inexact)
    if dtype is not None and is_inexact and "accumulate_dtype" in signature(ours).parameters:
        given["accumulate_dtype"] = dtype
    # As a context: if the function cannot run by this algorithm, the call stays "auto".
    with nullcontext() if algorithm == "auto" else choice.algorithm(algorithm):
        if name in ("pmax", "pmin", "psum"):
            return ours(xs, axes, **given)
        return [ours(*xs, axis_name=axes, **given)]
