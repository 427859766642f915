"""Derivatives inside shard_map, of second order, and under the other transformations.

The loss of each rank is sum(w y^3), where y = c(x) is the result of a collective. Its gradient is
J' (3 w y^2) and its Hessian J' diag(6 w y) J. J is NumPy's matrix of the collective;
`test_autodiff` compares it with JAX's. All numbers are small integers, also after division by n, so
results must be equal.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import make_mesh, mostly_exhaustive, per_rank, runnable
from test_autodiff import CASES, bound, matrix

N = 3
typed_or_not = pytest.mark.parametrize("check_vma", [True, False])
#: `test_grad_inside` covers what checking types changes; elsewhere one mode is enough.
mostly_typed = pytest.mark.parametrize(
    "check_vma", mostly_exhaustive([True, False], lambda check_vma: check_vma)
)
mostly_untyped = pytest.mark.parametrize(
    "check_vma", mostly_exhaustive([True, False], lambda check_vma: not check_vma)
)


def functions():
    """Every collective, each by another algorithm."""
    found = {}
    for i, (name, case) in enumerate(CASES.items()):
        names = case.collective and runnable(case.collective, N)
        found[name] = bound(case, N, **({"algorithm": names[i % len(names)]} if names else {}))
    return found


def operands():
    """{name: x of all ranks}; multiples of 9, because pmean divides by 3 twice."""
    rng = np.random.default_rng(0)
    shapes = {name: (N, *case.shape(N)) for name, case in CASES.items()}
    return {a: 9 * rng.integers(-1, 2, s).astype(np.float32) for a, s in shapes.items()}


def weights():
    """{name: w of all ranks}, in the shape of the results; multiples of 3 too."""
    rng = np.random.default_rng(1)
    shapes = {a: matrix(case, [np.arange(N)], N).shape for a, case in CASES.items()}
    return {a: 3 * rng.integers(1, 3, s[: -1 - len(CASES[a].shape(N))]).astype(np.float32)
            for a, s in shapes.items()}  # fmt: skip


def flat(name):
    """The Jacobian as a matrix, and x and w as vectors."""
    jacobian = matrix(CASES[name], [np.arange(N)], N)
    x, w = operands()[name].reshape(-1), weights()[name].reshape(-1)
    return jacobian.reshape(w.size, x.size), x, w


def times(*matrices):
    """The product of integers. (The order in which NumPy adds thirds depends on the machine.)"""
    return np.rint(functools.reduce(np.matmul, matrices))


def slope(name):
    """The gradient of the sum of all ranks' losses."""
    jacobian, x, w = flat(name)
    return times(jacobian.T, 3 * w * times(jacobian, x) ** 2).reshape(operands()[name].shape)


def on_ranks(transform, check_vma):
    """The results on all ranks of `transform(collective, x, w)`: {name: stacked results}."""

    def program(xs, ws):
        return {name: transform(run, xs[name], ws[name]) for name, run in functions().items()}

    return per_rank(make_mesh(N), program, operands(), weights(), check_vma=check_vma)


def cubes(run, w):
    return lambda x: (w * run(x) ** 3).sum()


def compare(results, expected):
    assert set(results) == set(CASES)
    for name, result in results.items():
        np.testing.assert_array_equal(result, expected(name), name)


@typed_or_not
def test_grad_inside(check_vma):
    compare(on_ranks(lambda run, x, w: jax.grad(cubes(run, w))(x), check_vma), slope)


def test_grad_of_what_is_the_same_on_all_ranks():
    """The gradient has that type too. It sums over all ranks. (lax refuses a pbroadcast.)"""
    names = [name for name in CASES if not name.startswith("pbroadcast")]

    def program(xs, ws):
        gradients = {a: jax.grad(cubes(functions()[a], ws[a][0]))(xs[a]) for a in names}
        assert all(not jax.typeof(dx).mat.varying for dx in gradients.values())
        return gradients

    xs, ws = ({a: of[a] for a in names} for of in (operands(), weights()))
    mapped = jax.shard_map(program, mesh=make_mesh(N), in_specs=(P(), P("x")), out_specs=P())
    for name, dx in jax.jit(mapped)({a: x[1] for a, x in xs.items()}, ws).items():
        jacobian, _, w = flat(name)
        x = np.stack([xs[name][1]] * N).reshape(-1)
        expected = times(jacobian.T, 3 * w * times(jacobian, x) ** 2)
        np.testing.assert_array_equal(dx, expected.reshape(xs[name].shape).sum(0), name)


