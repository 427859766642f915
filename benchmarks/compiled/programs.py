"""Matmuls with a collective as programs: ringcoll's and the built-in forms."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from benchmarks.collectives import cases
from ringcoll.overlap import OPTIONS
from ringcoll.placement import gpus

PLAIN, COMPILER = "plain", "compiler"
TUNED, ASYNCHRONOUS = "/tuned", "/asynchronous"
#: The compiler's own forms, each also with the options of its collective matmuls.
BUILT_IN = (PLAIN, PLAIN + TUNED, COMPILER, COMPILER + TUNED)
DIRECTIONS = ("forward", "both")  # "both" is forward and both gradients
#: Algorithms of ringcoll whose messages hold codes.
ENCODED = ("auto:int8",)
OURS = ("auto", "ring", "bidirectional_ring", "bidirectional_ring/regather", "two_ended")


@dataclass(frozen=True)
class Form:
    """A matmul with a collective.

    Attributes:
        shapes: gives the shapes of both operands for m, k and f.
        ins: the shardings of the operands.
        out: the sharding of the result.
        ours: the call of ringcoll.
        plain: the built-in collective and the multiplication.
        travels: which of x, w and the result is sent.
        gathers: whether an operand is gathered. ringcoll may keep it or gather it again, and its
            messages may hold codes.
    """

    shapes: Callable[[int, int, int], tuple[tuple[int, int], tuple[int, int]]]
    ins: tuple[P, P]
    out: P
    ours: Callable[..., Array]
    plain: Callable[[Array, Array], Array]
    travels: int
    gathers: bool = True


FORMS = {
    "all_gather_matmul": Form(
        lambda m, k, f: ((m, k), (k, f)),
        (P("x"), P(None, "x")),
        P(None, "x"),
        lambda x, w, **options: ringcoll.all_gather_matmul(x, w, "x", **options),
        lambda x, w: lax.all_gather(x, "x", tiled=True) @ w,
        travels=0,
    ),
    "matmul_reduce_scatter": Form(
        lambda m, k, f: ((m, f), (f, k)),
        (P(None, "x"), P("x")),
        P("x"),
        lambda x, w, **options: ringcoll.matmul_reduce_scatter(x, w, "x", **options),
        lambda x, w: lax.psum_scatter(x @ w, "x", tiled=True),
        travels=2,
        gathers=False,
    ),
    "contraction_gather": Form(
        lambda m, k, f: ((m, k), (k, f)),
        (P(None, "x"), P(None, "x")),
        P(None, "x"),
        lambda x, w, **options: ringcoll.all_gather_matmul(x, w, "x", dim=-1, **options),
        lambda x, w: lax.all_gather(x, "x", axis=1, tiled=True) @ w,
        travels=0,
    ),
    "weight_gather": Form(
        lambda m, k, f: ((8 * m, k), (k, f)),
        (P("x"), P("x")),
        P("x"),
        lambda x, w, **options: ringcoll.all_gather_matmul(x, w, "x", operand=1, **options),
        lambda x, w: x @ lax.all_gather(w, "x", tiled=True),
        travels=1,
    ),
    "weight_gather_columns": Form(
        lambda m, k, f: ((8 * m, k), (k, f)),
        (P("x"), P(None, "x")),
        P("x"),
        lambda x, w, **options: ringcoll.all_gather_matmul(x, w, "x", operand=1, dim=-1, **options),
        lambda x, w: x @ lax.all_gather(w, "x", axis=1, tiled=True),
        travels=1,
    ),
}


def algorithms_of(form: str, names: Iterable[str]) -> list[str]:
    """The algorithms that make different programs of a form."""
    gathers = form not in FORMS or FORMS[form].gathers
    return [name for name in names if gathers or ("/regather" not in name and name not in ENCODED)]


def program(
    name: str, shape: str, algorithm: str, mesh: Any, dtype: Any = jnp.bfloat16
) -> tuple[Callable, tuple]:
    """A form's function and its operands, as `overlap.compile_for` takes them."""
    form = FORMS[name]
    sizes = form.shapes(*(int(size) for size in shape.split("x")))
    operands = tuple(
        jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))
        for size, spec in zip(sizes, form.ins, strict=True)
    )
    algorithm = algorithm.removesuffix(TUNED)
    if algorithm == COMPILER:
        out = NamedSharding(mesh, form.out)
        return jax.jit(lambda x, w: x @ w, out_shardings=out), operands
    if algorithm in BUILT_IN:
        function = form.plain
    else:
        options = options_of(algorithm)
        function = lambda x, w: form.ours(x, w, **options)  # noqa: E731
    return jax.shard_map(function, mesh=mesh, in_specs=form.ins, out_specs=form.out), operands


def options_of(algorithm: str) -> dict[str, str]:
    """The arguments of our functions for one of `OURS` or `ENCODED`."""
    algorithm, options = cases.name_and_options(algorithm)
    algorithm, _, residuals = algorithm.partition("/")
    return {"algorithm": algorithm, **({"residuals": residuals} if residuals else {}), **options}


def tuning(topology: str, algorithm: str) -> Mapping[str, str]:
    """The options of the compiler for an algorithm."""
    if algorithm.endswith(ASYNCHRONOUS):
        return OPTIONS["asynchronous all-to-all"]
    if not algorithm.endswith(TUNED):
        return {}
    return OPTIONS["windowed einsum: GPU" if gpus.is_named(topology) else "collective matmuls"]


def by_shardings(function: Callable, operands: tuple) -> Callable:
    """The function jitted, with operands and their gradients constrained to their shardings."""
    places = jax.tree.map(lambda leaf: leaf.sharding, operands)
    return jax.jit(lambda *of: function(*lax.with_sharding_constraint(of, places)))


def with_gradient(function: Callable, cotangent: Callable = lambda y: y * y) -> Callable:
    """Forward and backward; the cotangent waits for the result, as the cotangent of a loss does."""

    def both(*operands: Array) -> Any:
        y, pull_back = jax.vjp(function, *operands)
        return y, pull_back(cotangent(y))

    return both
