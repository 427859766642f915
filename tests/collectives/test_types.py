"""The type of every result is lax's: shape, dtype, weak type, varying axes, sharding."""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, MAIN, first_algorithm
from jax import lax
from support import crossed, make_mesh, trace

import ringcoll.lax

#: Functions that make an operand of this shape on the axes of the mesh.
UNTYPED = {
    "of float32": lambda shape, axes: jnp.zeros(shape),
    "weak": lambda shape, axes: lax.full(shape, 1.0),
    "of bool": lambda shape, axes: jnp.zeros(shape, bool),
    "of NumPy": lambda shape, axes: np.zeros(shape, np.float32),
}
TYPED = {
    **{f"invariant, {kind}": make for kind, make in UNTYPED.items()},
    **{
        f"varying, {kind}": lambda shape, axes, make=make: varying(make(shape, axes), axes)
        for kind, make in UNTYPED.items()
    },
    "varying over an axis": lambda shape, axes: varying(jnp.zeros(shape), axes[-1]),
    "unreduced": lambda shape, axes: lax.pcast(
        varying(jnp.zeros(shape), axes), axes, to="unreduced"
    ),
    "reduced": lambda shape, axes: lax.pcast(jnp.zeros(shape), axes, to="reduced"),
}
#: Axes in other orders, one of several, none, and as a list (which a few take).
PLACES = [
    ((4,), "x", CASES),
    ((2, 3), ("y", "x"), CASES),
    ((2, 3), "y", MAIN),
    ((2, 3), ("x",), MAIN),
    ((2, 3), (), MAIN),
    ((2, 2), ["y", "x"], MAIN),
]


def varying(x, axes):
    return lax.pcast(x, axes, to="varying")


def described(call):
    """The type of a call's result and whether it is traced, or the type of its exception.

    The mesh is left out, because a scalar made of a constant has none.
    """
    try:
        result = call()
    except Exception as error:
        return type(error)
    kind = "traced" if isinstance(result, jax.core.Tracer) else type(result)
    aval = jax.typeof(result)
    return kind, aval.shape, aval.dtype, aval.weak_type, aval.mat, aval.sharding.spec


@pytest.mark.parametrize(("place", "kind"), crossed(PLACES, [*UNTYPED, *TYPED]))
def test_types(place, kind):
    (shape, axes, cases), operand = place, (TYPED | UNTYPED)[kind]
    mesh = make_mesh(*shape)
    sizes = [mesh.shape[axis] for axis in axes]
    n = prod(sizes)

    def program():
        for case in cases:
            x = operand(case.shape(n), mesh.axis_names)
            theirs = described(partial(case.by_lax, x, axes, n))
            for extra in [{}, *first_algorithm(case, *sizes)]:
                ours = described(partial(case.ours, ringcoll.lax, x, axes, n, **extra))
                assert ours == theirs, f"{case} {extra}"

    trace(program, mesh, check_vma=kind in TYPED)


def test_all_gather_to_reduced_is_of_lax():
    def program():
        x = lax.pcast(jnp.zeros(3), "x", to="varying")
        ours = ringcoll.lax.all_gather(x, "x", to="reduced")
        assert jax.typeof(ours) == jax.typeof(lax.all_gather(x, "x", to="reduced"))
        assert jax.typeof(ours).mat.reduced == {"x"}

    trace(program, make_mesh(2))


CONSTANTS = [1, 1.5, 2 + 1j, np.float32(2), np.int8(3), np.arange(3, dtype=np.int8)]


@pytest.mark.parametrize("constant", CONSTANTS, ids=repr)
@pytest.mark.parametrize("groups", [None, [[0], [1, 2, 3, 4]]])
@pytest.mark.parametrize("name", ["psum", "pmean"])
def test_sums_of_constants_are_constants(name, groups, constant):
    """They have the types of lax's results, so that `n = psum(1, axis)` stays an int."""

    def program():
        ours, theirs = (
            getattr(module, name)(constant, "x", axis_index_groups=groups)
            for module in (ringcoll.lax, lax)
        )
        assert type(ours) is type(theirs)
        assert not isinstance(ours, jax.core.Tracer)
        np.testing.assert_array_equal(ours, theirs, strict=True)

    trace(program, make_mesh(5))
