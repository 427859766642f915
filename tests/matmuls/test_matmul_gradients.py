"""Gradients of matmuls over the wire: in float64 on random reals, and by finite differences.

Every tolerance is counted from the program. An element of a result or of a gradient is a sum of T
products, added in any order. It is rounded at most T times, so its error is at most gamma(T) = T u
/ (1 - T u) of the sum of the products' magnitudes, u = 2**-53 (Higham, "Accuracy and Stability of
Numerical Algorithms", section 3.1). The plain form of ones gives T, and the plain form of
magnitudes gives the sum of magnitudes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from support import make_mesh, mostly_exhaustive, per_rank
from test_matmuls import FORMS

ALGORITHMS = ("ring", "bidirectional_ring", "two_ended")
SCATTERS = (
    *("rows scattered", "columns scattered", "a batch scattered"),
    *("sum on every rank", "sum of whole products"),
)


def gamma(terms):
    u = 2.0**-53
    return terms * u / (1 - terms * u)


def variants(name):
    """The options to call with: an algorithm, and for a gather what is kept."""
    kept = [{}] if name in SCATTERS else [{"residuals": "save"}, {"residuals": "regather"}]
    return [{"algorithm": algorithm, **one} for algorithm in ALGORITHMS for one in kept]


def reals(form, n):
    """Every rank's factors: random, and so distinct in rank and place."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((n, *shape)) for shape in form.shapes(n)]


def with_gradients(call):
    """The result, and the gradients of the sum of its elements, each times one of `weights`."""

    def both(x, w, weights):
        def loss(x, w):
            y = call(x, w)
            return (y * weights[: y.size].reshape(y.shape)).sum(), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
        return y, gradients

    return both


#: Every form by another algorithm, on an odd number of ranks or an even one.
USUAL = [
    (name, 2 if i % 2 else 3, i % 2 == 0, ALGORITHMS[i // 2 % 3 :][:1])
    for i, name in enumerate(FORMS)
]
#: By all algorithms; on many ranks, where compiling takes long, by one.
EVERY = [
    *((*case[:3], ALGORITHMS) for case in USUAL),
    *((name, 8, i % 2 == 1, ALGORITHMS[-1:]) for i, name in enumerate(FORMS)),
    *((name, 1, True, ALGORITHMS[:1]) for name in FORMS),
]


@pytest.mark.parametrize(
    ("name", "n", "check_vma", "algorithms"),
    mostly_exhaustive([*USUAL, *EVERY], lambda *case: case in USUAL),
)
def test_gradients_err_no_more_than_their_roundings(name, n, check_vma, algorithms):
    form = FORMS[name]
    chosen = [options for options in variants(name) if options["algorithm"] in algorithms]

    def program(x, w, weights):
        plain = with_gradients(form.plain)
        return {
            "plain": plain(x, w, weights),
            "terms": plain(*map(jnp.ones_like, (x, w, weights))),
            "magnitudes": plain(*map(jnp.abs, (x, w, weights))),
            **{
                str(options): with_gradients(
                    lambda x, w, options=options: form.ours(x, w, **options)
                )(x, w, weights)
                for options in chosen
            },
        }

    weights = np.random.default_rng(1).standard_normal((n, 64 * n))  # a result has fewer elements
    with jax.enable_x64(True):
        operands = (*reals(form, n), weights)
        results = per_rank(make_mesh(n), program, *operands, check_vma=check_vma)
        results = jax.tree.map(np.asarray, results)
    plain, terms, magnitudes = (
        jax.tree.leaves(results.pop(key)) for key in ("plain", "terms", "magnitudes")
    )
    for options, ours in results.items():
        for got, wanted, t, size in zip(
            jax.tree.leaves(ours), plain, terms, magnitudes, strict=True
        ):
            assert got.dtype == np.float64
            # Both have an error, and so has the sum of magnitudes.
            bound = 2 * gamma(t) * size / (1 - gamma(t))
            assert np.all(np.abs(got - wanted) <= bound), options


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
    mostly_exhaustive(DIFFERENCES, lambda name, *_: [*FORMS].index(name) % 6 == 0),
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
        plain = of_all_ranks(form.plain, n, check_vma)
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


@pytest.mark.parametrize("name", ["rows gathered", "rows scattered"])
def test_forward_mode_is_refused_by_jax(name):
    form = FORMS[name]
    ours = of_all_ranks(lambda x, w: form.ours(x, w, algorithm="ring"), 2, True)
    x, w = reals(form, 2)
    with pytest.raises(TypeError, match=r"forward-mode.*custom_vjp"):
        jax.jvp(ours, (x, w), (x, w))
