"""Derivatives: the full Jacobian matrix over all ranks, against NumPy's and lax's.

Almost any other test passes a psum whose gradient is n times too large. So here the map from all
ranks' operands to all ranks' results is differentiated outside shard_map, forward and in reverse,
and every entry of its matrix is compared. The data are small integers, so results must be equal.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import SIZES, crossed, distinct, make_mesh, mostly_exhaustive, per_rank, runnable
from test_hop import everywhere

import ringcoll


class Case(NamedTuple):
    """A collective: the shape of its operand, the function, and NumPy's result for all ranks."""

    shape: Callable  # n -> the shape on one rank
    run: Callable  # (module, x, axis_name, n, **keywords) -> the result on one rank
    reference: Callable  # [n, *shape] -> [n, ...]
    collective: str | None = None  # whose algorithms it runs by


def pbroadcast(module, x, axis, n, is_traced=False, **keywords):
    if module is lax:  # whose own has no CPU lowering
        return lax.psum(jnp.where(lax.axis_index(axis) == n - 1, x, 0), axis)
    source = lax.optimization_barrier(jnp.int32(n - 1)) if is_traced else n - 1
    return module.pbroadcast(x, axis, source, **keywords)


def to_next(n):
    """All ranks but the last send, so rank 0 receives nothing."""
    return [(r, r + 1) for r in range(n - 1)]


CASES = {
    "all_gather": Case(
        lambda n: (2,),
        lambda m, x, axis, n, **kw: m.all_gather(x, axis, axis=1, **kw),
        lambda x: np.stack([x.T] * len(x)),
        "all_gather",
    ),
    "all_gather to invarying": Case(
        lambda n: (2,),
        lambda m, x, axis, n, **kw: m.all_gather(x, axis, tiled=True, to="invarying", **kw),
        lambda x: np.stack([x.reshape(-1)] * len(x)),
        "all_gather",
    ),
    "psum_scatter": Case(
        lambda n: (n, 2),
        lambda m, x, axis, n, **kw: m.psum_scatter(x, axis, **kw),
        lambda x: x.sum(0),
        "psum_scatter",
    ),
    "psum_scatter tiled": Case(
        lambda n: (1, 2 * n),
        lambda m, x, axis, n, **kw: m.psum_scatter(x, axis, scatter_dimension=1, tiled=True, **kw),
        lambda x: x.sum(0).reshape(len(x), 1, 2),
        "psum_scatter",
    ),
    "psum": Case(
        lambda n: (3,),
        lambda m, x, axis, n, **kw: m.psum(x, axis, **kw),
        lambda x: np.stack([x.sum(0)] * len(x)),
        "psum",
    ),
    "pmean": Case(
        lambda n: (n,),
        lambda m, x, axis, n, **kw: m.pmean(x, axis, **kw),
        lambda x: np.stack([x.sum(0) / np.float32(len(x))] * len(x)),
        "pmean",
    ),
    "all_to_all": Case(  # of which lax's own transpose is wrong (see below)
        lambda n: (n, 2),
        lambda m, x, axis, n, **kw: m.all_to_all(x, axis, 0, 1, **kw),
        lambda x: np.moveaxis(x, 0, 2),
        "all_to_all",
    ),
    "all_to_all tiled": Case(
        lambda n: (n, 2),
        lambda m, x, axis, n, **kw: m.all_to_all(x, axis, 0, 1, tiled=True, **kw),
        lambda x: x.swapaxes(0, 1).reshape(len(x), 1, -1),
        "all_to_all",
    ),
    "pswapaxes": Case(
        lambda n: (2, n),
        lambda m, x, axis, n, **kw: m.pswapaxes(x, axis, 1, **kw),
        lambda x: x.swapaxes(0, 2),
        "all_to_all",
    ),
    "pbroadcast": Case(
        lambda n: (3,), pbroadcast, lambda x: np.stack([x[-1]] * len(x)), "pbroadcast"
    ),
    "pbroadcast from a traced source": Case(
        lambda n: (3,),
        partial(pbroadcast, is_traced=True),
        lambda x: np.stack([x[-1]] * len(x)),
        "pbroadcast",
    ),
    "ppermute": Case(
        lambda n: (2,),
        lambda m, x, axis, n, **kw: m.ppermute(x, axis, to_next(n)),
        lambda x: np.concatenate([np.zeros_like(x[:1]), x[:-1]]),
    ),
    "pshuffle": Case(
        lambda n: (2,),
        lambda m, x, axis, n, **kw: m.pshuffle(x, axis, [(r + 1) % n for r in range(n)]),
        lambda x: np.roll(x, -1, 0),
    ),
}