@mostly_typed
def test_grad_under_remat_jit_and_cond(check_vma):
    def composed(run, x, w):
        def chosen(x):
            return lax.cond(jnp.max(w) > 0, lambda x: run(x) ** 3, lambda x: 2 * run(x), x)

        remat = jax.checkpoint(jax.jit(lambda x: (w * chosen(x)).sum()))
        return jax.jit(jax.grad(remat))(x)

    compare(on_ranks(composed, check_vma), slope)


@mostly_untyped
def test_vmap_of_grad(check_vma):
    def batched(run, x, w):
        scales = jnp.arange(1.0, 3.0)
        return jax.vmap(lambda s: jax.grad(cubes(run, w))(s * x))(scales)

    compare(on_ranks(batched, check_vma), lambda a: np.stack([slope(a), 4 * slope(a)], axis=1))


@mostly_typed
def test_grad_of_a_scan_of_collectives(check_vma):
    def total_loss(y_of, x, total):
        """Every step depends on all ranks through the step before."""

        def step(x, k):
            y = y_of(x)
            return x + k * total(y), total(y * y)

        return lax.scan(step, x, jnp.arange(1.0, 4.0))[1].sum()

    def inside(run, x, w):
        return jax.grad(total_loss, 1)(lambda x: w * run(x) / 9, x, jnp.sum)

    def expected(name):
        jacobian, x, w = flat(name)

        def each_rank(y):
            return y.reshape(N, -1).sum(1, keepdims=True)

        def y_of(x):
            return w * (jacobian @ x.reshape(-1)) / 9

        return jax.jit(lambda x: jax.grad(total_loss, 1)(y_of, x, each_rank))(x.reshape(N, -1))

    for name, slopes in on_ranks(inside, check_vma).items():
        # Not exact: the third step has thirds.
        np.testing.assert_allclose(slopes.reshape(N, -1), expected(name), 1e-5, err_msg=name)


def test_grad_of_vmap_over_the_axis_itself():
    for name, run in functions().items():
        if name == "all_gather to invarying":  # which lax 0.10 refuses outside of shard_map
            continue
        x, w = operands()[name], weights()[name]

        def total(x, run=run, w=w):
            return jax.vmap(lambda x, w: cubes(run, w)(x), axis_name="x")(x, w).sum()

        np.testing.assert_array_equal(jax.jit(jax.grad(total))(x), slope(name), name)


def outside(run, check_vma):
    return jax.shard_map(
        lambda x: run(x[0])[None],
        mesh=make_mesh(N),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=check_vma,
    )


@pytest.mark.exhaustive
@typed_or_not
def test_hessians(check_vma):
    def of(name, run):
        w = weights()[name]

        def total(x):
            return (w * outside(run, check_vma)(x) ** 3).sum()

        x = jnp.asarray(operands()[name])
        return jax.hessian(total)(x), jax.jacrev(jax.grad(total))(x)

    results = jax.jit(lambda: {name: of(name, run) for name, run in functions().items()})()
    for name, (over_reverse, reverse_over_reverse) in results.items():
        jacobian, x, w = flat(name)
        expected = times(jacobian.T, np.diag(6 * w * times(jacobian, x)), jacobian)
        for hessian in (over_reverse, reverse_over_reverse):
            np.testing.assert_array_equal(hessian.reshape(expected.shape), expected, name)


@mostly_typed
def test_linearize_and_transpose(check_vma):
    def of(name, run):
        x, w = jnp.asarray(operands()[name]), jnp.asarray(weights()[name])
        whole = outside(run, check_vma)
        value, tangent_map = jax.linearize(whole, x)
        (back,) = jax.linear_transpose(whole, x)(w)
        return value, tangent_map(2 * x), jax.jvp(whole, (x,), (3 * x,))[1], back

    results = jax.jit(lambda: {name: of(name, run) for name, run in functions().items()})()
    for name, (value, twice, thrice, back) in results.items():
        jacobian, x, w = flat(name)
        y = times(jacobian, x).reshape(value.shape)
        for k, result in enumerate((value, twice, thrice), 1):
            np.testing.assert_array_equal(result, k * y, name)
        np.testing.assert_array_equal(back.reshape(-1), times(jacobian.T, w), name)
