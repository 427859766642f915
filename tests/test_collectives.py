"""Every drop-in, every way of calling it, every algorithm: all ranks, bit for bit as lax."""

import pytest
from cases import CASES, MAIN, check, first_algorithm
from support import SIZES, make_mesh, per_rank, assert_same

import numpy as np
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
import ringcoll.lax

#: Not in the order of the mesh, with axes of size 1, and some ranks in no common group.
SEVERAL_AXES = [
    ((4, 2), ("y", "x")),
    ((3, 2), ("x", "y")),
    ((2, 2, 2), ("y", "z", "x")),
    ((2, 2, 2), ("z", "x")),
    ((2, 3), ("y",)),
    ((3, 1, 2), ("z", "y", "x")),
    ((1, 2), ("x",)),
]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("n", SIZES)
def test_every_way_of_calling(n, check_vma):
    check(make_mesh(n), "x", CASES, first_algorithm, check_vma=check_vma)


@pytest.mark.parametrize("n", SIZES)
def test_every_algorithm(n):
    check(make_mesh(n), "x", MAIN, lambda case, *shape: [{}, *case.algorithms(*shape)])


@pytest.mark.parametrize("n", SIZES)
def test_eager(n):
    check(make_mesh(n), "x", MAIN, first_algorithm, jit=False)


def test_eager_without_types():
    check(make_mesh(3), "x", MAIN, first_algorithm, jit=False, check_vma=False)


@pytest.mark.parametrize(("shape", "axes"), SEVERAL_AXES)
def test_several_axes(shape, axes):
    check(make_mesh(*shape), axes, MAIN, first_algorithm)


@pytest.mark.parametrize(("shape", "axes"), [((4, 2), ("x", "y")), ((2, 3), ("y", "x"))])
def test_every_algorithm_over_two_axes(shape, axes):
    check(make_mesh(*shape), axes, MAIN, lambda case, *shape: case.algorithms(*shape))
