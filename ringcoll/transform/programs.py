"""A function's program, evaluated again with calls in place of some of its equations.

All other equations are bound as they were, with their lines and names; an inner program (of a
`scan`, `jit`, `checkpoint` and so on) is replaced only if a call is inside. If there is no call in
the whole program, the function itself is called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal, jaxprs_in_params
from jax.extend.source_info_util import current_name_stack, user_context

from ringcoll.runtime.value_types import varying_like

#: The primitives of `jax.lax`'s collectives, and the functions that bind them.
COLLECTIVES = {
    **{"all_gather": "all_gather", "all_gather_invariant": "all_gather"},
    **{"psum": "psum", "psum_invariant": "psum", "reduce_scatter": "psum_scatter"},
    **{"all_to_all": "all_to_all", "ragged_all_to_all": "ragged_all_to_all"},
    **{"pmax": "pmax", "pmin": "pmin", "ppermute": "ppermute"},
}
#: Equations whose results are numbers of their first operand, perhaps rounded.
_MOVE = (
    *("broadcast_in_dim", "convert_element_type", "dynamic_slice", "pvary", "reshape", "slice"),
    *("squeeze", "transpose"),
)
#: Equations whose programs are rewritten. A `custom_vjp`, for example, is more than its program.
_OPEN = ("checkpoint", "cond", "jit", "pjit", "remat2", "scan", "shard_map", "while")


@dataclass(frozen=True)
class Call:
    """A call that computes results of equations; it runs where the first of these was.

    Attributes:
        eqn: the equation whose line and name it has.
        invars: the variables and literals that it takes.
        outvars: the variables of its results.
        run: takes the values and a set: the results that are needed. Others may be None.
    """

    eqn: Any
    invars: Sequence[Any]
    outvars: Sequence[Any]
    run: Callable[..., Sequence[Any]]


#: The calls for a program, by the indices of equations. Its second argument is the variables that
#: hold what is stored: operands of the function, such as weights, which no work before makes.
Rewrite = Callable[[Any, set[Any]], Mapping[int, Call]]


def transformed(f: Callable[..., Any], rewrite: Rewrite) -> Callable[..., Any]:
    """f, with calls in place of equations of its program."""

    @wraps(f)
    def called(*args: Any, **kwargs: Any) -> Any:
        arrays, rebuild = _parted((args, kwargs))
        rebuild_results: Any = None

        def of_arrays(*arrays: Any) -> list[Any]:
            nonlocal rebuild_results
            args, kwargs = rebuild(arrays)
            results, rebuild_results = _parted(f(*args, **kwargs))
            return results

        again = _rewritten(jax.make_jaxpr(of_arrays)(*arrays), [True] * len(arrays), rewrite)
        if again is None:
            return f(*args, **kwargs)
        return rebuild_results(jax.core.eval_jaxpr(again.jaxpr, again.consts, *arrays))

    return called


def _parted(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The arrays of a pytree, and how to put others in their place; other leaves stay."""
    leaves, structure = jax.tree.flatten(tree)
    at = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray | np.generic)]

    def rebuild(arrays: Sequence[Any]) -> Any:
        every = dict(enumerate(leaves)) | dict(zip(at, arrays, strict=True))
        return jax.tree.unflatten(structure, every.values())

    return [leaves[i] for i in at], rebuild


def _rewritten(program: Any, stored: Sequence[bool], rewrite: Rewrite) -> Any:
    """A program with calls in it, closed; None if there are none. `stored`: which operands are."""
    jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    has_types = all(isinstance(v.aval, jax.core.ShapedArray) for v in jaxpr.invars)  # no references
    if not has_types or not any(e.primitive.name in COLLECTIVES for e in equations(jaxpr)):
        return None
    has_calls = False

    def run(*args: Any) -> list[Any]:
        nonlocal has_calls
        held = {*jaxpr.constvars, *(v for v, own in zip(jaxpr.invars, stored, strict=True) if own)}
        results, has_calls = _evaluated(jaxpr, [*consts, *args], held, rewrite)
        return results

    again = jax.make_jaxpr(run)(*(v.aval for v in jaxpr.invars))
    return again if has_calls else None


