"""Matmuls over the wire against the plain built-in form: values, gradients, refusals."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import SIZES, assert_same, data, distinct, make_mesh, mostly_exhaustive, per_rank

import ringcoll
from ringcoll.matmuls import auto


@dataclass(frozen=True)
class Form:
    """One way to call, the shapes of a rank's operands on n ranks, and the plain form."""

    ours: object
    shapes: object
    plain: object


def gathered(x, dim):
    return lax.all_gather(x, "x", axis=dim, tiled=True)


def scattered(y, dim):
    return lax.psum_scatter(y, "x", scatter_dimension=dim, tiled=True)


FORMS = {
    "rows gathered": Form(
        lambda x, w, **options: ringcoll.all_gather_matmul(x, w, "x", **options),
        lambda n: ((3, 4), (4, 2)),
        lambda x, w: gathered(x, 0) @ w,
    ),
    "leading dimensions": Form(
        lambda x, w, **options: ringcoll.all_gather_matmul(x, w, "x", **options),
        lambda n: ((2, 3, 4), (4, 2)),
        lambda x, w: gathered(x, 1) @ w,
    ),
    "contraction gathered": Form(
        lambda x, w, **options: ringcoll.all_gather_matmul(x, w, "x", dimension=-1, **options),
        lambda n: ((5, 3), (3 * n, 2)),
        lambda x, w: gathered(x, 1) @ w,
    ),
    "weight gathered": Form(
        lambda x, w, **options: ringcoll.all_gather_matmul(x, w, "x", operand=1, **options),
        lambda n: ((5, 3 * n), (3, 2)),
        lambda x, w: x @ gathered(w, 0),
    ),
    "columns of the weight gathered": Form(
        lambda x, w, **options: ringcoll.all_gather_matmul(
            x, w, "x", operand=1, dimension=-1, **options
        ),
        lambda n: ((5, 4), (4, 3)),
        lambda x, w: x @ gathered(w, 1),
    ),
    "a batch gathered": Form(
        lambda x, w, **options: ringcoll.all_gather_einsum(
            "ebk,ekf->ebf", x, w, "x", gather="e", **options
        ),
        lambda n: ((2, 3, 4), (2 * n, 4, 2)),
        lambda x, w: jnp.einsum("ebk,ekf->ebf", gathered(x, 0), w),
    ),
    "several weights": Form(
        lambda x, w, **options: jnp.concatenate(
            ringcoll.all_gather_matmul(x, [w, 2 * w[:, :1]], "x", **options), 1
        ),
        lambda n: ((3, 4), (4, 2)),
        lambda x, w: gathered(x, 0) @ jnp.concatenate([w, 2 * w[:, :1]], 1),
    ),
    "rows scattered": Form(
        lambda x, w, **options: ringcoll.matmul_reduce_scatter(x, w, "x", **options),
        lambda n: ((3 * n, 4), (4, 2)),
        lambda x, w: scattered(x @ w, 0),
    ),
    "columns scattered": Form(
        lambda x, w, **options: ringcoll.matmul_reduce_scatter(
            x, w, "x", scatter_dimension=-1, **options
        ),
        lambda n: ((2, 3, 4), (4, 3 * n)),
        lambda x, w: scattered(x @ w, 2),
    ),
    "a batch scattered": Form(
        lambda x, w, **options: ringcoll.einsum_reduce_scatter(
            "ebk,ekf->bfe", x, w, "x", scatter="e", **options
        ),
        lambda n: ((2 * n, 3, 4), (2 * n, 4, 2)),
        lambda x, w: scattered(jnp.einsum("ebk,ekf->bfe", x, w), 2),
    ),
    "sum of whole products": Form(
        lambda x, w, **options: ringcoll.matmul_all_reduce(x, w, "x", fused=False, **options),
        lambda n: ((5, 4), (4, 2)),
        lambda x, w: lax.psum(x @ w, "x"),
    ),
    "sum on every rank": Form(
        lambda x, w, **options: ringcoll.matmul_all_reduce(x, w, "x", **options),
        lambda n: ((5, 4), (4, 2)),
        lambda x, w: lax.psum(x @ w, "x"),
    ),
}
BOTH_WAYS = ("rows gathered", "contraction gathered", "weight gathered", "several weights")


def operands(form, n):
    """Every rank's factors: small, so that sums and their gradients are exact."""
    return [data((n, *shape), ranks=8 * n) % 5 - 2 for shape in form.shapes(n)]


def with_gradients(call):
    """The result, and the gradients of a loss in which every element counts differently."""

    def both(x, w):
        def loss(x, w):
            y = call(x, w)
            weights = jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 7 - 3
            return (y * weights).sum(), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
        return y, gradients

    return both


