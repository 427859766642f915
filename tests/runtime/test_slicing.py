"""Slices of arrays: the operations that write them into their places, and where they start."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import MAIN, check
from support import assert_same, crossed, data, distinct, every_rank, make_mesh, per_rank

import ringcoll
from ringcoll.runtime import slicing
from ringcoll.runtime.parts import shares
from ringcoll.runtime.slicing import end_to_end, placed

WHOLE, PART = jnp.zeros((8, 8)), jnp.ones((2, 8))


def indices(dim):
    """The variables of two places at one index, and that index."""
    part = PART if dim == 0 else PART.T

    def twice(array, at):
        return placed(placed(array, part, dim, [(at, 2)]), part, dim, [(at, 2)])

    jaxpr = jax.make_jaxpr(twice)(WHOLE, jnp.int32(4)).jaxpr
    places = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dynamic_update_slice"]
    return [eqn.invars[2 + dim] for eqn in places], jaxpr.invars[1]


def test_every_place_has_an_index_of_its_own():
    """Otherwise a compiler starts permutes late: see `placed`, and README's headline."""
    (first, second), index = indices(0)
    assert len({first, second, index}) == 3


def test_indices_along_the_last_dimension():
    found, index = indices(1)
    assert found == [index, index]


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (2, 0), (2, 3)])
def test_what_is_joined_may_be_nothing(rows, columns):
    """A share may have no rows, where there are fewer rows than lanes."""
    y = jnp.ones((rows, columns), jnp.bfloat16)
    for dim in (0, 1):
        whole = jax.jit(lambda y, dim=dim: end_to_end([y, 2 * y], dim))(y)
        assert_same(whole, jnp.concatenate([y, 2 * y], dim))


def test_shares_are_as_even_as_possible():
    for size, lanes in ((7, 3), (2, 4), (0, 2), (6, 1)):
        found = shares(size, lanes)
        ends = [0, *(start + width for start, width in found)]
        assert ends[:-1] == [start for start, _ in found]
        assert ends[-1] == size
        widths = [width for _, width in found]
        assert max(widths) - min(widths) <= 1


RANKS = 4  # every algorithm runs on 4 ranks
#: The shape of one rank's operand for shards of this size, and the call. The shards of four ranks,
#: or the lanes of one rank, start beyond an int32.
LONG_CALLS = {
    "all_gather": (lambda s: (s,), {"tiled": True}),
    "psum_scatter": (lambda s: (RANKS * s,), {"tiled": True}),
    "psum": (lambda s: (RANKS * s + 1,), {}),  # it is padded
    "all_to_all": (lambda s: (RANKS * s, 1), {"split_axis": 0, "concat_axis": 0, "tiled": True}),
}
LONG_MATMULS = {
    "all_gather_matmul": (1, ringcoll.all_gather_matmul),
    "matmul_reduce_scatter": (RANKS, ringcoll.matmul_reduce_scatter),
}


def starts(dtype, text):
    """The lines of a lowered program that slice a long dimension at a start of this dtype."""
    found = []
    for line in re.findall(r"stablehlo\.dynamic_(?:update_)?slice.*", text):
        types = [ty.split("x")[:-1] for ty in re.findall(r"tensor<([^>]*)>", line)]
        whole, part = types[0], types[1 if "update" in line else -1]
        is_long = any(a != b and int(a) >= 2**31 for a, b in zip(whole, part, strict=True))
        found += [line] if is_long and f"tensor<{dtype}>" in line else []
    return found


def check_starts(text):
    assert starts("i64", text)
    assert not starts("i32", text)


def lowered(function, *shapes, check_vma=False):
    operands = [jax.ShapeDtypeStruct((RANKS, *shape), jnp.bfloat16) for shape in shapes]
    mapped = every_rank(make_mesh(RANKS), function, check_vma)
    return jax.jit(mapped).lower(*operands).as_text()


@pytest.mark.parametrize(("name", "size"), crossed([*LONG_CALLS], [2**29 + 8, 2**32 + 8]))
def test_a_collective_slices_a_long_dimension_at_an_int64(name, size):
    shape, options = LONG_CALLS[name]

    def every_algorithm(x):
        call = partial(getattr(ringcoll, name), x, "x", **options)
        return [call(algorithm=algorithm) for algorithm in distinct(name, RANKS)]

    text = lowered(every_algorithm, shape(size))
    check_starts(text)


def test_the_gradient_of_an_invarying_gather_slices_at_an_int64():
    gather = partial(ringcoll.all_gather, axis_name="x", tiled=True, to="invarying")
    text = lowered(lambda x: jax.vjp(gather, x)[1](gather(x)), (2**30,), check_vma=True)
    check_starts(text)


@pytest.mark.parametrize("name", LONG_MATMULS)
def test_matmuls_and_gradients_slice_at_an_int64(name):
    shards, function = LONG_MATMULS[name]

    def every_algorithm(x, w):
        results = []
        for algorithm in distinct("all_gather", RANKS):
            y, back = jax.vjp(lambda x, w, by=algorithm: function(x, w, "x", algorithm=by), x, w)
            results += [y, *back(y)]
        return results

    text = lowered(every_algorithm, (shards * (2**29 + 8), 2), (2, 2))
    check_starts(text)


def test_slices_at_int64s_are_the_same_slices(monkeypatch):
    monkeypatch.setattr(slicing, "LONG", 1)
    check(make_mesh(3), MAIN, lambda case, n: case.algorithms(n)[:2])


def test_slices_of_matmuls_at_int64s(monkeypatch):
    def run(x, w):
        results = []
        for function in (ringcoll.all_gather_matmul, ringcoll.matmul_reduce_scatter):
            by = partial(function, axis_name="x", algorithm="bidirectional_ring")
            y, back = jax.vjp(by, x, w)
            results += [y, *back(y)]
        return results

    operands = make_mesh(2), run, data((2, 6, 4)), data((2, 4, 2))
    expected = per_rank(*operands)
    monkeypatch.setattr(slicing, "LONG", 1)
    assert_same(per_rank(*operands), expected)


def test_a_tpu_refuses_a_start_of_an_int64(monkeypatch):
    monkeypatch.setattr(slicing, "device_kind", lambda: "TPU v5p")
    gather = partial(ringcoll.all_gather, axis_name="x", algorithm="bidirectional_ring")
    with pytest.raises(NotImplementedError, match=r"a dimension of 2147483648 .* algorithm='lax'"):
        lowered(partial(gather, tiled=True), (2**29,))
    lowered(gather, (2**31,))  # ranks are a short dimension, and lanes start before 2**31
