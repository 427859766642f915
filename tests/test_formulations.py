"""The rings of the search compute what the plain form does, however they are written."""

import chex
import jax
import numpy as np
import pytest
from support import make_mesh

from benchmarks import formulations
from benchmarks.programs import FORMS

OPERANDS = {"all_gather_matmul": ((16, 5), (5, 24)), "matmul_reduce_scatter": ((16, 24), (24, 3))}


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("form", formulations.FORMS)
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
    for name in formulations.NAMES:
        chex.assert_trees_all_equal(run(formulations.formulation(form, name)), plain)