#: The gradient of a sum on every rank is another program if types are checked.
SUMS = ("sum of whole products", "sum on every rank")
#: Every form on every number of ranks, with and without types in turn; for sums on few ranks, both.
CALLS = [
    (name, n, check_vma)
    for i, name in enumerate(FORMS)
    for n in SIZES
    for check_vma in (True, False)
    if (name in SUMS and n in (2, 3)) or check_vma == ((n in (1, 3, 4)) == (i % 2 == 0))
]


def is_usual(name, n, check_vma):
    """Every form on one number of ranks, and every number by two forms."""
    i, turn = [*FORMS].index(name), SIZES.index(n)
    return (turn - i) % 6 == 1 and (name not in SUMS or n not in (2, 3) or check_vma)


@pytest.mark.parametrize(("name", "n", "check_vma"), mostly_exhaustive(CALLS, is_usual))
def test_value_and_gradients_are_those_of_the_plain_form(name, n, check_vma):
    form, mesh = FORMS[name], make_mesh(n)
    # (On CPU "auto" is "lax".)
    variants = [{"algorithm": algorithm} for algorithm in [*distinct("all_gather", n), "auto"]]
    if name in BOTH_WAYS:
        variants += [{"algorithm": "bidirectional_ring", "residuals": "regather"}]

    def program(x, w):
        return {
            "plain": with_gradients(form.plain)(x, w),
            **{
                str(options): with_gradients(
                    lambda x, w, options=options: form.ours(x, w, **options)
                )(x, w)
                for options in variants
            },
        }

    results = per_rank(mesh, program, *operands(form, n), check_vma=check_vma)
    plain = results.pop("plain")
    for options, ours in results.items():
        for got, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
            np.testing.assert_array_equal(got, wanted, options)


def second_order(f):
    """The gradients by both factors of a function of the gradient by one factor."""
    by_w = lambda x, w: jax.grad(lambda w: (f(x, w) ** 2).sum())(w)  # noqa: E731
    return jax.grad(lambda x, w: (by_w(x, w) ** 2).sum(), (0, 1))


TRANSFORMS = {
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), w),
    "vmap of both": lambda f: lambda x, w: jax.vmap(f)(jnp.stack([x, x]), jnp.stack([w, -w])),
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x, w: lax.scan(lambda c, s: (c, f(x * s, w)), 0, jnp.ones(2))[1],
    "second order": second_order,
}


#: Typed or not by turns, too.
TRANSFORMED = [
    (name, transform, (i + j) % 2 == 0)
    for i, name in enumerate(["rows gathered", "contraction gathered", "rows scattered"])
    for j, transform in enumerate(TRANSFORMS)
]
USUAL_TRANSFORMS = {
    "rows gathered": ("vmap", "second order"),
    "contraction gathered": ("vmap of both", "scan"),
    "rows scattered": ("vmap", "remat"),
}


@pytest.mark.parametrize(
    ("name", "transform", "check_vma"),
    mostly_exhaustive(TRANSFORMED, lambda name, transform, _: transform in USUAL_TRANSFORMS[name]),
)
def test_transformed(name, transform, check_vma):
    form, change = FORMS[name], TRANSFORMS[transform]
    ours = change(lambda x, w: form.ours(x, w, algorithm="two_ended"))
    both = lambda x, w: (ours(x, w), change(form.plain)(x, w))  # noqa: E731
    if transform != "second order":
        both = lambda x, w: (with_gradients(ours)(x, w), with_gradients(change(form.plain))(x, w))  # noqa: E731
    assert_same(*per_rank(make_mesh(3), both, *operands(form, 3), check_vma=check_vma))


@pytest.mark.parametrize(
    "algorithm", mostly_exhaustive(["torus", "hamiltonian"], lambda name: name == "hamiltonian")
)
def test_several_axes_by_all_links(algorithm):
    mesh = make_mesh(4, 2)
    x, w = data((8, 3, 4)) % 5, data((8, 4, 2)) % 5

    def program(x, w):
        ours = ringcoll.all_gather_matmul(x, w, ("y", "x"), algorithm=algorithm)
        back = ringcoll.matmul_reduce_scatter(ours, w.T, ("y", "x"), algorithm=algorithm)
        product = lax.all_gather(x, ("y", "x"), tiled=True) @ w
        return (ours, back), (product, lax.psum_scatter(product @ w.T, ("y", "x"), tiled=True))

    assert_same(*per_rank(mesh, program, x, w))


