"""Derivatives of matmuls over the wire up to second order, by finite differences in float64.

Every tolerance is counted from the program. An element of a result or of a gradient is a sum of T
products, added in any order. It is rounded at most T times, so its error is at most gamma(T) = T u
/ (1 - T u) of the sum of the products' magnitudes, u = 2**-53 (Higham, "Accuracy and Stability of
Numerical Algorithms", section 3.1). The plain form of ones gives T.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from matmul_forms import FORMS
from support import gamma, make_mesh, mostly_exhaustive

ALGORITHMS = ("ring", "bidirectional_ring", "two_ended")
SCATTERS = (*("rows scattered", "columns scattered", "a batch scattered"), "sum on every rank")


def variants(name):
    """The options to call with: an algorithm, and for a gather what is kept."""
    kept = [{}] if name in SCATTERS else [{"residuals": "save"}, {"residuals": "regather"}]
    return [{"algorithm": algorithm, **one} for algorithm in ALGORITHMS for one in kept]


def reals(form, n):
    """Every rank's factors: random, and so distinct in rank and place."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((n, *shape)) for shape in form.shapes(n)]


def of_all_ranks(call, n, check_vma):
    """The call as a function of the operands of all ranks."""

    def one_rank(x, w):
        return call(x[0], w[0])[None]

    mesh, spec = make_mesh(n), P("x")
    return jax.jit(
        jax.shard_map(one_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    )


DIFFERENCES = [
    (name, options, n, check_vma)
    for i, name in enumerate(FORMS)  # each in another way, on more or fewer ranks
    for options in [variants(name)[i % len(variants(name))]]
    for n, check_vma in [((3, True), (2, False), (3, False), (4, True))[i % 4]]
]


@pytest.mark.parametrize(
    ("name", "options", "n", "check_vma"),
    mostly_exhaustive(DIFFERENCES, lambda name, *_: name == "a batch of weights gathered"),
)
def test_gradients_are_finite_differences(name, options, n, check_vma):
    """Of the result and of its gradients, so up to second order.

    Both have degree two at most along any direction. So a central difference over any distance is
    the derivative, up to roundings, which are fewest at distance 1. No drawn number exceeds 5, and
    no moved one 10.
    """
    form = FORMS[name]
    with jax.enable_x64(True):
        x, w = map(jnp.asarray, reals(form, n))
        ours = of_all_ranks(lambda x, w: form.ours(x, w, **options), n, check_vma)
        plain = of_all_ranks(lambda x, w: form.ours(x, w, algorithm="lax"), n, check_vma)
        pulled = lambda f: lambda x, w, ct: jax.vjp(f, x, w)[1](ct)  # noqa: E731
        ct = jnp.asarray(np.random.default_rng(1).standard_normal(plain(x, w).shape))
        for of, by_plain, operands in [
            (ours, plain, (x, w)),
            (jax.jit(pulled(ours)), jax.jit(pulled(plain)), (x, w, ct)),
        ]:
            assert max(jnp.abs(v).max() for v in operands) < 5
            gradients = jax.tree.leaves(by_plain(*map(jnp.ones_like, operands)))
            terms = float(sum(y.sum() for y in gradients))
            atol = 2 * gamma(terms) * terms * 5 * 10**2
            check_grads(of, operands, 1, modes=("rev",), atol=atol, rtol=0, eps=1.0)
