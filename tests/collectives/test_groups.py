"""`axis_index_groups`: each group runs the collective by itself, in its own order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, MAIN, check, each_algorithm, first_algorithm
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from support import assert_same, data, make_mesh, mostly_exhaustive, per_rank

import ringcoll
import ringcoll.lax

#: lax has no groups for three of them, and not for an all_gather to an invariant.
GROUPED = [
    case
    for case in CASES
    if case.name not in ("ppermute", "pshuffle", "pbroadcast") and "to" not in case.options(1)
]
MAIN_GROUPED = [case for case in MAIN if case in GROUPED]


@pytest.mark.parametrize(
    "groups",
    [
        [[3, 0], [2, 1]],
        pytest.param(((0, 3, 2, 1),), marks=pytest.mark.exhaustive),
        pytest.param([[3], [1], [0], [2]], marks=pytest.mark.exhaustive),
    ],
)
def test_every_way_of_calling(groups):
    check(make_mesh(4), "x", GROUPED, first_algorithm, groups, check_vma=False)


@pytest.mark.parametrize(
    "form",
    [
        lambda: np.array([[0, 2], [1, 3]]),
        lambda: [np.array([0, 2]), range(1, 4, 2)],
        lambda: {(0, 2), (1, 3)},
        lambda: {"even": [0, 2], "odd": [1, 3]}.values(),
        lambda: (iter(group) for group in [[np.int8(0), 2], [True, 3]]),  # of psum lax takes none
    ],
)
def test_groups_may_have_any_form_that_lax_takes(form):
    """They are read once, so that all leaves have the same groups."""
    calls = {
        **{name: {} for name in ("psum", "pmean", "pmax", "all_gather")},
        "pswapaxes": {"axis": 0},
        "psum_scatter": {"tiled": True},
        "all_to_all": {"split_axis": 0, "concat_axis": 1, "tiled": True},
    }

    def of(module, groups):
        def program(x):
            results = {}
            for name, call in calls.items():
                call = call | {"axis_index_groups": groups()}
                results[name] = getattr(module, name)([x, 2 * x], "x", **call)
            return results

        return program

    x = data((4, 2, 2))
    ours = per_rank(make_mesh(4), of(ringcoll.lax, form), x, check_vma=False)
    theirs = of(lax, lambda: [[0, 2], [1, 3]])
    assert_same(ours, per_rank(make_mesh(4), theirs, x, check_vma=False))


@pytest.mark.parametrize(
    "groups",
    mostly_exhaustive(
        [[[3, 0, 5], [2, 4, 1]], [[1, 0], [5, 2], [3, 4]]], lambda groups: len(groups) == 2
    ),
)
def test_every_algorithm(groups):
    check(make_mesh(6), "x", MAIN_GROUPED, each_algorithm, groups, check_vma=False)


@pytest.mark.exhaustive
def test_typed():
    cases = [case for case in GROUPED if case.name not in ("psum", "pmean")]  # as in lax
    check(make_mesh(4), "x", cases, first_algorithm, [[3, 0], [2, 1]], check_vma=True)


@pytest.mark.parametrize(
    ("shape", "axes", "groups"),
    mostly_exhaustive(
        [
            ((2, 4), ("y", "x"), [[3, 0], [2, 5], [1, 7], [6, 4]]),
            ((2, 4), ("x", "y"), [[3, 0, 1, 2], [6, 5, 4, 7]]),
            ((1, 3, 2), ("z", "x", "y"), [[3, 0, 1], [5, 4, 2]]),
            ((2, 3), ("y",), [[2, 0, 1]]),
        ],
        lambda shape, axes, _: len(shape) == 3 or axes == ("y",),
    ),
)
def test_several_axes(shape, axes, groups):
    check(make_mesh(*shape), axes, MAIN_GROUPED, first_algorithm, groups, check_vma=False)


def test_of_several_sizes():
    cases = [case for case in MAIN if case.name in ("psum", "pmean", "pmax", "pmin")]
    check(make_mesh(5), "x", cases, groups=[[3, 1], [4, 0, 2]], check_vma=False)


def test_over_a_vmapped_axis_they_are_refused():
    """ringcoll refuses them, because lax's own words do not say which axis."""

    def total(x):
        return ringcoll.psum(x, "v", axis_index_groups=[[0, 1], [2, 3]], algorithm="ring")

    with pytest.raises(NotImplementedError, match=r"over the vmapped axis 'v'.*use a mesh axis"):
        jax.vmap(total, axis_name="v")(jnp.ones((4, 3)))


@pytest.mark.exhaustive
@given(st.data())
def test_any_partition(data):
    n = data.draw(st.sampled_from([2, 4, 6]), "ranks")
    size = data.draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]), "group")
    order = data.draw(st.permutations(range(n)), "order")
    groups = [order[i : i + size] for i in range(0, n, size)]
    case = data.draw(st.sampled_from(GROUPED), "case")

    def any_algorithm(case, *shape):
        return [data.draw(st.sampled_from(case.algorithms(*shape)), "algorithm")]

    check(make_mesh(n), "x", [case], any_algorithm, groups, check_vma=False)
