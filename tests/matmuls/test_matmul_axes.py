"""Matmuls over one axis of a mesh whose other axis is explicit, or left to the compiler."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matmul_forms import FORMS
from support import data, make_mesh, mostly_exhaustive, per_rank, with_gradients

from ringcoll.runtime import run as running

N = 4
#: For matrices: shapes of x and w that two ranks of y can share, and which of rows and columns
#: of the result are not sharded.
SHAPES = {
    "rows gathered": ((2, 3), (3, 6), ("columns",)),
    "contraction gathered": ((6, 2), (2 * N, 4), ("rows", "columns")),
    "weight gathered": ((6, 2 * N), (2, 4), ("rows", "columns")),
    "columns of the weight gathered": ((2, 4, 3), (3, 2), ("rows",)),
    "rows scattered": ((2 * N, 3), (3, 6), ("columns",)),
    "columns scattered": ((2, 4, 3), (3, 2 * N), ("rows",)),
    "sum on every rank": ((2, 6, 3), (3, 4), ("columns",)),
}
CASES = [(name, of) for name, (*_, kept) in SHAPES.items() for of in (None, *kept)]
#: Without `-m exhaustive`, few.
FEW = [("rows gathered", "columns"), ("weight gathered", "rows"), ("columns scattered", "rows")]


def operands(name):
    *shapes, _ = SHAPES[name]
    return [data((N, *shape), ranks=16) % 5 - 2 for shape in shapes]


@pytest.mark.parametrize(
    ("axis_type", "check_vma", "unrolled", "algorithm", "cases"),
    mostly_exhaustive(
        [
            (AxisType.Explicit, True, 24, "bidirectional_ring", FEW),
            (AxisType.Explicit, True, 24, "bidirectional_ring", CASES),
            (AxisType.Explicit, False, 24, "bidirectional_ring", CASES),
            (AxisType.Explicit, True, 0, "bidirectional_ring", CASES),  # the carry of a loop
            (AxisType.Explicit, True, 24, "auto", CASES),
            (AxisType.Auto, True, 24, "bidirectional_ring", CASES),
            (AxisType.Auto, False, 24, "bidirectional_ring", CASES),
        ],
        lambda *case: case[-1] is FEW,
    ),
)
def test_beside_an_axis_that_shards_rows_or_columns(
    axis_type, check_vma, unrolled, algorithm, cases, monkeypatch
):
    monkeypatch.setattr(running, "UNROLL_UP_TO", unrolled)
    mesh = make_mesh(N, 2, axis_type=axis_type)

    def put(name, of):
        x, w = operands(name)
        x_spec = P("x", *[None] * (x.ndim - 3), "y" if of == "rows" else None, None)
        w_spec = P("x", None, "y" if of == "columns" else None)
        return [jax.device_put(v, NamedSharding(mesh, s)) for v, s in ((x, x_spec), (w, w_spec))]

    def program(pairs):
        ys = []
        for (name, _), (x, w) in zip(cases, pairs, strict=True):
            ours = with_gradients(partial(FORMS[name].ours, algorithm=algorithm))
            ys.append(jax.tree.map(lambda y: y[None], ours(x[0], w[0])))
        return ys

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            program, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=check_vma
        )
        placed = [put(*case) for case in cases]
        results = jax.jit(mapped)(placed)

    def plain_forms(pairs):
        call = lambda name: with_gradients(partial(FORMS[name].ours, algorithm="lax"))  # noqa: E731
        return {name: call(name)(*pair) for name, pair in pairs.items()}

    by_name = {name: operands(name) for name, _ in cases}
    plain = per_rank(make_mesh(N), plain_forms, by_name, check_vma=check_vma)
    for (name, of), ours, factors in zip(cases, results, placed, strict=True):
        for got, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(plain[name]), strict=True):
            np.testing.assert_array_equal(got, wanted, f"{name} {of}")
        if axis_type == AxisType.Explicit:
            y, gradients = ours
            ends = ["y" if of == end else None for end in ("rows", "columns")]
            assert y.sharding.spec == P("x", *[None] * (y.ndim - 3), *ends)
            for gradient, factor in zip(gradients, factors, strict=True):
                assert gradient.sharding == factor.sharding
