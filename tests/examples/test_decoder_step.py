"""The training step in plain JAX: the same losses however it is sharded, and whatever is kept."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from examples import decoder_step, text

SIZES = decoder_step.Sizes(2, 32, 4, 2, 8, 48, text.VOCABULARY, 16, 1, master="bfloat16")
WAYS = [
    ((4, 2), {"on_chip": ["query", "context"], "on_host": ["input", "key", "value", "out"]}),
    ((8, 1), {"remat": "minimal"}),
    ((2, 2), {"remat": "minimal_on_host", "rows": 2}),
]


@pytest.mark.parametrize("parallel", [False, True])
def test_losses_depend_neither_on_the_mesh_nor_on_what_is_kept(parallel):
    found = []
    for shape, changed in [((1, 1), {"rows": 8}), *WAYS]:  # 8 rows in each
        mesh = jax.make_mesh(shape, decoder_step.AXES, axis_types=(AxisType.Auto,) * 2)
        with jax.numpy_rank_promotion("allow"):
            found.append(decoder_step.train(replace(SIZES, parallel=parallel, **changed), mesh, 3))
    np.testing.assert_allclose(found[1:], found[:1] * len(WAYS), rtol=2**-8)  # bfloat16
