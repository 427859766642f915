"""Derivatives that `test_calls` does not take: of replicated results and operands.

Collectives are linear, so their gradients are the transposes of `cases`.
"""

from functools import partial

import jax
import numpy as np
import pytest
from cases import LINEAR
from jax import lax
from jax.sharding import PartitionSpec as P
from support import make_mesh, per_rank, runnable

import ringcoll


def test_the_gradient_of_an_all_gather_is_a_psum_scatter():
    def gradient(x, ct):
        gather = partial(ringcoll.all_gather, axis_name="x", tiled=True, algorithm="ring")
        return jax.vjp(gather, x)[1](ct)[0]

    x, ct = np.arange(8.0).reshape(4, 2), np.arange(32.0).reshape(4, 8)
    np.testing.assert_array_equal(per_rank(make_mesh(4), gradient, x, ct), ct.sum(0).reshape(4, 2))


N = 3
MESH = make_mesh(N)
typed_or_not = pytest.mark.parametrize("check_vma", [True, False])


def call(name):
    """The collective, by the algorithm whose turn it is."""
    case, turn = LINEAR[name], [*LINEAR].index(name)
    names = runnable(case.collective, N) if case.takes_algorithm else []
    options = {"algorithm": names[turn % len(names)]} if names else {}
    return lambda x: case.ours(ringcoll, x, "x", N, **options)


CALLS = {name: call(name) for name in LINEAR}


def whole(shape, seed):
    """Multiples of 9, because pmean divides by 3, and its gradient again."""
    return 9 * np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


XS = {name: whole((N, *case.shape(N)), 0) for name, case in LINEAR.items()}
CTS = {name: whole(LINEAR[name].expected(x).shape, 1) for name, x in XS.items()}


@typed_or_not
def test_gradients_of_replicated_results(check_vma):
    """Outside of `shard_map`, the cotangent counts once, not on each rank."""
    names = ["all_gather to invarying", "psum", "pmean"] + ["pbroadcast"] * (not check_vma)

    def of(name):
        call = lambda x: CALLS[name](x[0])  # noqa: E731
        mapped = jax.shard_map(call, mesh=MESH, in_specs=P("x"), out_specs=P(), check_vma=check_vma)
        return jax.vjp(mapped, XS[name])[1](CTS[name][0])[0]

    for name, dx in jax.jit(lambda: {a: of(a) for a in names})().items():
        ct = CTS[name].copy()
        ct[1:] = 0
        # Without types, JAX divides by n what the psum then sums, so results are rounded.
        np.testing.assert_allclose(dx, LINEAR[name].gradient(ct), 1e-6, err_msg=name)


def test_gradients_of_replicated_operands():
    """The gradient has that type too. It sums over all ranks. (lax refuses a pbroadcast.)"""
    names = [name for name in LINEAR if not name.startswith("pbroadcast")]

    def program(xs, cts):
        losses = {a: lambda x, a=a: (cts[a][0] * CALLS[a](x)).sum() for a in names}
        gradients = {a: jax.grad(losses[a])(xs[a]) for a in names}
        assert all(not jax.typeof(dx).mat.varying for dx in gradients.values())
        return gradients

    mapped = jax.shard_map(program, mesh=MESH, in_specs=(P(), P("x")), out_specs=P())
    xs, cts = {a: XS[a][1] for a in names}, {a: CTS[a] for a in names}
    for name, dx in jax.jit(mapped)(xs, cts).items():
        np.testing.assert_array_equal(dx, LINEAR[name].gradient(CTS[name]).sum(0), name)


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