def of_all(case, teams, x):
    """NumPy's results for all ranks; each team runs the collective by itself."""
    n = sum(map(len, teams))
    out = np.zeros((n, *case.reference(x[teams[0]]).shape[1:]), x.dtype)
    for team in teams:
        out[team] = case.reference(x[team])
    return out


def matrix(case, teams, n):
    """The Jacobian of `of_all`: a row for each result, a column for each operand."""
    shape = (sum(map(len, teams)), *case.shape(n))
    units = np.eye(int(np.prod(shape)), dtype=np.float32)
    columns = [of_all(case, teams, unit.reshape(shape)) for unit in units]
    return np.stack(columns, -1).reshape(*columns[0].shape, *shape)


def algorithms_of(case, n):
    """All algorithms on 3 ranks, a few on others: their gradients differ in execution only."""
    if case.collective is None:
        return [{}]
    names = distinct(case.collective, n)
    if n == 4:
        names = [name for name in names if name.endswith("_doubling")] or names
    elif n != 3:
        names = [names[0], names[-1]] if n < 8 else names[:1]
    return [{"algorithm": name} for name in names]


def jacobians(mesh, functions, shapes, check_vma, out=None, modes=(jax.jacrev, jax.jacfwd)):
    """The Jacobians of the maps from all ranks' operands to their results: {name: by each mode}."""
    spec = P(mesh.axis_names)

    def of(name):
        def whole(x):
            mapped = jax.shard_map(
                lambda x: functions[name](x[0])[None] if out is None else functions[name](x[0]),
                mesh=mesh,
                in_specs=spec,
                out_specs=spec if out is None else out,
                check_vma=check_vma,
            )
            return mapped(x)

        x = jnp.ones((mesh.size, *shapes[name]))
        return [mode(whole)(x) for mode in modes]

    return jax.jit(lambda: {name: of(name) for name in functions})()


def compare(results, expected):
    for key, (reverse, *forward) in results.items():
        np.testing.assert_array_equal(reverse, expected[key[0]], f"{key}, in reverse")
        for jacobian in forward:
            np.testing.assert_array_equal(jacobian, expected[key[0]], f"{key}, forward")


def bound(case, n, axis="x", module=ringcoll, **keywords):
    return lambda x: case.run(module, x, axis, n, **keywords)


def lax_is_right(name, check_vma):
    """lax has no gradient of one of the collectives, and a wrong gradient of another."""
    if name == "all_to_all":  # "Expected cotangent type"
        return False
    return check_vma or name != "all_gather to invarying"  # a slice, whoever else depends


@pytest.mark.parametrize(("n", "check_vma"), crossed(SIZES, (True, False)))
def test_jacobian(n, check_vma):
    functions = {
        (name, *keywords.values()): bound(case, n, **keywords)
        for name, case in CASES.items()
        for keywords in algorithms_of(case, n)
    }
    if n in (2, 3):
        for name, case in CASES.items():
            if lax_is_right(name, check_vma):
                functions[name, "jax.lax"] = bound(case, n, module=lax)
    shapes = {key: CASES[key[0]].shape(n) for key in functions}
    # Forward, a collective is applied to tangents, whatever their number.
    modes = (jax.jacrev, jax.jacfwd)[: 2 if n == 3 else 1]
    results = jacobians(make_mesh(n), functions, shapes, check_vma, modes=modes)
    compare(results, {name: matrix(case, [np.arange(n)], n) for name, case in CASES.items()})