@pytest.mark.parametrize(
    ("name", "turns"),
    [("contraction gathered", False), ("rows scattered", False), ("rows scattered", True)],
)
def test_wide_sums_are_rounded_once(name, turns, monkeypatch):
    monkeypatch.setattr(auto, "turns_pay", lambda *_: turns)
    n, form = 8, FORMS[name]
    xs = [(data((n, *shape)) / 64).astype(jnp.bfloat16) for shape in form.shapes(n)]
    wide = lambda x, w: form.ours(x, w, algorithm="ring", accumulate_dtype=jnp.float32)  # noqa: E731
    exact = lambda x, w: form.plain(x.astype(jnp.float32), w.astype(jnp.float32))  # noqa: E731
    ours, true = per_rank(make_mesh(n), lambda x, w: (wide(x, w), exact(x, w)), *xs)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours, true.astype(jnp.bfloat16))


REFUSED = {
    "one factor": (lambda x, w: ("mk->m", x, w, "x", "m"), "not of two factors"),
    "no such label": (
        lambda x, w: ("mk,kf->mf", x, w, "x", "f"),
        "'f' is not a label of the factor",
    ),
    "a diagonal": (lambda x, w: ("mm,mf->mf", x, w, "x", "m"), "has a label twice"),
    "alone": (lambda x, w: ("mk,jf->mf", x, w, "x", "m"), "stands in one place only"),
    "dimensions": (lambda x, w: ("amk,kf->amf", x, w, "x", "m"), "'amk' does not fit the 2 dim"),
    "sizes": (lambda x, w: ("mk,kf->mf", x, w[1:], "x", "m"), "is of size 4 in x and 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words(case):
    arguments, words = REFUSED[case]

    def call(x, w):
        spec, x, w, axis, gather = arguments(x, w)
        return ringcoll.all_gather_einsum(spec, x, w, axis, gather=gather)

    with pytest.raises(ValueError, match=r"ringcoll\.all_gather_einsum") as error:
        per_rank(make_mesh(3), call, data((3, 3, 4)), data((3, 4, 2)))
    assert words in str(error.value)


def test_rows_that_do_not_divide_are_refused_or_padded_and_cut():
    x, w = data((3, 5, 4)), data((3, 4, 2))
    with pytest.raises(ValueError, match="size 5, not divisible by 3; pad it"):
        per_rank(make_mesh(3), lambda x, w: ringcoll.matmul_reduce_scatter(x, w, "x"), x, w)
    ours = per_rank(make_mesh(3), lambda x, w: ringcoll.matmul_all_reduce(x, w, "x"), x, w)
    np.testing.assert_array_equal(ours, np.broadcast_to((x @ w).sum(0), ours.shape))


def test_of_no_elements():
    """With no rows or no columns, for which lax's collectives cannot be compiled."""
    shapes = {
        "rows gathered": ((0, 4), (4, 2)),
        "columns of the weight gathered": ((5, 4), (4, 0)),
        "rows scattered": ((0, 4), (4, 2)),
        "columns scattered": ((3, 4), (4, 0)),
        "sum on every rank": ((0, 4), (4, 2)),
    }
    xs = {name: tuple(data((3, *shape)) for shape in both) for name, both in shapes.items()}

    def program(xs):
        return {
            f"{name} by {algorithm}": with_gradients(
                partial(FORMS[name].ours, algorithm=algorithm)
            )(*xs[name])
            for name in xs
            for algorithm in ("auto", "lax", "ring")
        }

    for name, (y, gradients) in per_rank(make_mesh(3), program, xs).items():
        x, w = xs[name.rpartition(" by ")[0]]
        assert y.shape == (3, *np.matmul(x, w).shape[1:]), name
        for got, factor in zip(gradients, (x, w), strict=True):
            np.testing.assert_array_equal(got, np.zeros_like(factor), name)


@pytest.mark.parametrize("name", ["rows gathered", "rows scattered"])
def test_gradient_of_a_narrow_factor_beside_a_complex_one(name):
    x, w = operands(FORMS[name], 3)
    x, w = x.astype(jnp.bfloat16), w * np.complex64(1 - 2j)

    def gradients(call, x, w):
        y, pull_back = jax.vjp(call, x, w)
        return pull_back(y)

    def program(x, w):
        ours = [
            gradients(partial(FORMS[name].ours, algorithm=algorithm), x, w)
            for algorithm in ("lax", "ring")
        ]
        return ours, [gradients(FORMS[name].plain, x, w)] * 2

    assert_same(*jax.tree.map(lambda x: x + 0, per_rank(make_mesh(3), program, x, w)))  # no -0.0
