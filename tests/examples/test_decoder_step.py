"""The training step in plain JAX: the same losses however it is sharded, and whatever is kept."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from examples import decoder_step, text

SIZES = decoder_step.Sizes(2, 32, 4, 2, 8, 48, text.VOCABULARY, 16, 1, master="bfloat16")
WAYS = [
    ((4, 2), {"on_chip": ["query", "context"], "on_host": ["input", "key", "value", "out"]}),
    ((8, 1), {"remat": "minimal", "parts": 4}),
    ((2, 2), {"remat": "minimal_on_host", "rows": 2}),
]


@pytest.mark.parametrize("layer", [{}, {"parallel": True}, {"joined": True, "key_heads": 4}])
def test_losses_depend_neither_on_the_mesh_nor_on_what_is_kept(layer):
    found = []
    for shape, changed in [((1, 1), {"rows": 8}), *WAYS]:  # 8 rows in each
        mesh = jax.make_mesh(shape, decoder_step.AXES, axis_types=(AxisType.Auto,) * 2)
        with jax.numpy_rank_promotion("allow"):
            found.append(decoder_step.train(replace(SIZES, **layer, **changed), mesh, 3))
    np.testing.assert_allclose(found[1:], found[:1] * len(WAYS), rtol=2**-8)  # bfloat16


def test_joined_weights_and_parts_give_the_same_loss_and_gradients():
    mesh = jax.make_mesh((1, 1), decoder_step.AXES, axis_types=(AxisType.Auto,) * 2)
    sizes = replace(SIZES, key_heads=4, master="float32")
    _, (like, _) = decoder_step.program(sizes, mesh)
    whole, batch = decoder_step.init(like, 0)[0], np.arange(2 * 17).reshape(2, 17) * 7 % 256

    def joined(params):
        layers = dict(params["layers"])
        for names in (("query", "key", "value"), ("gate", "up")):
            layers["_".join(names)] = jnp.stack([layers.pop(name) for name in names], 2)
        return {**params, "layers": layers}

    def found(changed, params):
        loss = partial(decoder_step.loss, replace(sizes, **changed), mesh)
        with jax.numpy_rank_promotion("allow"):
            return jax.jit(jax.value_and_grad(loss))(params, batch)

    loss, grads = found({}, whole)
    for changed in ({"joined": True}, {"joined": True, "parts": 2}):
        again, of_joined = found(changed, joined(whole))
        np.testing.assert_allclose(again, loss, rtol=2**-10)
        for a, b in zip(*map(jax.tree.leaves, (of_joined, joined(grads))), strict=True):
            assert np.linalg.norm(a - b) < 2**-6 * np.linalg.norm(b)  # bfloat16
