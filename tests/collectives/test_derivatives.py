"""Derivatives of programs: the Jacobian of all ranks, losses, second order, transformations.

`test_calls` compares the derivative of every call. Here the map from all ranks' operands to all
ranks' results is differentiated outside shard_map, and each rank differentiates a loss inside it:
sum(w y^3) with y = c(x), whose gradient is J' (3 w y^2) and whose Hessian J' diag(6 w y) J.
All numbers are whole, also after division by n, so results must be equal.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import LINEAR
from jax import lax
from jax.sharding import PartitionSpec as P
from support import make_mesh, mostly_exhaustive, per_rank, runnable

import ringcoll

N = 3
MESH = make_mesh(N)
typed_or_not = pytest.mark.parametrize("check_vma", [True, False])
mostly_typed = pytest.mark.parametrize(
    "check_vma", mostly_exhaustive([True, False], lambda check_vma: check_vma)
)


def call(name):
    """The collective, by the algorithm whose turn it is."""
    case, turn = LINEAR[name], [*LINEAR].index(name)
    names = runnable(case.collective, N) if case.takes_algorithm else []
    options = {"algorithm": names[turn % len(names)]} if names else {}
    return lambda x: case.ours(ringcoll, x, "x", N, **options)


CALLS = {name: call(name) for name in LINEAR}


@functools.cache
def matrix(name):
    """The Jacobian of the map from all ranks' operands to all ranks' results."""
    shape = (N, *LINEAR[name].shape(N))
    units = np.eye(int(np.prod(shape)), dtype=np.float32).reshape(-1, *shape)
    columns = [LINEAR[name].expected(unit) for unit in units]
    return np.stack(columns, -1).reshape(*columns[0].shape, *shape)


def operands():
    """{name: x of all ranks}; multiples of 9, because pmean divides by 3 twice."""
    rng = np.random.default_rng(0)
    shapes = {name: (N, *case.shape(N)) for name, case in LINEAR.items()}
    return {name: 9 * rng.integers(-1, 2, s).astype(np.float32) for name, s in shapes.items()}


def weights():
    """{name: w of all ranks}, in the shape of the results; multiples of 3."""
    rng = np.random.default_rng(1)
    shapes = {name: LINEAR[name].expected(x).shape for name, x in operands().items()}
    return {name: 3 * rng.integers(1, 3, s).astype(np.float32) for name, s in shapes.items()}


def flat(name):
    """The Jacobian as a matrix, and x and w as vectors."""
    x, w = operands()[name].reshape(-1), weights()[name].reshape(-1)
    return matrix(name).reshape(w.size, x.size), x, w


def times(*matrices):
    """The product of integers. (The order in which NumPy adds thirds depends on the machine.)"""
    return np.rint(functools.reduce(np.matmul, matrices))


def slope(name):
    """The gradient of the sum of all ranks' losses."""
    jacobian, x, w = flat(name)
    return times(jacobian.T, 3 * w * times(jacobian, x) ** 2).reshape(operands()[name].shape)


def cubes(run, w):
    return lambda x: (w * run(x) ** 3).sum()


def outside(run, check_vma, out=None):
    """The map from all ranks' operands to all ranks' results; `out`: they are all the same."""
    return jax.shard_map(
        lambda x: run(x[0])[None] if out is None else run(x[0]),
        mesh=MESH,
        in_specs=P("x"),
        out_specs=P("x") if out is None else out,
        check_vma=check_vma,
    )


@typed_or_not
def test_jacobian(check_vma):
    def of(name):
        whole, x = outside(CALLS[name], check_vma), jnp.ones((N, *LINEAR[name].shape(N)))
        return [mode(whole)(x) for mode in (jax.jacrev, jax.jacfwd)[: 2 - check_vma]]

    results = jax.jit(lambda: {name: of(name) for name in LINEAR})()
    for name, jacobians in results.items():
        for jacobian in jacobians:
            np.testing.assert_array_equal(jacobian, matrix(name), name)


@typed_or_not
def test_jacobian_of_a_replicated_result(check_vma):
    # Without types, JAX divides by n what the psum then sums, so results are rounded.
    names = ["all_gather to invarying", "psum", "pmean"] + ["pbroadcast"] * (not check_vma)

    def of(name):
        whole = outside(CALLS[name], check_vma, out=P())
        return jax.jacrev(whole)(jnp.ones((N, *LINEAR[name].shape(N))))

    results = jax.jit(lambda: {name: of(name) for name in names})()
    for name, jacobian in results.items():
        np.testing.assert_allclose(jacobian, matrix(name)[0], 1e-6, err_msg=name)


