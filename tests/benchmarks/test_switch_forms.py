"""Collective matmuls in forms for a switch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import make_mesh

from benchmarks.compiled.switch_forms import FORMS, SWITCH_FORMS


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("name", SWITCH_FORMS)
def test_forms_for_a_switch_are_right(name, n):
    """The data are whole numbers, so results are exact. All ranks are compared."""
    rows = jnp.arange(8 * n * 3 * n).reshape(8 * n, 3 * n) % 7 - 3
    w = jnp.arange(3 * n * 2 * n).reshape(3 * n, 2 * n) % 5 - 2
    specs = {
        FORMS[0]: ((P("x"), P(None, "x")), P(None, "x")),
        FORMS[1]: ((P(None, "x"), P("x")), P("x")),
    }
    for form, (ins, out) in specs.items():
        mapped = jax.shard_map(
            SWITCH_FORMS[name][form], mesh=make_mesh(n), in_specs=ins, out_specs=out
        )
        np.testing.assert_array_equal(jax.jit(mapped)(rows, w), rows @ w)
