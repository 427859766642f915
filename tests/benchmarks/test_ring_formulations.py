"""Every formulation of a ring computes what the plain form does."""

import chex
import jax
import numpy as np
import pytest
from support import make_mesh, mostly_exhaustive

from benchmarks.compiled import ring_formulations, rivals
from benchmarks.compiled.programs import FORMS

OPERANDS = {"all_gather_matmul": ((16, 5), (5, 24)), "matmul_reduce_scatter": ((16, 24), (24, 3))}


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("form", ring_formulations.FORMS)
def test_every_formulation_is_the_plain_form(form, n):
    x, w = (
        np.arange(a * n * b * n, dtype=np.float32).reshape(a * n, b * n) % 7 - 3
        for a, b in OPERANDS[form]
    )
    case = FORMS[form]

    def run(function):
        mapped = jax.shard_map(function, mesh=make_mesh(n), in_specs=case.ins, out_specs=case.out)
        return jax.jit(mapped)(x, w)

    plain = run(case.plain)
    chex.assert_trees_all_equal(plain, x @ w)
    for name in ring_formulations.NAMES:
        chex.assert_trees_all_equal(run(ring_formulations.formulation(form, name)), plain)


@pytest.mark.parametrize("n", mostly_exhaustive([1, 2, 3, 8], lambda n: n == 3))
@pytest.mark.parametrize("form", rivals.RIVALS["notebook"])
def test_every_rival_is_the_plain_form(form, n):
    case, mesh = FORMS[form], make_mesh(n)
    sizes = case.shapes(4 * n, 6 * n, 2 * n)
    x, w = (np.arange(np.prod(s), dtype=np.float32).reshape(s) % 7 - 3 for s in sizes)
    for name, calls in rivals.RIVALS.items():
        if form not in calls:
            continue
        by = case.ins[1]
        change = rivals.ARRANGED.get((name, form), lambda w: w)
        arranged = jax.jit(jax.shard_map(change, mesh=mesh, in_specs=by, out_specs=by))(w)
        run = jax.shard_map(calls[form], mesh=mesh, in_specs=case.ins, out_specs=case.out)
        chex.assert_trees_all_equal(jax.jit(run)(x, arranged), x @ w, custom_message=name)
