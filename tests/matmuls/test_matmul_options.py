"""Options of collective matmuls, forward and back: wide sums, other dtypes, precision."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import assert_same, every_rank, make_mesh, mostly_exhaustive, per_rank
from test_matmul_gradients import SCATTERS
from test_matmuls import FORMS

import ringcoll

N = 3
#: Its product is rounded before it is summed; `psum` has tests of its own.
FUSED = [name for name in FORMS if name != "sum of whole products"]
USUAL = (
    *("rows gathered", "contraction gathered", "weight gathered", "several weights"),
    *("rows scattered", "sum on every rank"),
)


def kept(name):
    """What a gather may keep for its gradient."""
    return [{}] if name in SCATTERS else [{"residuals": "save"}, {"residuals": "regather"}]


def there_and_back(call, x, w, ct):
    """The result, and the gradients of both factors for a cotangent."""
    y, pull_back = jax.vjp(call, x, w)
    ct = jnp.resize(ct, y.shape).astype(y.dtype)
    if jax.typeof(ct).mat.varying != jax.typeof(y).mat.varying:
        ct = lax.pmax(ct, "x")
    return y, *pull_back(ct)


@pytest.mark.parametrize(
    ("name", "check_vma"),
    mostly_exhaustive(
        [*((name, i % 2 == 0) for i, name in enumerate(FUSED)), ("sum on every rank", False)],
        lambda name, _: name in USUAL,
    ),
)
def test_wide_sums_are_rounded_once_and_gradients_have_their_factor_s_dtype(name, check_vma):
    """The only right result is exact in float32, and is rounded to nearest."""
    form, rng = FORMS[name], np.random.default_rng(0)
    narrow, single = jnp.bfloat16, jnp.float32
    variants = [{"algorithm": "ring", **more} for more in kept(name)] + [{"algorithm": "lax"}]
    x, w = (rng.integers(-64, 65, (N, *shape)) for shape in form.shapes(N))
    ct = rng.integers(-64, 65, (N, 97))  # a sum of these is exact in bfloat16 as well

    def program(x, w, ct):
        ours, right = {}, {}
        for kinds in [(narrow, narrow), (narrow, single), (single, narrow)]:
            factors = [of.astype(kind) for of, kind in zip((x, w), kinds, strict=True)]
            exact = there_and_back(form.plain, *(of.astype(single) for of in factors), ct)
            to = jnp.promote_types(*kinds), *kinds
            for options in variants if kinds == (narrow, narrow) else variants[:1]:
                case = f"{options} {[jnp.dtype(kind).name for kind in kinds]}"
                call = partial(form.ours, **options, accumulate_dtype=single)
                ours[case] = there_and_back(call, *factors, ct)
                right[case] = tuple(y.astype(kind) for y, kind in zip(exact, to, strict=True))
                if name == "several weights":  # of one, which the test itself adds up in bfloat16
                    ours[case], right[case] = ours[case][:2], right[case][:2]
        return ours, right

    ours, right = per_rank(make_mesh(N), program, x, w, ct, check_vma=check_vma)
    for case in ours:
        assert_same({case: ours[case]}, {case: right[case]})


@pytest.mark.parametrize("algorithm", ["ring", "lax"])
def test_the_gradient_of_a_sum_on_every_rank_is_summed_wide(algorithm):
    """Types are not checked. In bfloat16, 256 + 1 is 256, however often 1 is added."""

    def slope(weight):
        def loss(x):
            options = {"algorithm": algorithm, "accumulate_dtype": jnp.float32}
            y = ringcoll.matmul_all_reduce(x, jnp.eye(4, dtype=x.dtype), "x", **options)
            return (weight * y).sum()

        return jax.grad(loss)(jnp.ones((4, 4), jnp.bfloat16))

    weights = np.array([256, 1, 1, 1], jnp.bfloat16)
    results = per_rank(make_mesh(4), slope, weights, check_vma=False)
    np.testing.assert_array_equal(results, np.full((4, 4, 4), 260))


def products(jaxpr):
    """The precisions of all products of a program."""
    found = []
    for of in jaxpr.eqns:
        if of.primitive.name == "dot_general":
            found.append(of.params["precision"])
        for value in of.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                found += products(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("name", FORMS)
def test_all_products_are_as_precise_as_is_asked_for(name):
    form = FORMS[name]
    operands = [jnp.ones((N, *shape)) for shape in (*form.shapes(N), (7,))]
    for by in ("ring", "lax", "auto"):
        for more in kept(name):
            options = {"algorithm": by, **more}

            def program(x, w, ct, options=options):
                call = lambda x, w: form.ours(x, w, precision="highest", **options)  # noqa: E731
                return there_and_back(call, x, w, ct)

            traced = jax.make_jaxpr(every_rank(make_mesh(N), program, check_vma=True))(*operands)
            found = products(traced.jaxpr)
            assert len(found) >= 3, options
            highest = lax.Precision.HIGHEST
            assert set(found) == {(highest, highest)}, options
