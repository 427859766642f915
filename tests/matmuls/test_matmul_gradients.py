"""Second derivatives of matmuls over the wire, against those of `jax.lax` and an einsum: exact."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from matmul_forms import FORMS
from support import assert_same, data, make_mesh, mostly_exhaustive, per_rank

from ringcoll.matmuls.labels import Scatter
from ringcoll.matmuls.options import Options
from ringcoll.matmuls.overlapped import multiply_and_scatter

ALGORITHMS = ("ring", "bidirectional_ring", "two_ended")


def plain(form, x, w):
    """The collective of a form, then the einsum, or the einsum first."""
    moving, _, out = form.labels
    if form.travels in "xw":
        gather = partial(lax.all_gather, axis_name="x", axis=moving.index(form.label), tiled=True)
        x, w = (gather(x), w) if form.travels == "x" else (x, gather(w))
        return jnp.einsum(form.spec, x, w)
    y = jnp.einsum(form.spec, x, w)
    if form.travels == "sum":
        return lax.psum(y, "x")
    return lax.psum_scatter(y, "x", scatter_dimension=out.index(form.label), tiled=True)


def twice(call, x, w, ct):
    """The gradients, and the gradients of their sum of squares."""

    def squares(x, w, ct):
        gradients = jax.vjp(call, x, w)[1](ct)
        return sum((g**2).sum() for g in gradients), gradients

    return jax.grad(squares, (0, 1, 2), has_aux=True)(x, w, ct)


@pytest.mark.parametrize(
    ("name", "residuals", "n", "check_vma"),
    mostly_exhaustive(
        [
            (name, ("save", "regather")[i % 2], (3, 2, 4)[i % 3], bool(i % 2))
            for i, name in enumerate(FORMS)
        ],
        lambda name, *_: name in ("a batch of weights gathered", "columns scattered"),
    ),
)
def test_second_derivatives(name, residuals, n, check_vma):
    form, mesh = FORMS[name], make_mesh(n)
    kept = {"residuals": residuals} if form.travels in "xw" else {}
    x, w = (data((n, *shape), ranks=2) % 3 - 1 for shape in form.shapes(n))
    ct = data((n, *form.lengths(n)[2]), ranks=2) % 3 - 1

    def program(x, w, ct):
        ours = {a: partial(form.ours, algorithm=a, **kept) for a in ALGORITHMS}
        return {a: twice(call, x, w, ct) for a, call in (ours | {"": partial(plain, form)}).items()}

    found = per_rank(mesh, program, x, w, ct, check_vma=check_vma)
    right = found.pop("")
    for algorithm, ours in found.items():
        assert_same({algorithm: ours}, {algorithm: right})


@pytest.mark.parametrize("algorithm", ["lax", "ring"])
def test_gradients_of_a_sum_of_three_products(algorithm):
    """Such is the gradient of a gather that several products share."""
    n, terms = 3, (("mk", "kf"), ("mk", "kf"), ("km", "fk"))
    shapes = {"mk": (6, 2), "kf": (2, 4), "km": (2, 6), "fk": (4, 2)}
    scatter = Scatter("m", "mf", terms, np.dtype("float32"))

    def by_rounds(*xs):
        pairs = [*zip(xs[::2], xs[1::2], strict=True)]
        return multiply_and_scatter(Options(("x",), algorithm), scatter, pairs)

    def whole(*xs):
        products = zip(terms, xs[::2], xs[1::2], strict=True)
        total = sum(jnp.einsum(f"{a},{b}->mf", x, y) for (a, b), x, y in products)
        return lax.psum_scatter(total, "x", tiled=True)

    def gradients(call):
        return lambda ct, *xs: jax.vjp(call, *xs)[1](ct)

    operands = [data((n, *shapes[labels])) for term in terms for labels in term]
    ct, mesh = data((n, 2, 4)), make_mesh(n)
    ours, theirs = (per_rank(mesh, gradients(f), ct, *operands) for f in (by_rounds, whole))
    assert_same(ours, theirs)
