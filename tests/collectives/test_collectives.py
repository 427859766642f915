"""Every drop-in, called in every way, by every algorithm: all ranks have the bits of lax."""

from functools import partial
from math import prod

import pytest
from cases import CASES, MAIN, TRACED, Case, check, each_algorithm, first_algorithm
from hypothesis import given
from hypothesis import strategies as st
from support import SIZES, make_mesh, mostly_exhaustive

from ringcoll import algorithms
from ringcoll.collectives.table import Table, TableRow

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


@pytest.mark.parametrize("n", mostly_exhaustive(SIZES, lambda n: n in (1, 3)))
def test_every_way_of_calling(n):
    check(make_mesh(n), "x", CASES, first_algorithm)


@pytest.mark.parametrize(
    "n", [pytest.param(n, marks=pytest.mark.quick if n == 3 else ()) for n in SIZES]
)
def test_every_algorithm_without_types(n):
    check(make_mesh(n), "x", MAIN, each_algorithm, check_vma=False)


# Each operation is compiled alone, which takes long.
@pytest.mark.parametrize("n", mostly_exhaustive([1, 3, 8], lambda n: n == 3))
def test_eager(n):
    check(make_mesh(n), "x", MAIN, first_algorithm, jit=False)


@pytest.mark.exhaustive
def test_eager_without_types():
    check(make_mesh(3), "x", MAIN, first_algorithm, jit=False, check_vma=False)


@pytest.mark.parametrize(
    ("shape", "axes"),
    mostly_exhaustive(SEVERAL_AXES, lambda _, axes: axes[0] == "z"),
)
def test_several_axes(shape, axes):
    check(make_mesh(*shape), axes, [*MAIN, TRACED], first_algorithm)


@pytest.mark.parametrize(
    ("shape", "axes"),
    mostly_exhaustive([((4, 2), ("x", "y")), ((2, 3), ("y", "x"))], lambda shape, _: 3 in shape),
)
def test_every_algorithm_over_two_axes(shape, axes):
    """One function for each collective: others differ only in the operation or in the layout."""
    cases = [case for case in MAIN if case.name in algorithms.COLLECTIVES]
    check(make_mesh(*shape), axes, cases, each_algorithm)


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        ((), ("psum", "pmean", "all_gather", "psum_scatter")),
        (["y", "x"], ("psum", "pmean")),
    ],
    ids=["none", "a list"],
)
def test_axes_that_few_take(axes, names):
    check(make_mesh(2, 2), axes, [case for case in MAIN if case.name in names])


def own_algorithms(case, *shape):
    """Schedules in digits other than the axes, functions, stages and a table."""
    n = prod(shape)
    if case.collective == "all_to_all":
        found = [algorithms.pairwise(n), algorithms.bruck_all_to_all]
    elif case.collective in algorithms.COLLECTIVES:
        found = [algorithms.two_ended(n), partial(algorithms.ring, direction=-1)]
    else:
        return [{}]
    if case.collective in ("psum", "pmean", "pmax", "pmin", "pbroadcast"):
        found.append(algorithms.recursive_doubling_all_reduce(n))
    row = "psum" if case.name in ("pmean", "pmax", "pmin") else case.collective
    found.append(Table((TableRow(row, "*", algorithms.names(row)[-1]),)))
    return [{"algorithm": algorithm} for algorithm in found]


@pytest.mark.parametrize(
    ("shape", "axes"),
    mostly_exhaustive([((6,), ("x",)), ((3, 2), ("y", "x"))], lambda shape, _: shape == (3, 2)),
)
def test_algorithms_of_one_s_own(shape, axes):
    check(make_mesh(*shape), axes, MAIN, own_algorithms)


@st.composite
def calls(draw):
    """Any function with any arguments on any shape that they allow."""
    name = draw(st.sampled_from([case.name for case in MAIN]), "function")
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3), "sizes")
    ndim = len(sizes)
    dim = draw(st.integers(-ndim, ndim - 1), "dimension")
    other = draw(st.integers(-ndim, ndim - 1), "another")
    tiled = draw(st.booleans(), "tiled")
    order = draw(st.permutations(range(8)), "order")

    def options(n, dim=dim, other=other):
        ranks = [rank for rank in order if rank < n]
        return {
            "all_gather": {"axis": dim, "tiled": tiled},
            "psum_scatter": {"scatter_dimension": dim, "tiled": tiled},
            "all_to_all": {"split_axis": dim, "concat_axis": other, "tiled": tiled},
            "pswapaxes": {"axis": dim},
            "pbroadcast": {"source": ranks[0]},
            "ppermute": {"perm": list(enumerate(ranks))[: dim % ndim * n // ndim]},
            "pshuffle": {"perm": ranks},
        }.get(name, {})

    def shape(n):
        dims = list(sizes)
        if name in ("psum_scatter", "all_to_all", "pswapaxes"):
            dims[dim] = n * dims[dim] if tiled and name != "pswapaxes" else n
        return tuple(dims)

    counts_output = name == "all_gather" and not tiled  # -1 is then a dimension more
    canonical = options if counts_output else lambda n: options(n, dim % ndim, other % ndim)
    return Case(name, shape, options, canonical)


@pytest.mark.exhaustive
@given(calls(), st.data())
def test_anything(case, data):
    meshes = [((3,), "x"), ((4,), "x"), ((2, 2), ("y", "x")), ((3, 2), ("x", "y"))]
    mesh, axes = data.draw(st.sampled_from(meshes), "mesh")
    dtype = data.draw(st.sampled_from(["int32", "bfloat16", "float8_e5m2", "float32"]), "dtype")

    def any_algorithm(case, *shape):
        return [data.draw(st.sampled_from(case.algorithms(*shape)), "algorithm")]

    check(make_mesh(*mesh), axes, [case], any_algorithm, dtype=dtype)