def _evaluated(
    jaxpr: Any, args: Sequence[Any], stored: set[Any], rewrite: Rewrite
) -> tuple[list[Any], bool]:
    """The results of a program, and whether there are calls in it."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _MOVE and stored.issuperset(variables(eqn)[:1]):
            stored.update(eqn.outvars)
    calls = rewrite(jaxpr, stored)
    steps = [calls.get(i, eqn) for i, eqn in enumerate(jaxpr.eqns)]
    makers = {v: step for step in steps for v in step.outvars}
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    has_calls = bool(calls)

    def run(step: Any) -> None:
        nonlocal has_calls
        for v in variables(step):
            if v not in values:  # a call may need what comes later
                run(makers[v])
        if isinstance(step, Call):
            given = (v.val if isinstance(v, Literal) else values[v] for v in step.invars)
            with in_place_of(step.eqn):
                for v, x in zip(step.outvars, step.run(needed, *given), strict=True):
                    if x is not None:
                        x = x if x.dtype == v.aval.dtype else x.astype(v.aval.dtype)
                        values[v] = varying_like(x, v.aval)
        else:
            inner = _inner(step, stored, rewrite) if step.primitive.name in _OPEN else {}
            has_calls |= bool(inner)
            eqn = step.replace(params=step.params | inner) if inner else step
            results = bound(jaxpr, eqn, [values[v] for v in variables(eqn)])
            values.update(zip(results_of(eqn), results, strict=True))

    for step in reversed(steps):
        if has_effects(step) or not needed.isdisjoint(step.outvars):
            needed.update(variables(step))
    for step in steps:
        if has_effects(step) or any(v in needed and v not in values for v in step.outvars):
            run(step)
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars], has_calls


def _inner(eqn: Any, stored: set[Any], rewrite: Rewrite) -> dict[str, Any]:
    """The parameters of an equation whose programs have calls, with these."""
    own = [not isinstance(v, Literal) and v in stored for v in eqn.invars]
    found: dict[str, Any] = {}
    for name, value in eqn.params.items():
        programs = value if name == "branches" else (value,)
        if isinstance(programs[0], Jaxpr | ClosedJaxpr):
            again = [_inner_program(eqn, program, [*own], rewrite) for program in programs]
            if any(new is not old for new, old in zip(again, programs, strict=True)):
                found[name] = tuple(again) if name == "branches" else again[0]
    return found


def _inner_program(eqn: Any, program: Any, own: list[bool], rewrite: Rewrite) -> Any:
    """A program of an equation with calls in it, or as it is; `own`: which operands are stored."""
    name, p, jaxpr, again = eqn.primitive.name, eqn.params, getattr(program, "jaxpr", program), None
    if name == "cond":
        own = own[1:]
    elif name == "while":
        own = [False] * len(jaxpr.invars)
    elif name == "scan":  # the iteration before makes a carry
        carries = sum(map(_have_one_rank, eqn.outvars, jaxpr.outvars))
        first = sum(map(_have_one_rank, eqn.invars, jaxpr.invars)) - carries
        own[first : first + carries] = [False] * carries

    def rewritten(*args: Any) -> tuple[()]:
        nonlocal again
        again = _rewritten(program, own, rewrite)
        return ()

    if name == "shard_map":  # there its axes are bound
        specs = {"mesh": p["mesh"], "in_specs": p["in_specs"], "out_specs": ()}
        manual = {"axis_names": p["newly_manual_axes"], "check_vma": p["check_vma"]}
        of_ranks = jax.shard_map(rewritten, **specs, **manual)
        jax.make_jaxpr(of_ranks)(*(v.aval for v in eqn.invars))
    else:
        rewritten()
    if again is None or again.consts:  # not every equation has a place for constants
        return program
    return again if isinstance(program, ClosedJaxpr) else again.jaxpr


def _have_one_rank(outer: Any, inner: Any) -> bool:
    return outer.aval.ndim == inner.aval.ndim


def variables(step: Any) -> tuple[Any, ...]:
    """The variables that an equation or a call takes, each once."""
    return tuple(dict.fromkeys(v for v in step.invars if not isinstance(v, Literal)))


def bound(jaxpr: Any, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of one equation of a program, for the values of its variables."""
    alone: Any = {"constvars": [], "invars": [*variables(eqn)], "outvars": results_of(eqn)}
    return jax.core.eval_jaxpr(jaxpr.replace(eqns=[eqn], **alone), (), *values)


def results_of(eqn: Any) -> list[Any]:
    """The variables of an equation's results that are used."""
    return [v for v in eqn.outvars if not isinstance(v, DropVar)]


def in_place_of(eqn: Any) -> Any:
    """A context in which calls have the line and the name of an equation."""
    stack = current_name_stack() + eqn.source_info.name_stack
    return user_context(eqn.source_info.traceback, name_stack=stack)


def has_effects(step: Any) -> bool:
    """Whether a step must stay where it is. JAX counts the axes of a collective as effects."""
    effects = getattr(step, "effects", ())
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in effects)


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program, and of all programs in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)
