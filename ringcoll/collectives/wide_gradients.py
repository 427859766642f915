"""Gradients of what a caller's function closes over: summed in float32 over rounds, rounded once.

JAX computes a gradient in the dtype of its value, and adds the gradients of several uses in that
dtype. So a function that runs in every round would round a sum of n terms n times. Here such a
value has a float32 carrier beside it, on which no result depends: gradients go to the carrier.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal
from jax.extend.source_info_util import current_name_stack, user_context

from ringcoll.collectives.counting import MOVES


def with_wide_gradients(function: Callable[..., Any], program: Any) -> Callable[..., Any]:
    """A function of pytrees, with wide gradients of what it closes over; `program` is its jaxpr.

    If none of its values is a narrow float, it is the function itself; otherwise, JAX refuses
    forward mode (`jvp`).
    """
    # If it takes slices of a value, every round takes others, and nothing is summed.
    whole = [eqn for eqn in program.eqns if eqn.primitive.name != "dynamic_slice"]
    used = {v for eqn in whole for v in eqn.invars if not isinstance(v, Literal)}
    carriers = {
        id(x): x.astype(jnp.float32)
        for v, x in zip(program.jaxpr.constvars, program.consts, strict=True)
        if v in used and isinstance(x, jax.core.Tracer) and 0 < _bytes(x) <= 4
    }

    def called(*operands: Any) -> Any:
        program, out = jax.make_jaxpr(function, return_shape=True)(*operands)
        given = [*program.consts, *jax.tree.leaves(operands)]
        if all(_bytes(x) not in (1, 2) for x in given):
            return function(*operands)
        of_given = [carriers.get(id(x)) for x in given]
        held = [
            x if c is None else lax.stop_gradient(x) for x, c in zip(given, of_given, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(out), _evaluated(program, held, of_given))

    return called if carriers else function


def _bytes(x: Any) -> int:
    """The bytes of a real float; 0 for others."""
    return x.dtype.itemsize if jnp.issubdtype(x.dtype, jnp.floating) else 0


def _evaluated(program: Any, values: Sequence[Any], carriers: Sequence[Any]) -> list[Any]:
    """The results of a program for values of which some have carriers."""
    jaxpr = getattr(program, "jaxpr", program)  # a closed one has one
    operands = [*jaxpr.constvars, *jaxpr.invars]
    held = dict(zip(operands, zip(values, carriers, strict=True), strict=True))

    def read(atoms: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [(v.val, None) if isinstance(v, Literal) else held[v] for v in atoms]

    for eqn in jaxpr.eqns:
        stack = current_name_stack() + eqn.source_info.name_stack
        with user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            held |= zip(
                eqn.outvars, _results(eqn, *zip(*read(eqn.invars), strict=True)), strict=True
            )
    return [_carried(*both) for both in read(jaxpr.outvars)]


def _results(eqn: Any, values: Sequence[Any] = (), carriers: Sequence[Any] = ()) -> list[Any]:
    """The results of one operation, each with its carrier or None."""
    primitive, params = eqn.primitive, eqn.params
    first, *others = carriers or [None]
    if first is not None and primitive.name == "convert_element_type":
        y = primitive.bind(*values, **params)
        return [(y, first if _bytes(y) else None)]
    if first is not None and primitive.name in MOVES:
        return [tuple(primitive.bind(x, *values[1:], **params) for x in (values[0], first))]
    if first is None and all(c is None for c in others):
        pass
    elif primitive is lax.dot_general_p:
        return [(_product(partial(primitive.bind, **params), *values, *carriers), None)]
    elif primitive.name in ("jit", "pjit", "checkpoint", "remat2"):
        run: Any = partial(_evaluated, params["jaxpr"])
        if "policy" in params:
            run = jax.checkpoint(run, policy=params["policy"], prevent_cse=params["prevent_cse"])
        return [(y, None) for y in run(values, carriers)]
    values = [_carried(x, c) for x, c in zip(values, carriers, strict=True)]
    bound = primitive.get_bind_params(params)  # since JAX 0.12 without functions
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    results = primitive.bind(*functions, *values, **params)
    return [(y, None) for y in (results if primitive.multiple_results else [results])]


@jax.custom_vjp
def _to_carrier(x: Array, carrier: Array) -> Array:
    """x, whose gradient goes to the carrier."""
    return x


_to_carrier.defvjp(lambda x, _: (x, None), lambda _, ct: (ct, ct.astype(jnp.float32)))


def _carried(x: Any, carrier: Array | None) -> Any:
    return x if carrier is None else _to_carrier(x, carrier)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dot: Any, a: Array, b: Array, of_a: Array | None, of_b: Array | None) -> Array:
    """The product of a and b; gradients of those with carriers are computed in float32."""
    return dot(a, b)


def _product_forward(dot: Any, a: Array, b: Array, *carriers: Any) -> Any:
    return dot(a, b), (a, b, [c if c is None else () for c in carriers])  # without the carriers


def _product_backward(dot: Any, residuals: Any, ct: Array) -> tuple[Any, ...]:
    a, b, has = residuals
    exact, to = partial(dot, preferred_element_type=jnp.dtype(jnp.float32)), jnp.float32

    def wide(run: Callable[[Array], Array], x: Array, has_carrier: Any) -> Array | None:
        return None if has_carrier is None else jax.vjp(run, x.astype(to))[1](ct.astype(to))[0]

    wide_a = wide(lambda x: exact(x, b), a, has[0])
    wide_b = wide(lambda x: exact(a, x), b, has[1])
    return *jax.vjp(dot, a, b)[1](ct), wide_a, wide_b


_product.defvjp(_product_forward, _product_backward)
