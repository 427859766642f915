"""What the tables of layers share: meshes, ways to run, the checker, and what a program shows."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from math import prod
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from operations import equations
from support import gamma, make_mesh

from ringcoll.layers.parameters import axes_in

#: The shape of a mesh (axes x, y, z), and the axes of the layer. The batch is over the others.
MESHES: Mapping[str, tuple[tuple[int, ...], str | tuple[str, ...]]] = {
    "one rank": ((1,), "x"),
    "five ranks": ((5,), "x"),
    "eight ranks": ((8,), "x"),
    "the first of two axes": ((2, 3), "x"),
    "the second of three axes": ((1, 3, 2), "y"),
    "two axes": ((2, 3), ("x", "y")),
    "two axes in the other order": ((2, 2, 2), ("z", "x")),
}


#: What the axes of the batch are inside `shard_map`.
OTHERS = ["manual", "auto", "explicit"]


class Place:
    """Where a case runs: a mesh, the axes of the layer, and those of the batch."""

    def __init__(self, name: str, others: str = "manual"):
        shape, self.axes = MESHES[name]
        is_explicit = others == "explicit"
        kind = AxisType.Explicit if is_explicit else AxisType.Auto
        self.mesh: Mesh = make_mesh(*shape, axis_type=kind)
        self.mine = (self.axes,) if isinstance(self.axes, str) else self.axes
        self.n = prod(self.mesh.shape[axis] for axis in self.mine)
        self.others = tuple(axis for axis in self.mesh.axis_names if axis not in self.mine)
        self.replicas = prod(self.mesh.shape[axis] for axis in self.others)

    def batch(self, rows: int | None) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """The leading dimensions of data with `rows` on a rank, and their entries of a spec."""
        return ((), ()) if rows is None else ((rows * self.replicas,), (self.others or None,))


#: How a layer is called inside `shard_map`; `vmap` and `scan` go along the batch.
WAYS: Mapping[str, Callable[[Callable], Callable]] = {
    "jit": lambda call: call,
    "eager": lambda call: call,
    "vmap": lambda call: lambda params, *data: jax.vmap(lambda *row: call(params, *row))(*data),
    "scan": lambda call: (
        lambda params, *data: jax.lax.scan(lambda c, row: (c, call(params, *row)), 0, data)[1]
    ),
    "remat": jax.checkpoint,
}


def ways(seed: int) -> list[str]:
    """Eagerly every operation is a program of its own, which takes ten times as long."""
    return [way for way in WAYS if way != "eager" or seed]


def no_such_others(case: Mapping[str, Any]) -> bool:
    """Whether a case has no other axes, or these must be manual.

    XLA:CPU aborts on a sum in bfloat16 beside an axis that is not. JAX cannot scan over a dimension
    that is sharded over an explicit axis.
    """
    others, way = case.get("others", "manual"), case.get("way")
    if others == "manual":
        return False
    is_scan = others == "explicit" and way == "scan"
    return no_other_axes(case) or is_scan or way == "eager" or "bfloat16" in case.values()


def no_other_axes(case: Mapping[str, Any]) -> bool:
    return "mesh" in case and Place(case["mesh"]).replicas == 1


def no_such_way(case: Mapping[str, Any]) -> bool:
    """Whether a case, or a part of one, has no batch to go along, or many ranks in eager mode.

    Eagerly JAX cannot take the gradient of a `custom_vjp` of arrays without elements, and, if types
    are not checked, divides the cotangents of all ranks by 3, which share one batch.
    """
    way, mesh, batch = case.get("way"), case.get("mesh", "one rank"), case.get("batch", 2)
    if no_such_others(case) or (case.get("others", "manual") != "manual" and batch is None):
        return True
    if way == "eager":
        is_divided = batch is None and not case.get("check_vma", True)
        return batch == 0 or is_divided or mesh not in ("one rank", "the first of two axes")
    return way in ("vmap", "scan") and not batch


def over_ranks(case: Mapping[str, Any], call: Callable, specs: Any, out: Any) -> Callable:
    """`call` on every rank of the mesh of a case, with its types checked or not.

    If the other axes are not manual, operands are sharded over them as the specs say.
    """
    others = case.get("others", "manual")
    place, options = Place(case["mesh"], others), {"check_vma": case["check_vma"]}
    if others == "manual":
        return jax.shard_map(call, mesh=place.mesh, in_specs=specs, out_specs=out, **options)

    def of_layer(spec: Any) -> Any:
        return P(*[tuple(axis for axis in axes_in(e) if axis in place.mine) or None for e in spec])

    def put(spec: P, tree: Any) -> Any:
        place_one = jax.lax.with_sharding_constraint if others == "auto" else jax.reshard
        return jax.tree.map(lambda x: place_one(x, NamedSharding(place.mesh, spec)), tree)

    ins, outs = (jax.tree.map(of_layer, tree, is_leaf=is_spec) for tree in (specs, out))
    options |= {"axis_names": {*place.mine}}
    mapped = jax.shard_map(call, mesh=place.mesh, in_specs=ins, out_specs=outs, **options)
    return lambda *operands: put(P(), mapped(*jax.tree.map(put, specs, operands, is_leaf=is_spec)))


def is_spec(x: Any) -> bool:
    return isinstance(x, P)


def check_each(cases: Iterable[Mapping[str, Any]], check: Callable[[Any], None]) -> None:
    """Check cases; add all values of a case to its error, so that a person can run it again."""
    for case in cases:
        try:
            others = case.get("others", "manual")
            mesh = Place(case["mesh"], others).mesh if others == "explicit" else None
            with jax.enable_x64(True), jax.set_mesh(mesh) if mesh else nullcontext():
                check(case)
        except BaseException as error:
            error.add_note(f"the case: {dict(case)}")
            raise


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal float64, or -1, 0 and 1, whose products and sums are exact in narrower floats."""
    if dtype == "float64":
        return rng.standard_normal(shape) / max(shape[0] if shape else 1, 1) ** 0.5
    return rng.integers(-1, 2, shape).astype(jnp.dtype(dtype))