@pytest.mark.parametrize("check_vma", [True, False])
def test_jacobian_of_a_replicated_result(check_vma):
    # 4 ranks: without types, JAX divides by n what the psum then sums.
    names = ["all_gather to invarying", "psum", "pmean"] + ["pbroadcast"] * (not check_vma)
    functions = {
        (name, algorithm): bound(CASES[name], 4, algorithm=algorithm)
        for name in names
        for algorithm in runnable(CASES[name].collective, 4)[-2:]
    }
    shapes = {key: CASES[key[0]].shape(4) for key in functions}
    results = jacobians(make_mesh(4), functions, shapes, check_vma, out=P())
    compare(results, {name: matrix(CASES[name], [np.arange(4)], 4)[0] for name in names})


@pytest.mark.parametrize(
    ("mesh", "axes"),
    mostly_exhaustive(
        [((2, 3), "yx"), ((3, 2), "y"), ((2, 1, 2), "zy")], lambda mesh, _: len(mesh) == 3
    ),
)
def test_jacobian_over_some_axes_in_any_order(mesh, axes):
    number, others = everywhere(mesh, axes)
    n = int(number.max()) + 1
    teams = [
        np.array(sorted((r for r in range(len(others)) if others[r] == place), key=number.item))
        for place in sorted(set(others))
    ]
    functions = {
        (name, *keywords.values()): bound(case, n, tuple(axes), **keywords)
        for name, case in CASES.items()
        for keywords in algorithms_of(case, n)[:1]
    }
    shapes = {key: CASES[key[0]].shape(n) for key in functions}
    results = jacobians(make_mesh(*mesh), functions, shapes, check_vma=True)
    compare(results, {name: matrix(case, teams, n) for name, case in CASES.items()})


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_nothing(check_vma):
    def gradients(x):
        functions = [bound(case, 3) for case in CASES.values() if len(case.shape(3)) == 1]
        return [jax.grad(lambda x, f=f: f(x).sum())(x) for f in functions]

    for gradient in per_rank(make_mesh(3), gradients, jnp.ones((3, 0)), check_vma=check_vma):
        assert gradient.shape == (3, 0)


def test_jacobian_in_groups():
    names = ["all_gather", "psum_scatter", "psum_scatter tiled", "psum", "all_to_all tiled"]
    groups = [[4, 0, 2], [1, 5, 3]]
    functions = {
        (name, algorithm): bound(CASES[name], 3, algorithm=algorithm, axis_index_groups=groups)
        for name in names
        for algorithm in runnable(CASES[name].collective, 3)[:2]
    }
    shapes = {key: CASES[key[0]].shape(3) for key in functions}
    results = jacobians(make_mesh(6), functions, shapes, check_vma=False)
    compare(results, {name: matrix(CASES[name], groups, 3) for name in names})


def test_the_gradient_of_all_gather_accumulates_wide():
    # 256 + 1 is 256 in bfloat16, again and again; 259 in float32, and then 260.
    weights = jnp.array([256, 1, 1, 1], jnp.bfloat16)

    def slopes(x, w):
        def gradient(wide):
            def loss(x):
                gathered = ringcoll.all_gather(x, "x", algorithm="ring", accumulate_dtype=wide)
                return (w * gathered).sum()

            return jax.grad(loss)(x)

        return gradient(None), gradient(jnp.float32)

    narrow, wide = per_rank(make_mesh(4), slopes, jnp.ones((4, 1), jnp.bfloat16), weights)
    assert narrow.dtype == wide.dtype == jnp.bfloat16
    np.testing.assert_array_equal(wide, np.full((4, 1), 260))
    assert (narrow < 260).any()


@pytest.mark.parametrize("name", ["pmax", "pmin"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_extrema_have_no_derivative_as_in_lax(name, check_vma):
    def refusal(module):
        def loss(x):
            return getattr(module, name)(x, "x").sum()

        with pytest.raises(Exception, match="not implemented") as caught:
            per_rank(make_mesh(2), jax.grad(loss), jnp.ones((2, 3)), check_vma=check_vma)
        return caught.type

    assert refusal(ringcoll) is refusal(lax)
