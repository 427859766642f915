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

#: A value, and its carrier or None.
Carried = tuple[Any, Array | None]


def with_wide_gradients(function: Callable[..., Any], program: Any) -> Callable[..., Any]:
    """A function of pytrees, with wide gradients of what it closes over; `program` is its jaxpr.

    If none of its values is a narrow float, it is the function itself.
    """
    # A slice that depends on an operand is a different one in each round: nothing is summed.
    of_operands, summed = {*program.jaxpr.invars}, set[Any]()
    for eqn in program.eqns:
        variables = [v for v in eqn.invars if not isinstance(v, Literal)]
        if not of_operands.isdisjoint(variables):
            of_operands.update(eqn.outvars)
        if eqn.primitive.name != "dynamic_slice" or of_operands.isdisjoint(variables[1:]):
            summed.update(variables)
    carriers = {
        id(x): (x, x.astype(jnp.float32))
        for v, x in zip(program.jaxpr.constvars, program.consts, strict=True)
        if v in summed and isinstance(x, jax.core.Tracer) and 0 < _bytes(x) <= 4
    }

    def called(*operands: Any) -> Any:
        program, out = jax.make_jaxpr(function, return_shape=True)(*operands)
        leaves = jax.tree.leaves(operands)
        if all(_bytes(x) not in (1, 2) for x in (*program.consts, *leaves)):
            return function(*operands)
        pairs: list[Carried] = [carriers.get(id(x), (x, None)) for x in program.consts]
        pairs = [(x if c is None else lax.stop_gradient(x), c) for x, c in pairs]
        results = _evaluated(program.jaxpr, [*pairs, *((x, None) for x in leaves)])
        return jax.tree.unflatten(jax.tree.structure(out), list(map(_with_carrier, results)))

    return called if carriers else function


def _bytes(x: Any) -> int:
    """The bytes of a real float; 0 for others."""
    return x.dtype.itemsize if jnp.issubdtype(x.dtype, jnp.floating) else 0


def _evaluated(jaxpr: Any, pairs: Sequence[Carried]) -> list[Carried]:
    """The results of a jaxpr for the values of its constants and operands."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], pairs, strict=True))

    def read(atoms: Sequence[Any]) -> list[Carried]:
        return [(v.val, None) if isinstance(v, Literal) else values[v] for v in atoms]

    for eqn in jaxpr.eqns:
        stack = current_name_stack() + eqn.source_info.name_stack
        with user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            values |= zip(eqn.outvars, _results(eqn, read(eqn.invars)), strict=True)
    return read(jaxpr.outvars)


def _results(eqn: Any, pairs: list[Carried]) -> list[Carried]:
    """The results of one operation."""
    primitive, params = eqn.primitive, eqn.params
    first, *others = pairs or [(None, None)]
    if first[1] is not None and primitive.name == "convert_element_type":
        if _bytes(eqn.outvars[0].aval):
            return [(primitive.bind(first[0], **params), first[1])]
    elif first[1] is not None and primitive.name in MOVES:
        indices = [x for x, _ in others]
        x, carrier = (primitive.bind(x, *indices, **params) for x in first)
        return [(x, carrier)]
    elif all(carrier is None for _, carrier in pairs):
        pass
    elif primitive is lax.dot_general_p:
        return [(_product(partial(primitive.bind, **params), *zip(*pairs, strict=True)), None)]
    elif primitive.name in ("jit", "pjit", "checkpoint", "remat2"):
        inner = params["jaxpr"]  # a closed one has constants
        run: Any = partial(_evaluated, getattr(inner, "jaxpr", inner))
        if "policy" in params:
            run = jax.checkpoint(run, policy=params["policy"], prevent_cse=params["prevent_cse"])
        return run([*((x, None) for x in getattr(inner, "consts", ())), *pairs])
    bound = primitive.get_bind_params(params)  # since JAX 0.12 without functions
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    results = primitive.bind(*functions, *map(_with_carrier, pairs), **params)
    return [(x, None) for x in (results if primitive.multiple_results else [results])]


def _with_carrier(pair: Carried) -> Any:
    """The value of a pair; its derivative is that of the carrier."""
    return pair[0] if pair[1] is None else _to_carrier(*pair)


@jax.custom_jvp
def _to_carrier(x: Array, carrier: Array) -> Array:
    return x


_to_carrier.defjvp(lambda pair, tangents: (_to_carrier(*pair), tangents[1].astype(pair[0].dtype)))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(dot: Any, factors: tuple[Array, Array], carriers: tuple[Any, Any]) -> Array:
    """The product of two factors; derivatives by those with carriers are products in float32."""
    return dot(*factors)


@_product.defjvp
def _derivative(dot: Any, pairs: Any, tangents: Any) -> tuple[Array, Array]:
    y, terms = _product(dot, *pairs), list[Array]()
    factors = [_with_carrier(pair) for pair in zip(*pairs, strict=True)]
    for i, (of_factor, of_carrier) in enumerate(zip(*tangents, strict=True)):
        tangent = of_factor if of_carrier is None else of_carrier
        if tangent.dtype == jax.dtypes.float0:
            continue
        exact = {} if of_carrier is None else {"preferred_element_type": jnp.dtype(jnp.float32)}
        both = (tangent, factors[1]) if i == 0 else (factors[0], tangent)
        terms.append(dot(*both, **exact).astype(y.dtype))
    return y, sum(terms[1:], terms[0])