def cotangent(y: jax.Array, exact: bool) -> jax.Array:
    """A weight for each element of a result: -1, 0 or 1, or eighths, which bfloat16 has."""
    place = 7 * jnp.arange(y.size).reshape(y.shape)
    return (place % 3 - 1 if exact else place % 17 / 8 - 1).astype(y.dtype)


def with_gradients(call: Callable, exact: bool = False) -> Callable:
    """`call(floats, *others)`: its results, and the gradients of the floats."""

    def both(floats: Any, *others: Any) -> Any:
        y, pull_back = jax.vjp(lambda floats: call(floats, *others), floats)
        return y, *pull_back(jax.tree.map(lambda y: cotangent(y, exact), y))

    return both


def compared(
    ours: Callable,
    theirs: Callable,
    operands: tuple[Any, ...],
    *,
    exact: bool = False,
    jit: bool = True,
    check: Callable[[Any, Any], None],
) -> tuple[Any, Any]:
    """Compare results and gradients with those of one device in float64, by `check`.

    The gradients have the dtypes of the floats. Returns our result, and the traced program, forward
    and backward.
    """
    mine, other = with_gradients(ours, exact), with_gradients(theirs, exact)

    @jax.numpy_rank_promotion("allow")
    def in_float64(*operands: Any) -> Any:
        return other(*jax.tree.map(widened, operands))

    traced = jax.jit(mine).trace(*operands)
    found = compiled(traced)(*operands) if jit else mine(*operands)
    check(*jax.device_get((found, jax.jit(in_float64)(*operands))))
    y, gradients = found
    assert dtypes(gradients) == dtypes(operands[0])
    return y, traced.jaxpr.jaxpr


def compiled(traced: Any) -> Any:
    """The program, in which XLA keeps no number in a wider dtype than it is written in."""
    return traced.lower().compile(compiler_options={"xla_allow_excess_precision": False})


def widened(x: Any) -> Any:
    """A real float as float64."""
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def close(
    ours: Any, theirs: Any, terms: int, roundings: int = 2, narrowest: Any = np.float64
) -> None:
    """Within the roundings that `test_tensor_parallel` counts.

    A narrow result was computed in float32 or wider, and then rounded so many times. A wide one is
    no better if `narrowest` is what it was made of.
    """

    def one(path: Any, a: Any, b: Any) -> None:
        assert a.shape == b.shape, (path, a.shape, b.shape)
        coarsest = max(float(jnp.finfo(dtype).eps) for dtype in (a.dtype, narrowest))
        is_float64 = coarsest < 2.0**-30
        bound = 256 * gamma(terms) if is_float64 else 16 * terms**0.5 * 2.0**-24
        if coarsest > 2.0**-20:
            bound += roundings * coarsest / 2
        largest = max(1, np.abs(b).max(initial=0))
        wide = np.asarray(a, np.float64)
        np.testing.assert_allclose(wide, b, rtol=0, atol=bound * largest, err_msg=str(path))

    chex.assert_trees_all_equal_structs(ours, theirs)
    jax.tree_util.tree_map_with_path(one, ours, theirs)


def equal(ours: Any, theirs: Any) -> None:
    """The same numbers, whatever their dtypes."""
    chex.assert_trees_all_equal_structs(ours, theirs)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a, b.dtype), b), ours, theirs
    )


def dtypes(tree: Any) -> list[str]:
    """The dtype of each leaf."""
    return [jnp.dtype(leaf.dtype).name for leaf in jax.tree.leaves(tree)]


def precisions(program: Any) -> set[Any]:
    """The precisions of all products."""
    products = [e for e, _ in equations(program) if e.primitive.name in PRODUCTS]
    found = [e.params["precision"] for e in products]
    return {p[0] if isinstance(p, tuple) else p for p in found}


PRODUCTS = ("dot_general", "ragged_dot_general")


def messages(program: Any, *names: str) -> set[str]:
    """The dtypes of the floats that are sent, by all collectives or by those of these names."""
    sent = set()
    for equation, _ in equations(program):
        name = equation.primitive.name
        if name.startswith("ringcoll_") if not names else name in names:
            sent |= {x.aval.dtype.name for x in equation.invars if is_float(x.aval)}
    return sent


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