@pytest.mark.parametrize("name", ["pmax", "pmin"])
@typed_or_not
def test_extrema_have_no_derivative_as_in_lax(name, check_vma):
    def refusal(module):
        def loss(x):
            return getattr(module, name)(x, "x").sum()

        with pytest.raises(Exception, match="not implemented") as caught:
            per_rank(MESH, jax.grad(loss), np.ones((N, 2)), check_vma=check_vma)
        return caught.type

    assert refusal(ringcoll) is refusal(lax)


def chosen(run, x, w):
    """The gradient under `checkpoint`, `jit` and `cond`."""

    def one(x):
        return lax.cond(jnp.max(w) > 0, lambda x: run(x) ** 3, lambda x: 2 * run(x), x)

    remat = jax.checkpoint(jax.jit(lambda x: (w * one(x)).sum()))
    return jax.jit(jax.grad(remat))(x)


def batched(run, x, w):
    """The gradients of a batch."""
    return jax.vmap(lambda s: jax.grad(cubes(run, w))(s * x))(jnp.arange(1.0, 3.0))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("transform", "factors", "check_vma"),
    [(chosen, 1, True), (chosen, 1, False), (batched, [1, 4], True), (batched, [1, 4], False)],
)
def test_gradient_inside(transform, factors, check_vma):
    def program(xs, ws):
        return {name: transform(run, xs[name], ws[name]) for name, run in CALLS.items()}

    results = per_rank(MESH, program, operands(), weights(), check_vma=check_vma)
    for name, result in results.items():
        expected = np.stack([np.multiply.outer(factors, each) for each in slope(name)])
        np.testing.assert_array_equal(result, expected, name)


def test_gradient_of_what_is_the_same_on_all_ranks():
    """The gradient has that type too. It sums over all ranks. (lax refuses a pbroadcast.)"""
    names = [name for name in LINEAR if not name.startswith("pbroadcast")]

    def program(xs, ws):
        gradients = {a: jax.grad(cubes(CALLS[a], ws[a][0]))(xs[a]) for a in names}
        assert all(not jax.typeof(dx).mat.varying for dx in gradients.values())
        return gradients

    xs, ws = ({a: of[a] for a in names} for of in (operands(), weights()))
    mapped = jax.shard_map(program, mesh=MESH, in_specs=(P(), P("x")), out_specs=P())
    for name, dx in jax.jit(mapped)({a: x[1] for a, x in xs.items()}, ws).items():
        jacobian, _, w = flat(name)
        x = np.stack([xs[name][1]] * N).reshape(-1)
        expected = times(jacobian.T, 3 * w * times(jacobian, x) ** 2)
        np.testing.assert_array_equal(dx, expected.reshape(xs[name].shape).sum(0), name)


@mostly_typed
def test_gradient_of_a_scan_of_collectives(check_vma):
    """The second step depends on all ranks through the first. (A third would have thirds.)"""

    def total_loss(y_of, x, total):
        def step(x, k):
            y = y_of(x)
            return x + k * total(y), total(y)

        return lax.scan(step, x, jnp.arange(1.0, 3.0))[1].sum()

    def program(xs, ws):
        def one(name):
            y_of = lambda x: ws[name] * CALLS[name](x)  # noqa: E731
            return jax.grad(lambda x: total_loss(y_of, x, jnp.sum))(xs[name])

        return {name: one(name) for name in LINEAR}

    for name, slopes in per_rank(MESH, program, operands(), weights(), check_vma=check_vma).items():
        jacobian, x, w = flat(name)
        jacobian = (w[:, None] * jacobian).astype(np.float64)
        # Each rank's loss is its sum of y, after one step and after two.
        rank_of = np.repeat(np.arange(N), x.size // N)
        feeds = np.repeat(np.arange(N), w.size // N)[None] == rank_of[:, None]
        second = np.eye(x.size) + feeds @ jacobian
        expected = jacobian.sum(0) + jacobian.sum(0) @ second
        np.testing.assert_array_equal(slopes.reshape(-1), np.rint(expected), name)


@pytest.mark.exhaustive
@typed_or_not
def test_hessians(check_vma):
    def of(name):
        w, whole = weights()[name], outside(CALLS[name], check_vma)

        def total(x):
            return (w * whole(x) ** 3).sum()

        x = jnp.asarray(operands()[name])
        return jax.hessian(total)(x), jax.jacrev(jax.grad(total))(x)

    results = jax.jit(lambda: {name: of(name) for name in LINEAR})()
    for name, (over_reverse, reverse_over_reverse) in results.items():
        jacobian, x, w = flat(name)
        expected = times(jacobian.T, np.diag(6 * w * times(jacobian, x)), jacobian)
        for hessian in (over_reverse, reverse_over_reverse):
            np.testing.assert_array_equal(hessian.reshape(expected.shape), expected, name)
